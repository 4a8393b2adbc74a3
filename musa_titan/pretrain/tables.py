"""The patch tables of pretraining, in the order in which a report lists them."""

TABLES: tuple[str, ...] = (
    "musa_titan.pretrain.entry",
    "musa_titan.pretrain.wheel",
    "musa_titan.pretrain.local_layers",
    "musa_titan.pretrain.optimizer",
    "musa_titan.pretrain.recompute",
    "musa_titan.pretrain.groups",
    "musa_titan.pretrain.host",
    "musa_titan.pretrain.fp8",
    "musa_titan.pretrain.dispatch",
    "musa_titan.pretrain.dispatch_fp8",
    "musa_titan.pretrain.moe_recompute",
    "musa_titan.pretrain.dispatch_load",
    "musa_titan.pretrain.p2p",
    "musa_titan.pretrain.zero_bubble",
    "musa_titan.pretrain.offload",
    "musa_titan.pretrain.throughput",
)
