"""Tokens per second of each device and model FLOPs utilisation in the log of every step.

Upstream's ``--log-throughput`` prints TFLOP/s by a convention of its own for each kind of layer, and no tokens. Ours
says with the first line what it counts: 6 x the parameters at work on a token, and causal attention.
"""

from musa_titan.patching.spec import Patch

PATCHES = (
    Patch(
        id="throughput.log",
        kind="wrap",
        target="megatron.training.training:training_log",
        make="musa_titan.pretrain.throughput_binding:log_throughput",
        feature="throughput",
        layer="observe",
        phase="configured",
        why="upstream logs neither tokens per second of a device nor the utilisation of its peak",
        remove_when="Megatron logs both, and says what it counts as a FLOP",
    ),
)
"""One wrap around what Megatron calls after every step."""
