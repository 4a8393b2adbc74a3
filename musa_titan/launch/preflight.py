"""What is looked at before a machine is reached: the recipe's variables, and which of them the workers get."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.describe import Recipe

PREFIXES = ("MUSA_", "MCCL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "NVTE_", "CUDA_", "MC_", "HF_", "OMP_")
"""Variables of these families reach the workers if they are set where the launch is started."""
OWN = frozenset({"NODE_RANK", "NNODES", "MASTER_ADDR", "LOG_FILE", "PYTHON"})
"""What the launcher itself decides for each machine."""
PATHS = (
    "DATA_PATH", "TOKENIZER_MODEL", "CHECKPOINT_DIR", "OUTPUT_DIR", "DATA_CACHE", "MEGATRON_PATH",
    "TRANSFORMER_ENGINE_SCRIPT",
)  # fmt: skip
"""Variables of a recipe that name the same file on every machine."""
NO_PATH = re.compile(r"|sample|none|[0-9.]+")
"""Other values of these: not given, words with a meaning, and the weights in ``DATA_PATH``."""


def environment_for(recipe: Recipe, here: Mapping[str, str], extra: Sequence[str]) -> dict[str, str]:
    """What is set in every worker script: the recipe's variables and those of the known families, where they are set
    `here`, and `extra` (``NAME`` taken from here, or ``NAME=VALUE``).

    Raises:
        MusaTitanError: an extra name is not set.
    """
    wanted = {*recipe.variables, *recipe.environment} - OWN - {"PYTHONPATH"}
    chosen = {name: value for name, value in here.items() if name in wanted or name.startswith(PREFIXES)}
    for word in extra:
        name, has_value, value = word.partition("=")
        if not has_value and name not in here:
            raise MusaTitanError(f"--env {name}: that variable is not set here; set it, or give {name}=VALUE")
        chosen[name] = value if has_value else here[name]
    return chosen


def refuse_contradictions(recipe: Recipe, hostfile: Path) -> None:
    """`recipe` was described for as many machines as `hostfile` names.

    Raises:
        MusaTitanError: every machine would stop, or each would take a variable for something else.
    """
    given = os.environ.get("NNODES") or str(recipe.nodes)
    if given != str(recipe.nodes):
        raise MusaTitanError(f"NNODES={given} is set, but {hostfile} names {recipe.nodes} machines; unset NNODES")
    recipe.require_sound()
    for name, value in recipe.variables.items():
        if value == f"/set/{name}":
            raise MusaTitanError(f"{name} is not set; `bash {recipe.path.name} --help` says what it is")
    for name in PATHS:
        value = recipe.variables.get(name, "")
        for word in value.split() if name == "DATA_PATH" else [value]:
            if not (word.startswith("/") or NO_PATH.fullmatch(word)):
                raise MusaTitanError(
                    f"{name}={value}: {word} is relative, and the machines start in {recipe.root}; give its full path"
                )
