"""What differs when the CPU plays the device: no streams, one generator, no compiler in the loop."""

from musa_titan.patching.spec import Patch

_HOST = "musa_titan.pretrain.conditions:accelerator_is_host"

PATCHES = (
    Patch(
        id="host.jit_fuser",
        kind="replace",
        target="megatron.core.jit:jit_fuser",
        make="musa_titan.pretrain.host_repairs:no_fusion",
        when=_HOST,
        layer="backend",
        why="torch.compile starts a C++ compiler for every fused function: minutes before the first step",
        remove_when="Megatron's fused functions compile on a CPU within seconds",
    ),
    Patch(
        id="host.splits",
        kind="wrap",
        target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        make="musa_titan.pretrain.host_repairs:splits_on_host",
        when=_HOST,
        layer="backend",
        parameters=("tensor", "as_numpy"),
        why="it converts only tensors with is_cuda, so all_to_all_single gets its split sizes as a tensor: TypeError",
        remove_when="it honours as_numpy for tensors in host memory",
    ),
    Patch(
        id="host.rng_warning",
        kind="hook",
        target="megatron.core.tensor_parallel.random",
        make="musa_titan.pretrain.host_repairs:expect_moving_cpu_state",
        when=_HOST,
        layer="backend",
        why="each fork of the RNG tracker warns that the CPU's state changed, which is where the device's state lives",
        remove_when="the CPU view has a generator of its own for the device",
    ),
    Patch(
        id="host.checkpoint_snapshot",
        kind="wrap",
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.prepare_write_data",
        make="musa_titan.pretrain.host_repairs:snapshot_tensors",
        when=_HOST,
        layer="backend",
        why="an asynchronous save copies tensors of the device, but host tensors may change while it writes them",
        remove_when="the writer copies tensors in host memory",
    ),
)
