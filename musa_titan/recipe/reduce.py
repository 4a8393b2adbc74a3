"""Makes of a recipe's command line one that a few CPU processes can train: fewer ranks, smaller sizes, same features.

Every axis of parallelism that the recipe uses stays in use, with the fewest ranks that can be: two, or three pipeline
stages where activation offload asks for them. Sizes shrink with the model's hidden size, so that ratios (grouped
queries, experts chosen of those there are, dense layers before experts, what counts as a layer in the pipeline) remain.
Whatever is changed goes into a list with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from musa_titan.accounting.shape import moe_pattern
from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.commandline import CommandLine

HIDDEN = 64
HEADS = 4
EXPERTS = 8
SEQUENCE = 64
VOCABULARY = 512
STEPS = 5
SMALLER = "sizes shrink with the model"
FEWER = "few processes"


@dataclass(frozen=True)
class Axes:
    """Sizes of the parallel axes."""

    tensor: int
    pipeline: int
    expert: int
    data: int
    chunks: int
    """Virtual stages of a pipeline rank."""

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data


def axes_for(line: CommandLine, chunks: int, processes: int | None) -> Axes:
    """The fewest ranks that keep every axis of the recipe in use, or as many as `processes` allows.

    Raises:
        MusaTitanError: `processes` is not a multiple of what the reduced axes need.
    """
    tensor = min(line.number("--tensor-model-parallel-size"), 2)
    pipeline = line.number("--pipeline-model-parallel-size")
    least = 3 if line.has("--musa-offload") else 2
    pipeline = min(pipeline, least)
    expert = min(line.number("--expert-model-parallel-size"), 2)
    data = max(1, expert // tensor)
    if processes is None:
        return Axes(tensor, pipeline, expert, data, chunks)
    for shape in _smaller(Axes(tensor, pipeline, expert, data, chunks)):
        if processes >= shape.world:
            if processes % (shape.tensor * shape.pipeline * shape.expert):
                continue
            return Axes(
                shape.tensor, shape.pipeline, shape.expert, processes // (shape.tensor * shape.pipeline), shape.chunks
            )
    raise MusaTitanError(f"a rehearsal cannot use exactly {processes} processes; leave --processes away, or give 1")


def _smaller(axes: Axes) -> list[Axes]:
    """`axes`, then with one axis after the other given up: tensor, expert, pipeline."""
    found = [axes]
    if axes.tensor > 1:
        found.append(Axes(1, axes.pipeline, axes.expert, axes.expert, axes.chunks))
    if axes.expert > 1:
        found.append(Axes(1, axes.pipeline, 1, 1, axes.chunks))
    if axes.pipeline > 2:
        found.append(Axes(1, 2, 1, 1, axes.chunks))
    found.append(Axes(1, 1, 1, 1, 1))
    return found


def reduce(line: CommandLine, chunks: int, processes: int | None = None) -> Axes:
    """Change `line` in place; `chunks`: virtual stages of the recipe's pipeline ranks.

    Raises:
        MusaTitanError: see :func:`axes_for`.
    """
    axes = axes_for(line, min(chunks, 2), processes)
    _layout(line, axes, chunks)
    _model(line)
    _batch(line, axes)
    _data(line)
    return axes


def _layout(line: CommandLine, axes: Axes, chunks: int) -> None:
    for flag, size in (
        ("--tensor-model-parallel-size", axes.tensor),
        ("--pipeline-model-parallel-size", axes.pipeline),
        ("--expert-model-parallel-size", axes.expert),
    ):
        if line.has(flag):
            line.set(flag, size, FEWER)
    if axes.tensor == 1:
        line.drop_all(("--sequence-parallel", "--expert-tensor-parallel-size"), "no tensor parallelism is left")
    line.drop("--context-parallel-size", "context parallelism needs Transformer Engine's attention")
    if axes.pipeline == 1:
        gone = "no pipeline is left"
        line.drop_all(("--musa-p2p", "--musa-p2p-slot-bytes", "--musa-zero-bubble", "--musa-offload"), gone)
        line.drop_all(("--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout"), gone)
        line.drop_all(("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"), gone)
        line.drop_all(("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"), gone)
    elif axes.pipeline < 3:
        line.drop("--musa-offload", "offload needs 3 stages")
    if axes.expert == 1 and line.has("--num-experts"):
        line.drop_all(("--moe-flex-dispatcher-backend", "--musa-dispatch", "--musa-fp8-alltoall"), "one expert rank")
        line.set("--moe-token-dispatcher-type", "alltoall", "one expert rank")
    _layers(line, axes, chunks)


def _layers(line: CommandLine, axes: Axes, chunks: int) -> None:
    """Fewer layers, dealt to stages in the recipe's way."""
    before = line.number("--num-layers")
    places = axes.pipeline * axes.chunks
    per_place = 2 if axes.chunks == 1 and before >= 2 * line.number("--pipeline-model-parallel-size") else 1
    if line.has("--pipeline-model-parallel-layout"):
        layers = places - 1
        mtp = "m" * line.number("--mtp-num-layers", 0)
        line.set("--pipeline-model-parallel-layout", "Et|" + "t|" * (places - 2) + mtp + "L", "fewer layers")
    elif line.has("--decoder-first-pipeline-num-layers") or line.has("--decoder-last-pipeline-num-layers"):
        for flag in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"):
            if line.has(flag):
                line.set(flag, 1, "fewer layers")
        layers = places
    else:
        extras = line.has("--account-for-embedding-in-pipeline-split") + line.has(
            "--account-for-loss-in-pipeline-split"
        )
        layers = min(places * per_place - extras, before) if axes.pipeline == 1 else places * per_place - extras
        if line.has("--num-layers-per-virtual-pipeline-stage"):
            line.set("--num-layers-per-virtual-pipeline-stage", 1, "fewer layers")
    line.set("--num-layers", layers, "fewer layers")
    if line.has("--moe-layer-freq") and line.text("--moe-layer-freq").startswith("("):
        dense = min(1, _dense_layers(line.text("--moe-layer-freq"), before))
        line.set("--moe-layer-freq", f"([0]*{dense}+[1]*{layers - dense})", "fewer layers")


