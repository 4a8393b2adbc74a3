"""The reinforcement-learning profile: pretraining's tables for Megatron, and those of slime and miles."""

from __future__ import annotations

import os

from musa_titan.accelerator.select import select_accelerator
from musa_titan.patching.profile import Profile
from musa_titan.pretrain.missing import explain
from musa_titan.pretrain.upstream import megatron_version
from musa_titan.rl.tables import TABLES
from musa_titan.settings import Settings, settings_from_environment


def _read_settings() -> Settings:
    return settings_from_environment(os.environ)


PROFILE = Profile(
    name="rl",
    tables=TABLES,
    prefixes=("megatron.", "transformer_engine.", "slime.", "miles."),
    read_settings=_read_settings,
    select_accelerator=select_accelerator,
    upstream_version=megatron_version,
    explain=explain,
)
