"""Adam without Transformer Engine or Apex, in a shape that checkpoints survive.

Megatron then falls back to torch's AdamW, which keeps ``step`` in a tensor per parameter. The distributed optimizer
expects a number per parameter group, as in both fused versions.
"""

from musa_titan.patching.spec import Patch

_WHY = (
    "with torch.optim.AdamW the distributed optimizer cannot be resumed: state_dict() asserts one step while the state "
    "is empty, and loading shares one step tensor between all parameters, which AdamW then advances once for each"
)
_REMOVE = "a run of the distributed optimizer on torch.optim.AdamW resumes bitwise"

PATCHES = (
    Patch(
        id="optimizer.adam",
        kind="hook",
        target="megatron.core.optimizer",
        make="musa_titan.pretrain.optimizer_repairs:offer_fused_adam",
        when="musa_titan.pretrain.conditions:fused_optimizers_absent",
        why=_WHY,
        remove_when=_REMOVE,
    ),
    Patch(
        id="optimizer.distributed_adam",
        kind="hook",
        target="megatron.core.optimizer.distrib_optimizer",
        make="musa_titan.pretrain.optimizer_repairs:expect_fused_adam",
        when="musa_titan.pretrain.conditions:fused_optimizers_absent",
        why=_WHY,
        remove_when=_REMOVE,
    ),
    Patch(
        id="optimizer.load_fp32",
        kind="wrap",
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        make="musa_titan.pretrain.optimizer_repairs:without_autograd",
        why="an fp32 main parameter is a view of a leaf with grad: copying a checkpoint into it raises RuntimeError",
        remove_when="an fp32 run of the distributed optimizer resumes without it",
    ),
)
