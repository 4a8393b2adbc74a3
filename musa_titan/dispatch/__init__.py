"""Token dispatch for expert parallelism: a ``deep_ep`` whose tokens travel by peer copies or by a plain all-to-all.

Knows no training framework. ``buffer`` is the surface, ``routing`` decides who gets what, ``legs`` turns tensors into
rows of bytes and back, ``ace`` and ``collective`` move these, ``native`` adapts an installed DeepEP. ``alltoall`` and
``recompute`` are FP8 for an existing all-to-all and for the experts behind it, ``load`` counts what the router chose.
"""
