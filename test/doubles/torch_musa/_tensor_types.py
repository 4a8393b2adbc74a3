"""``torch.musa.FloatTensor`` and its kin, for isinstance checks (Megatron's ``core/transformer/module.py``)."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class _TensorType(type):
    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.device.type == "musa" and instance.dtype == cls.dtype

    def __call__(cls, data: Any = ()) -> torch.Tensor:
        return torch.tensor(data, dtype=cls.dtype, device="musa")


def tensor_types() -> dict[str, type]:
    return {name: _TensorType(name, (), {"dtype": dtype}) for name, dtype in DTYPES.items()}
