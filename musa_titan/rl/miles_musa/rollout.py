"""The actors of miles that hold a rollout engine each."""

from musa_titan.rl.common.rollout import rollout_patches

PATCHES = rollout_patches("miles")
