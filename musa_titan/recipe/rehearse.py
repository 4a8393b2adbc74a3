"""A rehearsal: a scaled-down copy of a recipe trains here, and every stage of the full one is built without memory.

What a rehearsal shows: the flags work together in the real Megatron, the recipe's features start and do their work, the
loss is finite, and each pipeline stage of the full topology has exactly the parameters that were computed for it. What
it does not show: speed, memory, fused kernels, or anything about the devices' own numerics.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from musa_titan.accounting.shape import padded_vocabulary, shape_of
from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.ask import Megatron
from musa_titan.recipe.check import stage_parameters
from musa_titan.recipe.commandline import CommandLine, Substitution
from musa_titan.recipe.describe import Recipe
from musa_titan.recipe.on_cpu import for_cpu, for_shapes
from musa_titan.recipe.reduce import STEPS, Axes, reduce
from musa_titan.recipe.trainer import Trainer

STEP = re.compile(r"iteration +(\d+)/ *\d+ \|.*?lm loss: (\S+)")


@dataclass(frozen=True)
class Training:
    """The scaled-down run."""

    axes: Axes
    substitutions: list[Substitution]
    losses: list[float]
    features: dict[str, int]
    """Feature of the recipe -> number of its patches that were applied in some process."""
    directory: Path


@dataclass(frozen=True)
class Built:
    """One pipeline stage of the full topology."""

    stage: int
    expected: int
    """Parameters on one rank, computed."""
    found: int
    """Parameters of Megatron's own modules."""


@dataclass(frozen=True)
class Stages:
    """All stages of the full topology."""

    world: int
    substitutions: list[Substitution]
    built: list[Built] = field(default_factory=list)

    @property
    def wrong(self) -> list[Built]:
        return [stage for stage in self.built if stage.expected != stage.found]


def train(recipe: Recipe, directory: Path, trainer: Trainer, processes: int | None = None) -> Training:
    """Train ``STEPS`` steps of a scaled-down copy in `directory`.

    Raises:
        MusaTitanError: the recipe is not valid, a rank failed, a step is missing, or a loss is not finite; with the
            end of the log of the rank that failed.
    """
    recipe.require_sound()
    line = CommandLine.of(recipe.flags)
    axes = reduce(line, _chunks(recipe), processes)
    for_cpu(line)
    codes = trainer.train(directory, axes.world, line.words())
    logs = [directory / f"rank{rank}.log" for rank in range(axes.world)]
    if any(codes):
        raise MusaTitanError(f"the rehearsal of {recipe.name} failed; its logs are in {directory}\n{_end_of(logs)}")
    losses = [float(loss) for _, loss in STEP.findall(logs[-1].read_text(errors="replace"))]
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        raise MusaTitanError(f"the rehearsal of {recipe.name} has losses {losses} instead of {STEPS} finite ones")
    return Training(axes, line.changes, losses, _features(directory / "patches"), directory)


def build_stages(recipe: Recipe, megatron: Megatron) -> Stages:
    """Build every pipeline stage of the full topology on the meta device, and count its parameters.

    Raises:
        MusaTitanError: the recipe is not valid, or a stage cannot be built.
    """
    recipe.require_sound()
    line = CommandLine.of(recipe.flags)
    for_shapes(line)
    answer = megatron.ask(line.words(), recipe.world_size, recipe.environment)
    if answer.error is not None or answer.stages is None or answer.arguments is None:
        raise MusaTitanError(f"{recipe.name}: {answer.error}")
    args = answer.arguments
    vocabulary = padded_vocabulary(args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    shape = shape_of(args, vocabulary)
    stages = Stages(recipe.world_size, line.changes)
    per_stage = recipe.world_size // len(answer.stages)
    ranks = [number * per_stage for number in range(len(answer.stages))]
    found = megatron.build(line.words(), recipe.world_size, recipe.environment, ranks)
    for number, row in enumerate(answer.stages):
        stages.built.append(Built(number, stage_parameters(args, shape, row).total, found[number]))
    return stages


def _chunks(recipe: Recipe) -> int:
    """Virtual stages of a pipeline rank, from the recipe's own flags."""
    line = CommandLine.of(recipe.flags)
    stages = line.number("--pipeline-model-parallel-size")
    if line.has("--pipeline-model-parallel-layout"):
        return max(1, _places(line.text("--pipeline-model-parallel-layout")) // stages)
    if line.has("--num-layers-per-virtual-pipeline-stage"):
        extras = line.has("--account-for-embedding-in-pipeline-split") + line.has(
            "--account-for-loss-in-pipeline-split"
        )
        layers = line.number("--num-layers") + extras
        return layers // stages // line.number("--num-layers-per-virtual-pipeline-stage")
    return line.number("--num-virtual-stages-per-pipeline-rank")


def _places(layout: str) -> int:
    """Number of chunks in a layout such as ``Et|(tt|)*30L``."""
    expanded = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout)
    return expanded.count("|") + 1


def _features(directory: Path) -> dict[str, int]:
    applied: dict[str, set[str]] = {}
    for path in directory.glob("*.json"):
        for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
            if record["status"] in ("applied", "late", "drifted"):
                applied.setdefault(record["id"].partition(".")[0], set()).add(record["id"])
    return {feature: len(ids) for feature, ids in sorted(applied.items())}


def _end_of(logs: Iterable[Path]) -> str:
    """The end of the log that shows an error, or of the last one."""
    texts = [path.read_text(errors="replace") for path in logs if path.exists()]
    shown = next((text for text in texts if "Error" in text), texts[-1] if texts else "")
    return "\n".join(shown.splitlines()[-15:])
