"""One pipeline stage without a pipeline: model chunks run in the order of a schedule, on inputs made up by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from musa_titan.offload.engine import Engine
from musa_titan.offload.lifetime import Block
from musa_titan.offload.measure import Bandwidth
from musa_titan.offload.planner import Wishes
from musa_titan.offload.pool import HostPool
from musa_titan.offload.session import Session
from musa_titan.offload.virtual import VirtualDevice
from musa_titan.schedule.order import Order, Step, interleaved, one_forward_one_backward


def order(stage: int, stages: int, chunks: int, microbatches: int) -> Order:
    """Of 1F1B, or of the interleaved schedule for more than one chunk."""
    if chunks == 1:
        return one_forward_one_backward(stage, stages, microbatches)
    return interleaved(stage, stages, microbatches, chunks)


ORDER = order(0, 4, 2, 8)


class Shape(NamedTuple):
    """Of a block's input: [tokens, hidden], fp32."""

    tokens: int
    hidden: int


TINY = Shape(tokens=24, hidden=32)


class Layer(torch.nn.Module):
    """Attention-like and MLP-like parts that save what a transformer layer saves, views and shared tensors included."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = torch.softmax((q * rope) @ (k * rope).t(), dim=-1)
        x = x + scores @ v
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Chunk(torch.nn.Module):
    """Two layers; `rope` is made once, in the first forward, and held by the module: shared by all blocks."""

    def __init__(self, shape: Shape = TINY) -> None:
        super().__init__()
        self.shape = shape
        self.layers = torch.nn.ModuleList([Layer(shape.hidden), Layer(shape.hidden)])
        self.rope: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rope is None:
            self.rope = torch.linspace(0, 1, x.numel(), device=x.device).view_as(x).cos().to(x.dtype)
        for layer in self.layers:
            x = layer(x, self.rope)
        return x * 1.5


def make_chunks(count: int, kind: Callable[[Shape], Chunk] = Chunk, shape: Shape = TINY) -> list[Chunk]:
    torch.manual_seed(1)
    return [kind(shape) for _ in range(count)]


@dataclass
class Run:
    """Everything one iteration computes."""

    outputs: list[torch.Tensor] = field(default_factory=list, repr=False)
    input_grads: dict[Block, torch.Tensor] = field(default_factory=dict, repr=False)
    grads: list[torch.Tensor] = field(default_factory=list, repr=False)
    after_event: list[Any] = field(default_factory=list)

    def equals(self, other: Run) -> bool:
        mine = [*self.outputs, *self.input_grads.values(), *self.grads]
        theirs = [*other.outputs, *other.input_grads.values(), *other.grads]
        return len(mine) == len(theirs) and all(map(same_bits, mine, theirs))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaNs included."""
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def run_iteration(
    chunks: Sequence[Chunk],
    order: Sequence[Step],
    session: Session | None = None,
    *,
    key: object = None,
    after_event: Callable[[], Any] = lambda: None,
    during: Callable[[Step], None] = lambda step: None,
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    keep_outputs: bool = True,
    place: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Run:
    """Run `order`; `during` is called inside each event (a device's clock may advance there), `place` brings inputs to
    the device and dtype of the chunks."""
    run = Run()
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for parameter in parameters:
        parameter.grad = None
    excluded = {parameter.untyped_storage()._cdata for parameter in parameters}
    waiting: dict[Block, tuple[torch.Tensor, torch.Tensor]] = {}
    if session is not None:
        session.begin(key if key is not None else len(order), lambda: order)
    for step in order:
        block = Block(step.chunk, step.microbatch)
        if step.kind == "F":
            if session is not None:
                session.before_forward()
            x = place(seeded(block, 0, chunks[0].shape)).requires_grad_()
            with around_forward():
                y = chunks[step.chunk](x)
            during(step)
            waiting[block] = (x, y)
            if keep_outputs:
                run.outputs.append(y.detach().clone())
            if session is not None:
                session.after_forward(block, [y], [x], excluded)
        else:
            if session is not None:
                session.before_backward(block)
            x, y = waiting.pop(block)
            y.backward(place(seeded(block, 1, chunks[0].shape)))
            during(step)
            assert x.grad is not None
            if keep_outputs:
                run.input_grads[block] = x.grad
            if session is not None:
                session.after_backward(block)
        del x, y
        run.after_event.append(after_event())
    if session is not None:
        session.end()
    if keep_outputs:
        run.grads = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    return run


def seeded(block: Block, what: int, shape: Shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * what + 100 * block.chunk + block.microbatch)
    return torch.randn(shape, generator=generator)


def make_session(device: VirtualDevice | None = None, host: int = 1 << 30, **wishes: Any) -> Session:
    """Everything moves and comes back one event early, unless `wishes` say otherwise; `host`: its bytes."""
    wishes = {"fraction": 1.0, "prefetch": 1, **wishes}
    engine = Engine(device or VirtualDevice(), HostPool(host), label="rank 5, pipeline stage 1 of 4")
    return Session(engine, Wishes(**wishes), bandwidth=lambda: Bandwidth(1e12, 1e12))
