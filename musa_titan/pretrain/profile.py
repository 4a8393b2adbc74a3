"""The pretraining profile: which tables, and how to read settings and the upstream version."""

from __future__ import annotations

import os

from musa_titan.accelerator.select import select_accelerator
from musa_titan.patching.profile import Profile
from musa_titan.pretrain.missing import explain
from musa_titan.pretrain.tables import TABLES
from musa_titan.pretrain.upstream import megatron_version
from musa_titan.settings import Settings, settings_from_environment


def _read_settings() -> Settings:
    return settings_from_environment(os.environ)


PROFILE = Profile(
    name="pretrain",
    tables=TABLES,
    prefixes=("megatron.", "transformer_engine."),
    read_settings=_read_settings,
    select_accelerator=select_accelerator,
    upstream_version=megatron_version,
    explain=explain,
)
