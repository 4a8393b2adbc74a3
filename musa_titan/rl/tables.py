"""The patch tables of reinforcement learning, after those of pretraining, in the order in which a report lists them."""

from musa_titan.pretrain.tables import TABLES as MEGATRON

TABLES: tuple[str, ...] = (
    *MEGATRON,
    "musa_titan.rl.common.attention",
    "musa_titan.rl.common.sglang",
    "musa_titan.rl.slime_musa.driver",
    "musa_titan.rl.slime_musa.trainer",
    "musa_titan.rl.slime_musa.rollout",
    "musa_titan.rl.miles_musa.driver",
    "musa_titan.rl.miles_musa.trainer",
    "musa_titan.rl.miles_musa.rollout",
)
