"""Activation offload timed by the pipeline schedule.

Between the forward and the backward of a microbatch a pipeline stage keeps its activations. Stage 0 of p stages keeps p
microbatches of them (2(p-1) + (v-1)p + 1 chunks with v virtual stages), and needs only three at any moment: the one
being computed, the one on its way to the host, the one on its way back. The order of work is known before the
iteration starts, so every copy is planned: which block leaves, when its device memory is dropped, when it comes back.

==============  =====================================================================================
``lifetime``    from an order of work: when each block (chunk x microbatch) is born and dies
``plan``        what moves when; ``timeline`` predicts bytes after every event and stalls
``planner``     chooses fractions, drain and prefetch from sizes, times and bandwidth
``saved``       finds what autograd saved for a block, in its graph, without touching the forward
``engine``      carries a plan out: one copy-out and one copy-in stream, every dependency explicit
``pool``        host memory: pinned, on the device's NUMA node, capped; ``numa`` binds it
``device``      streams and events of a device; ``virtual`` the same on a CPU with a clock that can be set
``session``     from one iteration to the next: measure, plan, write the prediction, notice drift
==============  =====================================================================================

Nothing here knows Megatron; ``pretrain/offload.py`` is the binding.
"""
