"""The one table of features and their options.

From it come the command-line flags (``--musa-…``, added to Megatron's own parser), the environment variables
(``MUSA_TITAN_…``), validation, the option tables in ``docs/features`` and the digest that ranks compare. An option is
declared once, as a field of its feature's dataclass in ``options.py``. ``settings.py`` reads them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from musa_titan import options

OTHER_VARIABLES = {
    "MUSA_TITAN_PATH": "directory of this checkout, read by slime's accelerator start-up",
    "MUSA_TITAN_TEST_CACHE": "where the tests keep compiled doubles",
}
"""Variables with our prefix that are not options."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row of the table."""

    name: str
    """Key of ``Settings``; the middle of flags and variables (``--musa-<name>-…``) unless `prefix` says otherwise."""
    title: str
    options: type
    """Frozen dataclass whose fields are made with :func:`musa_titan.options.option`."""
    prefix: str | None = None
    switch: str | None = None
    """The option that turns it on when it is neither False, None, ``"off"`` nor ``"default"``; None: always on."""
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    page: str = ""
    """File under ``docs/features``."""
    validate: str = ""
    """``package.module:function``; ``function(settings, megatron_args)`` raises MusaTitanError. Called when on."""
    missing: str = ""
    """``package.module:function``; ``function()`` returns None, or what this machine lacks for the feature, without
    importing torch. What ``musa-titan doctor`` shows."""
    note: str = ""
    """As `missing`, but what is good to know where nothing is missing."""

    def flag(self, name: str) -> str:
        """``--musa-<prefix>-<option>``; the switch is ``--musa-<prefix>`` alone."""
        return "--musa-" + self._joined(name).replace("_", "-")

    def variable(self, name: str) -> str:
        """``MUSA_TITAN_<PREFIX>_<OPTION>``; the switch is ``MUSA_TITAN_<PREFIX>`` alone."""
        return "MUSA_TITAN_" + self._joined(name).upper()

    def destination(self, name: str) -> str:
        """Attribute of the parsed arguments that holds option `name`."""
        return self.flag(name)[2:].replace("-", "_")

    def _joined(self, name: str) -> str:
        prefix = self.name if self.prefix is None else self.prefix
        return prefix if name == self.switch else f"{prefix}_{name}" if prefix else name


FEATURES: tuple[Feature, ...] = (
    Feature(name="runtime", title="Adapter behaviour", options=options.RuntimeOptions, prefix=""),
    Feature(
        name="fp8",
        title="FP8 linear layers",
        options=options.Fp8Options,
        page="fp8.md",
        validate="musa_titan.pretrain.fp8_rules:validate",
        note="musa_titan.fp8.build:describe",
    ),
    Feature(
        name="zero_bubble",
        title="Zero bubble",
        options=options.ZeroBubbleOptions,
        switch="enabled",
        page="zero-bubble.md",
        validate="musa_titan.pretrain.zero_bubble_rules:validate",
    ),
    Feature(
        name="p2p",
        title="Mooncake p2p",
        options=options.P2POptions,
        switch="backend",
        page="mooncake-p2p.md",
        validate="musa_titan.pretrain.p2p_rules:validate",
        missing="musa_titan.pretrain.p2p_rules:missing",
    ),
    Feature(
        name="offload",
        title="Activation offload",
        options=options.OffloadOptions,
        switch="enabled",
        page="activation-offload.md",
        validate="musa_titan.pretrain.offload_rules:validate",
    ),
    Feature(
        name="dispatch",
        title="DeepEP dispatch",
        options=options.DispatchOptions,
        switch="backend",
        page="deepep-ace.md",
        validate="musa_titan.pretrain.dispatch_rules:validate_dispatch",
    ),
    Feature(
        name="fp8_alltoall",
        title="FP8 all-to-all",
        options=options.Fp8AlltoallOptions,
        switch="enabled",
        page="fp8-alltoall.md",
        validate="musa_titan.pretrain.dispatch_rules:validate_fp8",
    ),
    Feature(
        name="moe_recompute",
        title="MoE recompute in FP8",
        options=options.MoeRecomputeOptions,
        switch="enabled",
        needs=("fp8_alltoall",),
        page="moe-recompute.md",
        validate="musa_titan.pretrain.dispatch_rules:validate_recompute",
    ),
    Feature(
        name="expert_load",
        title="Expert load report",
        options=options.ExpertLoadOptions,
        switch="enabled",
        page="deepep-ace.md",
        validate="musa_titan.pretrain.dispatch_rules:validate_load",
    ),
    Feature(
        name="yarn",
        title="YaRN ramp",
        options=options.YarnOptions,
        page="yarn.md",
        validate="musa_titan.pretrain.yarn_rules:validate",
    ),
    Feature(
        name="throughput",
        title="Throughput log",
        options=options.ThroughputOptions,
        switch="enabled",
        page="throughput.md",
        validate="musa_titan.pretrain.throughput_binding:validate",
    ),
    Feature(name="rollout", title="Rollout engine", options=options.RolloutOptions, page="rl.md"),
)


def all_options() -> Iterator[tuple[Feature, dataclasses.Field[Any], type]]:
    """(feature, field, type of its value) in table order; an optional ``T | None`` yields T."""
    for feature in FEATURES:
        hints = typing.get_type_hints(feature.options)
        for spec in dataclasses.fields(feature.options):
            kinds = [kind for kind in typing.get_args(hints[spec.name]) if kind is not type(None)]
            yield feature, spec, kinds[0] if kinds else hints[spec.name]
