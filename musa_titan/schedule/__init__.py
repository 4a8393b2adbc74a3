"""Zero bubble (ZB-H1): compute weight gradients where the pipeline would otherwise idle.

A backward pass through a linear layer computes two independent things: the gradient of its input (B), for which the
previous stage waits, and the gradient of its weight (W), for which nobody waits until the optimizer step. 1F1B computes
both together. ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) sends the result of B first and fills
the cooldown of the pipeline with W, which turns (p-1)(F+B+W) of idle time into (p-1)(F+B-W) at the same number of
microbatches in flight.

==============  =====================================================================================
``policy``      how many pending W a stage runs after a backward: one line, shared by all below
``order``       what each stage does in which order: 1F1B, interleaved, ZB-H1
``simulator``   when each step of such orders starts and ends; bubbles and peaks
``closed_form`` makespans as formulas
``store``       the operands of pending weight gradients, and the arithmetic of W
``delayed``     linear layers that keep their own operands (``backward_dw``): Transformer Engine's, FP8
``run``         one training step of one stage: what to run when, and a record of it
``drawing``     a picture of such a record
==============  =====================================================================================

Nothing here knows Megatron; ``pretrain/zero_bubble.py`` is the binding.
"""
