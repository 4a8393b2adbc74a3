"""Gathering weights as codes equals quantising the gathered weights, wherever the ranges of the ranks are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from musa_titan.fp8.backend import NativeBackend
from musa_titan.fp8.gather import Weight, WeightGather
from musa_titan.fp8.quantized import E4M3
from musa_titan.fp8.reference import dequantize, quantize
from test.unit.fp8.ranks import run_ranks

# Between the weights lie 37 and 5 other elements; the buffer is padded so that it divides by the number of ranks.
WEIGHTS = [Weight(37, 200, 300), Weight(37 + 60000, 130, 128), Weight(37 + 60000 + 16640 + 5, 1, 7)]


def flat(world: int) -> torch.Tensor:
    length = WEIGHTS[-1].end + 11
    generator = torch.Generator().manual_seed(0)
    return torch.randn(length + -length % world, generator=generator).bfloat16()


def gather_on(world: int, mode: Any, poison: bool = False, weights: list[Weight] = WEIGHTS) -> list[Any]:
    def on_rank(rank: int, size: int) -> Any:
        whole = flat(size)
        if poison:
            whole[37 + 150 * 300 + 290] = float("inf")
        length = whole.numel() // size
        mine = torch.full_like(whole, 7.0)  # what other ranks own is stale here
        mine[rank * length : (rank + 1) * length] = whole[rank * length : (rank + 1) * length]
        gather = WeightGather(mine, weights, dist.group.WORLD, NativeBackend(), E4M3, mode)
        quantized = gather.start().wait()
        return mine, [(q.codes, q.scale_inv) for q in quantized]

    return run_ranks(on_rank, world)


@pytest.mark.parametrize("mode", ["pow2", "mt"])
@pytest.mark.parametrize("world", [2, 3])
def test_codes_and_scales_equal_those_of_the_gathered_weight(world: int, mode: Any) -> None:
    whole = flat(world)
    for buffer, quantized in gather_on(world, mode):
        inside = torch.zeros(whole.numel(), dtype=torch.bool)
        for weight, (codes, scale_inv) in zip(WEIGHTS, quantized, strict=True):
            values = whole[weight.start : weight.end].view(weight.rows, weight.columns)
            expected = quantize(values, "tile", E4M3, mode)
            assert torch.equal(codes, expected.codes)
            assert torch.equal(scale_inv, expected.scale_inv)
            held = buffer[weight.start : weight.end].view(weight.rows, weight.columns)
            assert torch.equal(held, dequantize(expected, torch.bfloat16))
            inside[weight.start : weight.end] = True
        assert torch.equal(buffer[~inside], whole[~inside])


def test_an_infinity_on_one_rank_makes_the_tile_nan_on_all() -> None:
    for buffer, quantized in gather_on(2, "pow2", poison=True):
        assert quantized[0][1].isnan().tolist() == [[False, False, False], [False, False, True]]
        assert int(buffer.isnan().sum()) == 72 * 44


def test_a_rank_that_owns_no_weight_costs_the_others_no_padding() -> None:
    def on_rank(rank: int, size: int) -> tuple[int, int]:
        sent = {"codes": 0, "rest": 0}

        def count(tensor: torch.Tensor, copies: int) -> None:
            if tensor.dtype != torch.float32:
                sent["codes" if tensor.dtype == torch.uint8 else "rest"] += copies * tensor.nbytes

        gathered, cast = dist.all_gather_single, dist.broadcast
        dist.all_gather_single = lambda out, part, **o: (count(out, 1), gathered(out, part, **o))[1]
        dist.broadcast = lambda tensor, source, **o: (count(tensor, 1), cast(tensor, source, **o))[1]
        buffer = torch.randn(4 * 128 * 128).bfloat16()
        WeightGather(buffer, [Weight(0, 256, 128)], dist.group.WORLD, NativeBackend(), E4M3, "pow2").start().wait()
        return sent["codes"], sent["rest"]

    assert run_ranks(on_rank, 2) == [(256 * 128, 2 * 256 * 128)] * 2
