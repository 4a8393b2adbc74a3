"""Patches for trainer actors: process groups, the accelerator's number, weights on their way to the engines."""

from musa_titan.patching.spec import Patch

_HOST = "musa_titan.pretrain.conditions:accelerator_is_host"
_REPAIRS = "musa_titan.rl.common.trainer_repairs"


def trainer_patches(framework: str) -> tuple[Patch, ...]:
    """The table of `framework` (``"slime"`` or ``"miles"``)."""
    megatron = f"{framework}.backends.megatron_utils"
    return (
        Patch(
            id=f"{framework}.memory_saver_absent",
            kind="around_import",
            target=megatron,
            make="musa_titan.rl.common.memory_saver:stand_in",
            when="musa_titan.rl.common.memory_saver:absent",
            why="the trainer imports torch_memory_saver whether it offloads or not: ModuleNotFoundError",
            remove_when="the trainer imports it only for --offload-train",
        ),
        Patch(
            id=f"{framework}.configure",
            kind="wrap",
            target=f"{megatron}.initialize:init",
            make="musa_titan.rl.configure:configure_before_init",
            why="a trainer actor gets arguments that the driver has validated: nothing in it freezes --musa-… flags",
            remove_when="the framework validates Megatron's arguments in the trainer",
        ),
        Patch(
            id=f"{framework}.local_gpu_id",
            kind="wrap",
            target=f"{framework}.ray.train_actor:get_local_gpu_id",
            make=f"{_REPAIRS}:local_id_under_visible_devices",
            when=f"musa_titan.rl.common.conditions:{framework}_resolves_no_devices",
            required=False,
            why="it reads CUDA_VISIBLE_DEVICES only: under MUSA_VISIBLE_DEVICES a rank asks for a device it cannot see",
            remove_when="the framework resolves the number through its accelerator layer",
        ),
        Patch(
            id=f"{framework}.group_forwards",
            kind="hook",
            target=f"{framework}.utils.reloadable_process_group",
            make=f"{_REPAIRS}:forward_new_collectives",
            why="torch 2.13 dispatches collectives to all_gather_single and the like, which ReloadableProcessGroup "
            "does not forward: No backend type associated with device type cpu",
            remove_when="ReloadableProcessGroup forwards every collective of torch's ProcessGroup",
        ),
        Patch(
            id=f"{framework}.group_options",
            kind="hook",
            target=f"{framework}.utils.distributed_utils",
            make=f"{_REPAIRS}:accept_old_options_name",
            why='it compares torch\'s version as text ("2.13" < "2.6") and passes pg_options, which is gone: TypeError',
            remove_when="init_process_group passes backend_options under torch 2.13",
        ),
        Patch(
            id=f"{framework}.update_backend",
            kind="wrap",
            target=f"{framework}.utils.distributed_utils:init_process_group",
            make=f"{_REPAIRS}:own_collective_backend",
            parameters=("backend",),
            why='the group of trainer and engines is built past torch.distributed\'s own entry with the literal "nccl"',
            remove_when="the framework asks its accelerator for the backend of weight updates",
        ),
        Patch(
            id=f"{framework}.local_names",
            kind="wrap",
            target=f"{megatron}.update_weight.common:named_params_and_buffers",
            make=f"{_REPAIRS}:transformer_engine_names",
            parameters=("args", "model"),
            why="converters know parameters by the names of Transformer Engine's layers; with --transformer-impl local "
            "they raise Unknown parameter name, and expert numbers get no offset under expert parallelism",
            remove_when="a model of local layers converts to Hugging Face names",
        ),
        Patch(
            id=f"{framework}.ipc_on_host",
            kind="hook",
            target=f"{megatron}.sglang",
            make=f"{_REPAIRS}:share_host_tensors",
            when=_HOST,
            layer="backend",
            why="SGLang's reductions rewrite the device index of a GPU tensor's handle: IndexError for host tensors; "
            "file descriptors cannot be passed between processes that are not parent and child",
            remove_when="colocated weight sync runs with tensors in host memory",
        ),
    )
