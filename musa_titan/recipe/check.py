"""Judges a recipe before a device is touched: flags, parameters, layers, batch, slots, memory, world size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from musa_titan.accounting import flops, parameters
from musa_titan.accounting.memory import Static, precision_of, sharing_of, static_memory
from musa_titan.accounting.shape import Shape, padded_vocabulary, shape_of
from musa_titan.p2p.config import activation_bytes
from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.ask import Answer, Megatron
from musa_titan.recipe.describe import Recipe

State = Literal["ok", "warning", "problem", "note"]
GIB = 2**30
TIGHT = 0.85
"""Part of the device's memory above which static memory leaves too little for activations to pass without a word."""


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    subject: str
    state: State
    detail: str


@dataclass(frozen=True)
class Report:
    """Everything found out about one recipe."""

    recipe: Recipe
    version: str
    """Of Megatron."""
    findings: list[Finding]
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers for other tables: total, active, static_bytes, flops_per_token, layout …"""

    @property
    def problems(self) -> list[str]:
        return [f"{finding.subject}: {finding.detail}" for finding in self.findings if finding.state == "problem"]


@cache
def models() -> dict[str, dict[str, Any]]:
    """The models that recipes are checked against, by name."""
    found: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
    return found


def check(recipe: Recipe, megatron: Megatron, device_gib: float = 80) -> Report:
    """All findings about `recipe`, with `device_gib` of memory on each device."""
    answer = megatron.ask(recipe.flags, recipe.world_size, recipe.environment)
    findings = [Finding("settings", "problem", problem) for problem in recipe.problems]
    findings += _flags(answer)
    report = Report(recipe, answer.version, findings)
    args = answer.arguments
    if args is None:
        return report
    args.fp8_param_gather = "--fp8-param-gather" in recipe.flags  # our own FP8 layers take it over and clear it
    findings += _parallel(recipe, args)
    report.facts["layout"] = _layout(args)
    findings += _batch(args)
    findings += _slots(args)
    try:
        vocabulary = padded_vocabulary(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
        )
        shape = shape_of(args, vocabulary)
    except MusaTitanError as error:
        findings.append(Finding("parameters", "problem", str(error)))
        return report
    findings += _model(recipe.model, args, shape, report.facts)
    if answer.stages is not None:
        findings += _layers(answer.stages, shape)
        findings += _memory(args, shape, answer.stages, device_gib, report.facts)
    report.facts["flops_per_token"] = flops.flops_per_token(shape, args.seq_length)
    cost = report.facts["flops_per_token"] / 1e9
    findings.append(
        Finding("FLOPs", "note", f"{cost:,.1f} GFLOP a token of {args.seq_length:,}, without recomputation")
    )
    return report


def _flags(answer: Answer) -> Iterator[Finding]:
    for flag, advice in answer.unknown.items():
        yield Finding("flags", "problem", f"{flag} is unknown to megatron-core {answer.version}: {advice}")
    if answer.error is not None:
        yield Finding("flags", "problem", answer.error)
    if not answer.unknown and answer.error is None:
        yield Finding("flags", "ok", f"parsed and validated by megatron-core {answer.version}")
    if answer.te_assumed:
        yield Finding(
            "flags", "note", "Transformer Engine is not installed here; its version gates were taken as passed"
        )


def _parallel(recipe: Recipe, args: Any) -> Iterator[Finding]:
    dense = sharing_of(args).dense if args.use_distributed_optimizer else args.data_parallel_size
    yield Finding(
        "world", "ok", f"{recipe.nodes} x {recipe.devices_per_node} = {recipe.world_size:,} devices, "
        f"{_layout(args)}, {dense:,} data-parallel ranks",
    )  # fmt: skip
    if not args.num_experts:
        return
    group = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    each = args.num_experts // args.expert_model_parallel_size
    yield Finding("experts", "ok", f"{args.num_experts} experts, {each} on a rank, top {args.moe_router_topk}")
    if args.moe_token_dispatcher_type == "flex" and group > recipe.devices_per_node:
        yield Finding(
            "experts", "warning", f"an expert group of {group} ranks spans machines of {recipe.devices_per_node} "
            "devices, which copy engines cannot reach; use DISPATCH=alltoall or an EP that fits",
        )  # fmt: skip


def _layout(args: Any) -> str:
    """The parallel axes, such as ``TP1 x EP8 x PP31``."""
    sizes = (
        ("TP", args.tensor_model_parallel_size),
        ("CP", args.context_parallel_size),
        ("EP", args.expert_model_parallel_size),
        ("PP", args.pipeline_model_parallel_size),
        ("VPP", args.virtual_pipeline_model_parallel_size or 1),
    )
    return " x ".join(f"{name}{size}" for name, size in sizes if size > 1 or name in ("TP", "PP"))


def _batch(args: Any) -> Iterator[Finding]:
    at_once = args.micro_batch_size * args.data_parallel_size
    number, rest = divmod(args.global_batch_size, at_once)
    text = f"{args.global_batch_size:,} sequences = {number:,} microbatches x {args.micro_batch_size} x "
    text += (
        f"{args.data_parallel_size:,} replicas; {args.global_batch_size * args.seq_length / 1e6:,.1f} M tokens a step"
    )
    if rest:
        yield Finding("batch", "problem", f"{args.global_batch_size} sequences are no multiple of {at_once}")
        return
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    if chunks > 1 and number % stages:
        yield Finding(
            "batch", "problem", f"{number} microbatches are no multiple of {stages} stages, as interleaving needs"
        )
        return
    schedule, work = ("ZB-H1", 3 * number) if getattr(args, "musa_zero_bubble", False) else ("1F1B", number * chunks)
    idle = (stages - 1) / (work + stages - 1)  # equal times of forward, input gradient and weight gradient
    if number < stages:
        yield Finding("batch", "warning", f"{text}; fewer microbatches than stages: stages idle {idle:.0%} of a step")
        return
    yield Finding("batch", "ok", text + (f"; stages idle {idle:.1%} of a step under {schedule}" if stages > 1 else ""))


def _slots(args: Any) -> Iterator[Finding]:
    if getattr(args, "musa_p2p", None) != "mooncake":
        return
    needed = activation_bytes(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        hidden_size=args.hidden_size,
        element_size=2 if args.bf16 or args.fp16 else 4,
        context_parallel_size=args.context_parallel_size,
        tensor_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
    )
    given = args.musa_p2p_slot_bytes
    if given is None or given == needed:
        yield Finding("slot", "ok", f"{needed:,} B, one activation{'' if given else ' (computed)'}")
    elif given < needed:
        yield Finding("slot", "warning", f"{given:,} B; an activation is {needed:,} B and travels in chunks")
    else:
        yield Finding("slot", "warning", f"{given:,} B; an activation is {needed:,} B, the rest stays unused")


def _model(name: str, args: Any, shape: Shape, facts: dict[str, Any]) -> Iterator[Finding]:
    total, active = parameters.model(shape).total, parameters.active(shape)
    facts.update(total=total, active=active)
    known = models().get(name)
    if known is None:
        yield Finding("parameters", "warning", f"{total:,} in total, {active:,} active; no model is called {name}")
        return
    differences = list(_differences(known["architecture"], args, shape))
    for difference in differences:
        yield Finding("model", "problem", difference)
    card = known.get("card")
    origin = f"published as {card['total']}, {card['active']} active" if card else "derived from the architecture"
    if total != known["total"]:
        yield Finding("parameters", "problem", f"{total:,}, but {name} has {known['total']:,} ({origin})")
    else:
        yield Finding("parameters", "ok", f"{total:,} ({origin}); {active:,} at work on a token")
    if shape.mtp:
        extra = parameters.mtp(shape).total
        state: State = "ok" if extra == known.get("mtp") else "problem"
        yield Finding("parameters", state, f"{extra:,} more in {shape.mtp} multi-token-prediction layer")


def _differences(architecture: dict[str, Any], args: Any, shape: Shape) -> Iterator[str]:
    for key, published in architecture.items():
        if key == "vocabulary":
            found: Any = shape.vocabulary
        elif key == "dense_layers":
            found = shape.moe.index(True) if True in shape.moe else len(shape.moe)
        elif key in ("beta_fast", "beta_slow"):
            found = getattr(args, key, {"beta_fast": 32, "beta_slow": 1}[key])
        else:
            found = getattr(args, {"norm_epsilon": "layernorm_epsilon"}.get(key, key), None)
        if found != published and not (not found and not published):
            yield f"{key} is {found}, the model's is {published}"


def _layers(stages: list[list[dict[str, Any]]], shape: Shape) -> Iterator[Finding]:
    placed = sorted(layer for row in stages for chunk in row for layer in chunk["layers"])
    if placed != list(range(shape.layers)):
        yield Finding("layers", "problem", f"{len(placed)} layers are placed on stages, the model has {shape.layers}")
        return
    sizes = [tuple(len(chunk["layers"]) for chunk in row) for row in stages]
    counted = Counter("+".join(map(str, size)) for size in sizes)
    text = ", ".join(f"{number} stages of {size}" for size, number in counted.items())
    yield Finding("layers", "ok", f"{shape.layers} layers: {text}" if len(stages) > 1 else f"{shape.layers} layers")


def _memory(
    args: Any, shape: Shape, stages: list[list[dict[str, Any]]], device_gib: float, facts: dict[str, Any]
) -> Iterator[Finding]:
    per_stage = [stage_memory(args, shape, row) for row in stages]
    worst = max(range(len(per_stage)), key=lambda stage: per_stage[stage].total)
    static = per_stage[worst]
    facts["static_bytes"] = static.total
    share = static.total / (device_gib * GIB)
    parts = f"weights {static.weights / GIB:.1f}, gradients {static.gradients / GIB:.1f}, "
    parts += f"optimizer {static.optimizer / GIB:.1f}" + (
        f", FP8 codes {static.codes / GIB:.1f}" if static.codes else ""
    )
    text = f"{static.total / GIB:.1f} of {device_gib:g} GiB before activations, stage {worst} ({parts})"
    if share > 1:
        yield Finding("memory", "problem", f"{text}: more machines (NNODES) divide the optimizer further")
    elif share > TIGHT:
        yield Finding("memory", "warning", f"{text}: little is left for activations")
    else:
        yield Finding("memory", "ok", text)


def stage_memory(args: Any, shape: Shape, row: list[dict[str, Any]]) -> Static:
    """Static memory of a rank of the stage with the chunks `row`."""
    return static_memory(stage_parameters(args, shape, row), precision_of(args), sharing_of(args))


def stage_parameters(args: Any, shape: Shape, row: list[dict[str, Any]]) -> parameters.OnRank:
    """Parameters on one rank of the stage with the chunks `row`."""
    count = parameters.sum_of(parameters.layer(shape, shape.moe[layer]) for chunk in row for layer in chunk["layers"])
    first, last = any(chunk["embedding"] for chunk in row), any(chunk["head"] for chunk in row)
    mtp = any(chunk["mtp"] for chunk in row)
    if first or mtp or (last and shape.tied):  # the embedding is copied to where its output or MTP needs it
        count += parameters.embedding(shape)
    if last:
        count += parameters.head(shape)
    if mtp:
        count += parameters.mtp(shape)
    return count.on_rank(
        args.tensor_model_parallel_size, args.expert_model_parallel_size, args.expert_tensor_parallel_size
    )