def _dense_layers(pattern: str, layers: int) -> int:
    """Layers before the first of experts in a pattern such as ``([0]*3+[1]*58)``."""
    values: list[int] = []
    for part in pattern.strip("()").split("+"):
        bits, _, times = part.partition("*")
        values += [int(bit) for bit in bits.strip("[] ").split(",")] * int(times or 1)
    return moe_pattern(values, layers).index(True)


def _model(line: CommandLine) -> None:
    hidden, heads = line.number("--hidden-size"), line.number("--num-attention-heads")

    def scaled(size: int) -> int:
        return max(16, round(size * HIDDEN / hidden / 16) * 16)

    def shrink(flag: str, value: Callable[[int], int]) -> None:
        if line.has(flag):
            line.set(flag, value(line.number(flag)), SMALLER)

    groups = line.number("--moe-router-num-groups")
    kept_groups = min(groups, 4)
    limit = max(1, round(kept_groups * line.number("--moe-router-group-topk") / groups))
    shrink("--ffn-hidden-size", scaled)
    shrink("--moe-ffn-hidden-size", scaled)
    shrink("--moe-shared-expert-intermediate-size", scaled)
    shrink("--hidden-size", lambda _: HIDDEN)
    shrink("--num-attention-heads", lambda _: HEADS)
    shrink("--num-query-groups", lambda size: max(2, round(HEADS * size / heads)))
    shrink("--kv-channels", lambda _: HIDDEN // HEADS)
    shrink("--q-lora-rank", lambda _: 32)
    shrink("--kv-lora-rank", lambda _: 16)
    shrink("--qk-head-dim", lambda _: 16)
    shrink("--qk-pos-emb-head-dim", lambda _: 8)
    shrink("--v-head-dim", lambda _: 16)
    shrink("--num-experts", lambda size: min(size, EXPERTS))
    shrink("--moe-router-topk", lambda size: min(size, 2))
    shrink("--moe-router-num-groups", lambda _: kept_groups)
    shrink("--moe-router-group-topk", lambda _: limit)


def _batch(line: CommandLine, axes: Axes) -> None:
    sequences = line.number("--micro-batch-size") * axes.data * 2 * axes.pipeline
    line.set("--global-batch-size", sequences, "two microbatches a stage")
    line.set("--seq-length", SEQUENCE, SMALLER)
    line.set("--max-position-embeddings", SEQUENCE, SMALLER)
    line.set("--train-iters", STEPS, "a rehearsal")
    line.set("--lr-warmup-iters", 1, "a rehearsal")
    line.drop("--musa-p2p-slot-bytes", "an activation is smaller; the slot is computed from it")


def _data(line: CommandLine) -> None:
    mock = "random tokens instead of data"
    line.drop_all(("--data-path", "--data-cache-path", "--split", "--tokenizer-model", "--trust-remote-code"), mock)
    line.set("--mock-data", None, mock)
    line.set("--tokenizer-type", "NullTokenizer", mock)
    line.set("--vocab-size", VOCABULARY, mock)
    line.set("--make-vocab-size-divisible-by", 64, mock)
    line.set("--num-workers", 0, mock)
    line.drop_all(("--save", "--load", "--save-interval"), "no checkpoint is written")
