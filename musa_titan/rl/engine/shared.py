"""Tensors that a trainer in another process put into shared memory, as SGLang's serializer writes them.

Base64 of a pickle by ``ForkingPickler``, which holds tensors as names of shared memory. A *flattened bucket* is one
tensor of bytes and a list that says which part of it is which weight. SGLang's own classes are not needed to read that,
and importing SGLang would ask for packages that a CPU does not have.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch

ALLOWED = (
    "builtins",
    "collections",
    "copyreg",
    "torch",
    "multiprocessing.resource_sharer",
    "multiprocessing.reduction",
)
"""Modules, and what is below them, whose names a message may use."""

SAFE_BUILTINS = frozenset(
    {"dict", "list", "tuple", "set", "slice", "range", "bytes", "int", "float", "complex", "bool"}
)


class Part:
    """Where one weight lies in a bucket; attributes are those of SGLang's ``FlattenedTensorMetadata``."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "FlattenedTensorMetadata":
            return Part
        allowed = any(module == prefix or module.startswith(f"{prefix}.") for prefix in ALLOWED)
        if not allowed or (module == "builtins" and name not in SAFE_BUILTINS):
            raise pickle.UnpicklingError(f"a weight update may not use {module}.{name}")
        return super().find_class(module, name)


def deserialize(text: str) -> Any:
    """What SGLang's ``MultiprocessingSerializer.serialize(…, output_str=True)`` was given.

    Raises:
        pickle.UnpicklingError: the message names something other than tensors and plain containers.
    """
    return _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()


def named_tensors(text: str, load_format: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs of a message: of a bucket, or of a list of pairs."""
    data = deserialize(text)
    if load_format != "flattened_bucket":
        yield from data
        return
    flat = data["flattened_tensor"]
    for part in data["metadata"]:
        yield part.name, flat[part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape)
