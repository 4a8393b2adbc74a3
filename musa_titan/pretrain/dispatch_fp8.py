"""FP8 messages for Megatron's ``alltoall`` dispatcher.

Upstream sends every all-to-all in the precision of its tensor. The function that does so serves tokens, routing
probabilities and both directions alike, so the two methods that call it say which way they go. The flex dispatcher
needs no patch: its ``deep_ep`` quantises.
"""

from musa_titan.patching.spec import Patch

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_MAKE = "musa_titan.pretrain.dispatch_fp8_binding"
_WHEN = "musa_titan.pretrain.dispatch_rules:alltoall_in_fp8"

PATCHES = (
    Patch(
        id="fp8_alltoall.dispatch",
        kind="wrap",
        target=f"{_DISPATCHER}.token_dispatch",
        make=f"{_MAKE}:announce_dispatch",
        feature="fp8_alltoall",
        layer="comm",
        phase="configured",
        when=_WHEN,
        why="the all-to-all does not know what it carries",
        remove_when="the alltoall dispatcher takes a dtype for its messages, as ncclep does from 0.20 on",
    ),
    Patch(
        id="fp8_alltoall.combine",
        kind="wrap",
        target=f"{_DISPATCHER}.token_combine",
        make=f"{_MAKE}:announce_combine",
        feature="fp8_alltoall",
        layer="comm",
        phase="configured",
        when=_WHEN,
        why="as fp8_alltoall.dispatch",
        remove_when="as fp8_alltoall.dispatch",
    ),
    Patch(
        id="fp8_alltoall.message",
        kind="wrap",
        target="megatron.core.tensor_parallel.mappings:all_to_all",
        make=f"{_MAKE}:send_in_fp8",
        feature="fp8_alltoall",
        layer="comm",
        phase="configured",
        when=_WHEN,
        parameters=("group", "input_", "output_split_sizes_", "input_split_sizes"),
        why="bf16 messages are twice the bytes of what FP8 experts make of them on arrival",
        remove_when="as fp8_alltoall.dispatch",
    ),
)
