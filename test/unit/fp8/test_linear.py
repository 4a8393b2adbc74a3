"""FP8 linear layers against the oracle, alone and under tensor and sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from musa_titan.fp8 import steps
from musa_titan.fp8.backend import Backend, EmulatedBackend, NativeBackend
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.linear import Parallel, fp8_linear
from musa_titan.fp8.quantized import E4M3, E5M2
from musa_titan.fp8.recipe import Recipe
from musa_titan.fp8.reference import dequantize, quantize
from musa_titan.fp8.tally import Tally
from test.unit.fp8.ranks import run_ranks

BLOCK = Recipe()
HYBRID = Recipe(backward=E5M2)
MT = Recipe(scale_mode="mt")
RECIPES = pytest.mark.parametrize(
    "recipe",
    [BLOCK, HYBRID, MT, Recipe(scaling="current"), Recipe(scaling="delayed", backward=E5M2)],
    ids=["pow2", "hybrid", "mt", "current", "delayed"],
)


@pytest.fixture(autouse=True)
def _steps() -> Any:
    yield
    steps.forget()


def layer_of(recipe: Recipe = BLOCK, backend: Backend | None = None) -> Fp8Layer:
    return Fp8Layer("fc", recipe, backend or NativeBackend(), Tally())


def operands(tokens: int = 200, inputs: int = 300, outputs: int = 250, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 1, inputs, generator=generator).bfloat16()
    w = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).bfloat16()
    dy = torch.randn(tokens, 1, outputs, generator=generator).bfloat16()
    return x, w, dy


def train(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, layer: Fp8Layer, **options: Any) -> list[torch.Tensor]:
    """[y, dx, dw]."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = fp8_linear(x, w, None, layer, **options)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad]


def oracle(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, recipe: Recipe) -> list[torch.Tensor]:
    """[y, dx, dw] from quantised operands, in fp64."""
    mode, fx, fg = recipe.scale_mode, recipe.forward, recipe.backward
    flat, grad = x.flatten(0, 1), dy.flatten(0, 1)
    xr, xc = (dequantize(quantize(flat, kind, fx, mode)).double() for kind in ("row", "col"))
    gr, gc = (dequantize(quantize(grad, kind, fg, mode)).double() for kind in ("row", "col"))
    wt = dequantize(quantize(w, "tile", fx, mode)).double()
    return [(xr @ wt.t()).view(dy.shape), (gr @ wt).view(x.shape), gc.t() @ xc]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("backend", [EmulatedBackend(), NativeBackend()], ids=["torch", "native"])
@pytest.mark.parametrize("recipe", [BLOCK, HYBRID, MT], ids=["pow2", "hybrid", "mt"])
def test_all_three_products_equal_the_oracle_up_to_output_rounding(recipe: Recipe, backend: Backend) -> None:
    x, w, dy = operands()
    for ours, exact in zip(train(x, w, dy, layer_of(recipe, backend)), oracle(x, w, dy, recipe), strict=True):
        assert relative(ours, exact) <= 2e-3
        difference = 1 - 2 * (ours.double() * exact).sum() / (ours.double().square() + exact.square()).sum()
        assert float(difference) < 1e-5


def test_fp32_layers_equal_the_oracle_to_1e_5() -> None:
    x, w, dy = (tensor.float() for tensor in operands())
    for ours, exact in zip(train(x, w, dy, layer_of()), oracle(x, w, dy, BLOCK), strict=True):
        assert ours.dtype == torch.float32
        assert relative(ours, exact) <= 1e-5


@RECIPES
def test_error_against_high_precision_is_that_of_fp8_and_not_of_bf16(recipe: Recipe) -> None:
    x, w, dy = operands()
    layer = layer_of(recipe)
    exact = [x.double().flatten(0, 1) @ w.double().t(), dy.double().flatten(0, 1) @ w.double()]
    exact.append(dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1))
    bound = 0.08 if recipe.backward is E5M2 else 0.05
    for ours, truth in zip(train(x, w, dy, layer), exact, strict=True):
        assert 0.01 <= relative(ours.reshape(truth.shape), truth) <= bound


def test_native_and_torch_backends_agree_bitwise() -> None:
    for recipe in (BLOCK, MT, HYBRID):
        a = train(*operands(), layer_of(recipe, EmulatedBackend()))
        b = train(*operands(), layer_of(recipe, NativeBackend()))
        assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


def test_every_product_and_code_is_counted() -> None:
    layer = layer_of(HYBRID)
    x, w, dy = operands()
    train(x, w, dy, layer)
    taken = layer.tally.take()
    assert taken.gemms == {("fc", "fprop"): 1, ("fc", "dgrad"): 1, ("fc", "wgrad"): 1}
    assert taken.codes == {"e4m3": 2 * x.numel() + w.numel(), "e5m2": 2 * dy.numel()}
    assert layer.tally.take().gemms == {}


