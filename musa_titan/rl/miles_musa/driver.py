"""The driver of miles: what is decided before an actor starts."""

from musa_titan.rl.common.driver import driver_patches

PATCHES = driver_patches("miles")
