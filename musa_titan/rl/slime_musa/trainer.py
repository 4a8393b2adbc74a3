"""The trainer actors of slime: Megatron on the accelerator, and the way of its weights to the rollout engines."""

from musa_titan.rl.common.trainer import trainer_patches

PATCHES = trainer_patches("slime")
