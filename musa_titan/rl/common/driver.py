"""Patches for the driver and for whatever places actors on devices."""

from musa_titan.patching.spec import Patch


def driver_patches(framework: str) -> tuple[Patch, ...]:
    """The table of `framework` (``"slime"`` or ``"miles"``)."""
    return (
        Patch(
            id=f"{framework}.noset",
            kind="hook",
            target=f"{framework}.ray.utils",
            make="musa_titan.rl.common.driver_repairs:add_noset_variable",
            why="Ray must leave MUSA_VISIBLE_DEVICES alone in actors that share devices; without the variable in this "
            "list an actor sees one device and every rank asks for number 0",
            remove_when="RAY_EXPERIMENTAL_NOSET_MUSA_VISIBLE_DEVICES is in the framework's own list",
        ),
        Patch(
            id=f"{framework}.memory_saver_check",
            kind="wrap",
            target=f"{framework}.utils.arguments:parse_args",
            make="musa_titan.rl.common.memory_saver:refuse_unusable",
            why="offload preloads torch_memory_saver into trainers; a build for another device ends each at its start, "
            "and Ray starts them again for ever",
            remove_when="the framework tries the preload library before it launches",
        ),
    )
