"""When a patch applies, beside the conditions of pretraining."""

from __future__ import annotations

from importlib.machinery import PathFinder

from musa_titan.patching.spec import Context


def has_accelerator_layer(framework: str) -> bool:
    """Whether this release of `framework` has ``utils/accelerator``, found without importing it."""
    path = None
    for name in (framework, f"{framework}.utils", f"{framework}.utils.accelerator"):
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


def slime_resolves_no_devices(context: Context) -> str | None:
    """For what slime's own accelerator layer does where there is one."""
    return _resolves_no_devices("slime", context)


def miles_resolves_no_devices(context: Context) -> str | None:
    """As above, for miles."""
    return _resolves_no_devices("miles", context)


def _resolves_no_devices(framework: str, context: Context) -> str | None:
    if context.accelerator.device_type != "musa":
        return "devices are numbered by CUDA_VISIBLE_DEVICES, or not at all"
    return f"{framework} has an accelerator layer, which does it" if has_accelerator_layer(framework) else None
