"""The two ends of YaRN's ramp, which Megatron's configuration has and its command line has not."""

from __future__ import annotations

from typing import Any

from musa_titan.patching.spec import MusaTitanError
from musa_titan.settings import Settings

NAMES = ("beta_fast", "beta_slow")


def validate(settings: Settings, args: Any) -> None:
    """Put the given ends among Megatron's arguments: it copies each that its configuration knows by name.

    Raises:
        MusaTitanError: the model has no such ramp, or the ends are the wrong way round.
    """
    given = {name: getattr(settings["yarn"], name) for name in NAMES if getattr(settings["yarn"], name) is not None}
    if not given:
        return
    flags = " and ".join(f"--musa-yarn-{name.replace('_', '-')}" for name in given)
    if not args.multi_latent_attention or getattr(args, "rope_type", "yarn") == "rope":
        raise MusaTitanError(
            f"{flags}: only latent attention with --rope-type yarn has YaRN's ramp here. Drop the flag, or add "
            "--multi-latent-attention --rope-type yarn"
        )
    for name, value in given.items():
        setattr(args, name, value)
    fast, slow = given.get("beta_fast", 32.0), given.get("beta_slow", 1.0)
    if fast < slow or slow <= 0:
        raise MusaTitanError(
            f"--musa-yarn-beta-fast {fast:g} and --musa-yarn-beta-slow {slow:g}: fast must be at least slow, and both "
            "above 0"
        )
