"""Process groups on a backend that is not NCCL."""

from musa_titan.patching.spec import Patch

PATCHES = (
    Patch(
        id="groups.nccl_options",
        kind="replace",
        target="megatron.core.parallel_state:get_nccl_options",
        make="musa_titan.pretrain.groups_repairs:no_options",
        when="musa_titan.pretrain.conditions:nccl_absent",
        layer="backend",
        why="--high-priority-stream-groups and --nccl-communicator-config-path build ProcessGroupNCCL.Options, which "
        "only torch with NCCL has: AttributeError",
        remove_when="get_nccl_options returns None where torch has no ProcessGroupNCCL",
    ),
)
