"""The optimizers Megatron takes from TransformerEngine."""

from typing import Any

import torch

from musa_titan.pretrain.fused_adam import FusedAdam


class FusedSGD(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def multi_tensor_applier(op: Any, noop_flag: Any, tensor_lists: Any, *args: Any) -> Any:
    return op(2048 * 32, noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(chunk: int, noop_flag: Any, tensor_lists: Any, per_parameter: bool = False) -> Any:
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_parameter else None


def multi_tensor_scale(chunk: int, noop_flag: Any, tensor_lists: Any, scale: float) -> None:
    for source, target in zip(tensor_lists[0], tensor_lists[1], strict=True):
        target.copy_(source * scale)


__all__ = ["FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"]
