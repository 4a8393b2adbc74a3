"""Repairs that Megatron's wheels need on any machine: nothing here concerns the device.

Megatron is developed in a checkout, inside NVIDIA's container. From a wheel, on Python before 3.12, or without triton,
a few modules fail at import or right after.
"""

from musa_titan.patching.spec import Patch

_TRITON_WHY = "it imports triton at the top without a guard, although its kernels are optional: ModuleNotFoundError"
_TRITON_REMOVE = "the module imports on a machine without triton"

PATCHES = (
    Patch(
        id="wheel.old_transformer_engine",
        kind="around_import",
        target="megatron.core",
        make="musa_titan.pretrain.te_check:refuse_old",
        why="with a Transformer Engine before 2.0 megatron.core fails somewhere inside its own imports",
        remove_when="Megatron checks the version of Transformer Engine before it imports from it",
    ),
    Patch(
        id="wheel.compile_helpers",
        kind="wrap",
        target="megatron.core.datasets.utils:compile_helpers",
        make="musa_titan.pretrain.wheel_repairs:skip_build_of_existing_helpers",
        why="it runs make, but wheels ship the built helpers and no Makefile: initialisation ends with exit code 1",
        remove_when="compile_helpers returns 0 in an installed wheel",
    ),
    Patch(
        id="wheel.typing_override.gpt",
        kind="around_import",
        target="megatron.training.models.gpt",
        make="musa_titan.pretrain.wheel_repairs:typing_with_override",
        when="musa_titan.pretrain.conditions:before_python_312",
        versions=("0.19", None),
        why="it imports override from typing, which Python 3.10 and 3.11 do not have: ImportError",
        remove_when="the module imports on Python 3.11, or 3.12 is the oldest supported version",
    ),
    Patch(
        id="wheel.typing_override.hybrid",
        kind="around_import",
        target="megatron.training.models.hybrid",
        make="musa_titan.pretrain.wheel_repairs:typing_with_override",
        when="musa_titan.pretrain.conditions:before_python_312",
        versions=("0.18", None),
        why="it imports override from typing, which Python 3.10 and 3.11 do not have: ImportError",
        remove_when="the module imports on Python 3.11, or 3.12 is the oldest supported version",
    ),
    Patch(
        id="wheel.triton.paged_stash_ops",
        kind="around_import",
        target="megatron.core.transformer.moe.ops.paged_stash",
        make="musa_titan.pretrain.wheel_repairs:triton_for_paged_stash_ops",
        when="musa_titan.pretrain.conditions:triton_absent",
        versions=("0.19", None),
        why=_TRITON_WHY,
        remove_when=_TRITON_REMOVE,
    ),
    Patch(
        id="wheel.triton.paged_stash",
        kind="around_import",
        target="megatron.core.transformer.moe.paged_stash",
        make="musa_titan.pretrain.wheel_repairs:triton_for_paged_stash",
        when="musa_titan.pretrain.conditions:triton_absent",
        versions=("0.18", "0.19"),
        why=_TRITON_WHY,
        remove_when=_TRITON_REMOVE,
    ),
    Patch(
        id="wheel.triton.batch_invariant_kernels",
        kind="around_import",
        target="megatron.core.transformer.custom_layers.batch_invariant_kernels",
        make="musa_titan.pretrain.wheel_repairs:triton_for_batch_invariant_kernels",
        when="musa_titan.pretrain.conditions:triton_absent",
        versions=(None, "0.17"),
        why=_TRITON_WHY,
        remove_when=_TRITON_REMOVE,
    ),
    Patch(
        id="wheel.triton.tensor_ops",
        kind="around_import",
        target="megatron.core.inference.contexts.attention_context.triton.tensor_ops",
        make="musa_titan.pretrain.wheel_repairs:triton_for_tensor_ops",
        when="musa_titan.pretrain.conditions:triton_absent",
        versions=(None, "0.17"),
        why=_TRITON_WHY,
        remove_when=_TRITON_REMOVE,
    ),
    Patch(
        id="wheel.fused_kernels",
        kind="wrap",
        target="megatron.legacy.fused_kernels:load",
        make="musa_titan.pretrain.wheel_repairs:skip_cuda_kernels",
        when="musa_titan.pretrain.conditions:nccl_absent",
        versions=(None, "0.17"),
        why="it calls nvcc for the kernels of the legacy models: FileNotFoundError where there is no CUDA toolkit",
        remove_when="megatron.training.initialize no longer calls it in any supported version",
    ),
)
