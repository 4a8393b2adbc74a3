"""The FP8 side of one linear layer: how its operands are quantised, and its quantised weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.fp8 import reference
from musa_titan.fp8.backend import Backend, Form
from musa_titan.fp8.delayed import DelayedScale
from musa_titan.fp8.quantized import Quantized
from musa_titan.fp8.recipe import Operand, Recipe
from musa_titan.fp8.steps import current_step
from musa_titan.fp8.tally import Tally

CACHE_ATTRIBUTE = "musa_titan_fp8"
GATHERED_ATTRIBUTE = "musa_titan_fp8_gathered"


@dataclass(frozen=True)
class CachedWeight:
    """A quantised weight, kept on the parameter it belongs to."""

    step: int | None
    version: int
    address: int
    value: Quantized


class Fp8Layer:
    """Quantisers, products and counts of the layer called `name`."""

    def __init__(self, name: str, recipe: Recipe, backend: Backend, tally: Tally) -> None:
        self.name = name
        self.recipe = recipe
        self.backend = backend
        self.tally = tally
        self.delayed: dict[Operand, DelayedScale] = {}
        if recipe.scaling == "delayed":
            operands: tuple[Operand, ...] = ("input", "weight", "grad")
            self.delayed = {operand: DelayedScale(recipe, recipe.format(operand)) for operand in operands}

    def rows(self, operand: Operand, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> Quantized:
        """`x` [M, N] as fprop and dgrad take it. `group`: ranks that hold other rows of the same matrix, so that one
        scale for the whole tensor is the same on all of them."""
        kind = self.recipe.kinds(operand)[0]
        if self.delayed:
            q = self.delayed[operand].quantize(x)
        elif kind == "tensor" and group is not None:
            amax = x.detach().abs().amax().float()
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
            fmt = self.recipe.format(operand)
            q = reference.quantize_with_scale(x, reference.scales(amax, fmt, self.recipe.mode)[0], fmt)
        else:
            q = self.backend.quantize(x, kind, self.recipe.format(operand), self.recipe.mode)
        self.tally.quantized(q)
        return q

    def columns(self, operand: Operand, x: torch.Tensor, rows: Quantized) -> Quantized:
        """`x` [M, N] as wgrad takes it; `rows`, what :meth:`rows` made of it, serves if blocks have no direction."""
        kind = self.recipe.kinds(operand)[1]
        if kind == rows.kind:
            return rows
        q = self.backend.quantize(x, kind, self.recipe.format(operand), self.recipe.mode)
        self.tally.quantized(q)
        return q

    def weight(self, parameter: torch.Tensor) -> Quantized:
        """The quantised `parameter`, computed once a step (also under recomputation and for every micro-batch)."""
        gathered: CachedWeight | None = getattr(parameter, GATHERED_ATTRIBUTE, None)
        if gathered is not None and gathered.version == parameter._version:
            return gathered.value
        step = current_step()
        cached: CachedWeight | None = getattr(parameter, CACHE_ATTRIBUTE, None)
        key = (step, parameter._version, parameter.data_ptr())
        if cached is not None and key == (cached.step, cached.version, cached.address):
            return cached.value
        q = self.rows("weight", parameter.detach())
        if step is not None:
            setattr(parameter, CACHE_ATTRIBUTE, CachedWeight(*key, q))
        return q

    def product(self, form: Form, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """The counted product `form`; see :mod:`musa_titan.fp8.backend`."""
        self.tally.product(self.name, form)
        return self.backend.gemm(form, a, b, dtype)


def store_gathered(parameter: Any, q: Quantized) -> None:
    """Make `q` the quantised form of `parameter` until the next call, or until something else writes into it."""
    setattr(parameter, GATHERED_ATTRIBUTE, CachedWeight(None, parameter._version, parameter.data_ptr(), q))