def test_a_nan_in_the_input_reaches_the_output_and_is_counted() -> None:
    x, w, _ = operands()
    x[5, 0, 7] = float("inf")
    layer = layer_of()
    y = fp8_linear(x, w.requires_grad_(), None, layer)
    assert bool(y[5].isnan().all())
    assert bool(torch.isfinite(y[:5]).all())
    assert layer.tally.nonfinite == 2  # its row block, and its column block kept for wgrad


def test_bias_is_added_in_high_precision_and_gets_its_gradient() -> None:
    x, w, dy = operands()
    bias = torch.randn(250).bfloat16().requires_grad_()
    plain = fp8_linear(x, w, None, layer_of())
    y = fp8_linear(x, w, bias, layer_of())
    assert torch.equal(y, plain + bias)
    y.backward(dy)
    assert torch.equal(bias.grad, dy.flatten(0, 1).sum(0))


def test_saved_input_is_half_of_bf16_and_gone_without_a_weight_gradient() -> None:
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    x, w, _ = operands(tokens=256)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        fp8_linear(x, w.requires_grad_(), None, layer_of())
    assert sum(sizes) - w.nbytes <= 0.52 * x.nbytes
    sizes.clear()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        fp8_linear(x.requires_grad_(), w.detach(), None, layer_of())
    assert sum(sizes) == w.nbytes


@pytest.mark.parametrize("announced", [True, False])
def test_weights_are_quantised_once_a_step_if_steps_are_announced(announced: bool) -> None:
    layer = layer_of()
    x, w, dy = operands()
    w.requires_grad_()
    counted = []
    for _ in range(2):
        if announced:
            steps.new_step()
        for _ in range(3):
            fp8_linear(x, w, None, layer).backward(dy)
        counted.append(layer.tally.take().codes["e4m3"] - 3 * 2 * x.numel() - 3 * 2 * dy.numel())
    assert counted == ([w.numel()] * 2 if announced else [3 * w.numel()] * 2)


def test_a_weight_written_behind_autograd_is_seen_at_the_next_step() -> None:
    layer = layer_of()
    x, w, _ = operands()
    w.requires_grad_()
    steps.new_step()
    before = fp8_linear(x, w, None, layer)
    w.data.mul_(2)  # as a distributed optimizer's gather does: the version counter does not see it
    steps.new_step()
    assert torch.equal(fp8_linear(x, w, None, layer), before * 2)


