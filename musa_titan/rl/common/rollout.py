"""Patches for actors that hold a rollout engine."""

from musa_titan.patching.spec import Patch

_REPAIRS = "musa_titan.rl.common.rollout_repairs"


def rollout_patches(framework: str) -> tuple[Patch, ...]:
    """The table of `framework` (``"slime"`` or ``"miles"``)."""
    engine = f"{framework}.backends.sglang_utils.sglang_engine"
    return (
        Patch(
            id=f"{framework}.rehearsal_engine",
            kind="wrap",
            target=f"{engine}:launch_server_process",
            make=f"{_REPAIRS}:launch_chosen_engine",
            parameters=("server_args",),
            why="SGLang needs GPU kernels even to be imported as a server: no rollout on a CPU",
            remove_when="SGLang from PyPI serves on a CPU",
        ),
        Patch(
            id=f"{framework}.rehearsal_choice",
            kind="wrap",
            target=f"{engine}:SGLangEngine.init",
            make=f"{_REPAIRS}:read_choice",
            why="launch_server_process gets SGLang's arguments only, --musa-rollout-engine is the framework's",
            remove_when="launch_server_process is given the framework's arguments",
        ),
        Patch(
            id=f"{framework}.engine_update_backend",
            kind="wrap",
            target=f"{engine}:SGLangEngine.init_weights_update_group",
            make=f"{_REPAIRS}:own_update_backend",
            parameters=("backend",),
            why='trainers send the literal "nccl", and the engine passes it on to SGLang',
            remove_when="the framework asks its accelerator for the backend of weight updates",
        ),
        Patch(
            id=f"{framework}.engine_gpu_id",
            kind="wrap",
            target=f"{engine}:_to_local_gpu_id",
            make=f"{_REPAIRS}:engine_id_under_visible_devices",
            when=f"musa_titan.rl.common.conditions:{framework}_resolves_no_devices",
            required=False,
            why="it reads CUDA_VISIBLE_DEVICES only: under MUSA_VISIBLE_DEVICES an engine starts on the wrong device",
            remove_when="the framework resolves the number through its accelerator layer",
        ),
    )
