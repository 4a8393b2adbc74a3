"""A rollout engine for rehearsals: transformers on a CPU behind the part of SGLang's HTTP interface that trainers use.

It exists so that the whole loop of slime or miles (router, Ray actors, rollout manager, trainer, converters, weight
sync) runs on a machine without a GPU. It is slow, generates one request at a time, and is no serving engine.

=============  ====================================================================================
``weights``    a Hugging Face model, and every tensor of its checkpoint format as a view into it
``generate``   sampling with log-probabilities
``updates``    new weights: broadcast from trainers, in shared memory, or from disk
``shared``     reads what trainers put into shared memory
``routes``     SGLang's endpoints, as far as trainers use them
``server``     HTTP, in a process of its own
``launch``     starts that process in place of SGLang
=============  ====================================================================================
"""