def test_recomputation_without_gradients_uses_the_same_codes_and_refreshes_after_a_step() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = layer_of()
    x, w, dy = operands()
    x.requires_grad_()
    w.requires_grad_()

    def call(y: torch.Tensor) -> torch.Tensor:
        return fp8_linear(y, w, None, layer)

    results = []
    for run in ("plain", "recompute", "recompute after a step"):
        steps.new_step()
        if run == "recompute after a step":
            w.data.mul_(2)
        y = call(x) if run == "plain" else checkpoint(call, x, use_reentrant=True)
        x.grad = None
        y.backward(dy)
        results.append((y.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert all(torch.equal(2 * a, b) for a, b in zip(results[0], results[2], strict=True))


@pytest.mark.parametrize("zero_out", [True, False])
def test_gradients_accumulate_in_fp32_main_grad(zero_out: bool) -> None:
    x, w, dy = operands()
    weight: Any = torch.nn.Parameter(w)
    weight.main_grad = torch.zeros(w.shape)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = zero_out
    for _ in range(2):
        fp8_linear(x, weight, None, layer_of(), into_main_grad=True).backward(dy)
    assert weight.grad_added_to_main_grad
    assert relative(weight.main_grad, 2 * oracle(x, w, dy, BLOCK)[2]) <= 1e-5
    assert weight.grad.dtype == torch.bfloat16
    assert not zero_out or not weight.grad.any()


@RECIPES
def test_zero_tokens_give_an_empty_output_and_a_zero_weight_gradient(recipe: Recipe) -> None:
    x, w, dy = operands(tokens=0)
    y, dx, dw = train(x, w, dy, layer_of(recipe))
    assert y.shape == (0, 1, 250)
    assert dx.shape == x.shape
    assert not dw.any()


def test_delayed_scales_follow_the_history_of_earlier_steps() -> None:
    from musa_titan.fp8.delayed import roll_all

    recipe = Recipe(scaling="delayed", history=2, history_max=True, margin=1)
    layer = layer_of(recipe)
    scale = layer.delayed["input"]
    for amax, expected in ((4.0, 112.0), (2.0, 112.0), (1.0, 112.0), (8.0, 224.0), (1.0, 56.0)):
        layer.rows("input", torch.full((4, 4), amax))
        assert scale.scale is not None
        assert float(scale.scale) == expected / 2
        roll_all(layer.delayed.values(), None)


# -- several ranks --------------------------------------------------------------------------------------------------


def column_parallel(recipe: Recipe, tokens: int, sequence: bool) -> list[list[torch.Tensor]]:
    """[y, dx, dw] of every rank; weights split over outputs, inputs over tokens if `sequence`."""
    x, w, dy = operands(tokens=tokens, outputs=256)

    def on_rank(rank: int, world: int) -> list[torch.Tensor]:
        group = dist.group.WORLD
        part = x.chunk(world)[rank] if sequence else x
        parallel = Parallel(group, gathers_input=sequence, reduces_dgrad=not sequence)
        return train(part, w.chunk(world)[rank], dy.chunk(world, -1)[rank], layer_of(recipe), parallel=parallel)

    return run_ranks(on_rank)


@pytest.mark.parametrize("tokens", [256, 200], ids=["parts of 128 tokens", "parts of 100 tokens"])
@pytest.mark.parametrize("recipe", [BLOCK, MT, Recipe(scaling="current")], ids=["pow2", "mt", "current"])
def test_sequence_parallel_equals_one_rank(recipe: Recipe, tokens: int) -> None:
    x, w, dy = operands(tokens=tokens, outputs=256)
    ranks = column_parallel(recipe, tokens, sequence=True)
    y, dx, dw = train(x, w, dy, layer_of(recipe))
    block = recipe.scaling == "block"
    joined = [torch.cat([rank[0] for rank in ranks], -1), torch.cat([rank[2] for rank in ranks])]
    for ours, alone in zip(joined, (y, dw), strict=True):
        assert torch.equal(ours, alone) if block else relative(ours, alone) < 0.06
    # Each rank rounds its part of the sum over outputs to bf16 before they are added.
    assert relative(torch.cat([rank[1] for rank in ranks]), dx) < (6e-3 if block else 0.06)


def test_tensor_parallel_without_sequence_parallel_sums_the_input_gradient() -> None:
    x, w, dy = operands(tokens=200, outputs=256)
    ranks = column_parallel(BLOCK, 200, sequence=False)
    y, dx, dw = train(x, w, dy, layer_of())
    assert torch.equal(torch.cat([rank[0] for rank in ranks], -1), y)
    assert torch.equal(torch.cat([rank[2] for rank in ranks]), dw)
    assert torch.equal(ranks[0][1], ranks[1][1])
    assert relative(ranks[0][1], dx) < 6e-3


def test_sequence_parallel_gathers_half_the_bytes_of_bf16() -> None:
    def on_rank(rank: int, world: int) -> int:
        sent = 0
        original = dist.all_gather_single

        def counting(out: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
            nonlocal sent
            sent += part.nbytes
            return original(out, part, **options)

        dist.all_gather_single = counting
        x, w, dy = operands(tokens=256, inputs=512)
        train(x.chunk(world)[rank], w, torch.cat([dy]), layer_of(), parallel=Parallel(dist.group.WORLD, True))
        return sent

    bf16 = 2 * 128 * 512 * 2  # forward and backward
    assert all(0.5 <= sent / bf16 <= 0.52 for sent in run_ranks(on_rank))


def test_formats_are_those_of_the_flags() -> None:
    assert HYBRID.format("grad") is E5M2
    assert BLOCK.format("grad") is E4M3
    assert BLOCK.format("input") is E4M3


# -- overlapped with communication ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("tokens", [384, 150], ids=["aligned parts", "unaligned parts"])
@pytest.mark.parametrize("recipe", [BLOCK, MT, Recipe(scaling="current")], ids=["pow2", "mt", "current"])
def test_gathering_while_multiplying_changes_no_bit(recipe: Recipe, tokens: int, world: int) -> None:
    x, w, dy = operands(tokens=tokens * world, outputs=128 * world)

    def on_rank(rank: int, size: int) -> list[list[torch.Tensor]]:
        results = []
        for overlap in (False, True):
            parallel = Parallel(dist.group.WORLD, gathers_input=True, overlap=overlap)
            layer = layer_of(recipe)
            results.append(
                train(x.chunk(size)[rank], w.chunk(size)[rank], dy.chunk(size, -1)[rank], layer, parallel=parallel)
            )
            assert layer.tally.gemms["fc", "fprop"] == (size if overlap else 1)
        return results

    for plain, overlapped in run_ranks(on_rank, world):
        assert torch.equal(plain[0], overlapped[0])
        assert torch.equal(plain[2], overlapped[2])
        assert torch.equal(plain[1], overlapped[1]) or world > 2
        assert relative(plain[1], overlapped[1]) < 6e-3


@pytest.mark.parametrize("tokens", [256, 100], ids=["aligned parts", "unaligned parts"])
def test_scattering_while_multiplying_equals_scattering_afterwards(tokens: int) -> None:
    x, w, dy = operands(tokens=tokens, inputs=256)

    def on_rank(rank: int, size: int) -> list[list[torch.Tensor]]:
        columns, rows = x.chunk(size, -1)[rank], w.chunk(size, -1)[rank]
        overlapped = train(columns, rows, dy.chunk(size)[rank], layer_of(),
                           parallel=Parallel(dist.group.WORLD, scatters_output=True, overlap=True))  # fmt: skip
        y, dx, dw = train(columns, rows, dy, layer_of())
        part = torch.empty_like(overlapped[0])
        dist.reduce_scatter_single(part, y.contiguous())
        return [overlapped, [part, dx, dw]]

    for overlapped, plain in run_ranks(on_rank):
        assert all(torch.equal(a, b) for a, b in zip(overlapped, plain, strict=True))
