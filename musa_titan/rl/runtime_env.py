"""The ``runtime_env`` of a Ray job: what its workers must be told, merged into what the user tells them.

Ray workers inherit the environment of the node they run on, not that of the submitting shell, and an ``env_vars`` entry
replaces a variable whole. So the switch that patches a worker has to be in ``env_vars``, and ``PYTHONPATH`` there must
still contain this checkout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from musa_titan.patching.spec import MusaTitanError

SWITCHES = ("SLIME_MUSA_PATCH_AT_STARTUP", "MILES_MUSA_PATCH_AT_STARTUP")
"""Either, set to 1, patches every Python process of the job that imports slime, miles or Megatron."""

FORWARDED_NAMES = ("ACCELERATOR_BACKEND", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS")
FORWARDED_PREFIXES = (
    "MUSA_",
    "MCCL_",
    "MTHREADS_",
    "MUDNN_",
    "MUBLAS_",
    "TORCH_MCCL_",
    "PYTORCH_MUSA_",
    "NCCL_",
    "GLOO_",
    "MC_",
    "SLIME_",
    "MILES_",
    "SGLANG_",
    "RAY_EXPERIMENTAL_NOSET_",
)
"""Variables that concern the job. Never all of ``os.environ``: a shell holds secrets, and names that break a worker."""

REPOSITORY = Path(__file__).resolve().parents[2]


def ray_env(
    framework: str,
    base: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    paths: tuple[str, ...] = (),
    check_workers: bool = False,
) -> dict[str, Any]:
    """A ``runtime_env`` for a job of `framework` (``"slime"`` or ``"miles"``): `base` with our part merged in.

    Args:
        base: a ``runtime_env`` as Ray takes it; what it says in ``env_vars`` wins, and its PYTHONPATH is kept.
        environment: where variables on the allow-list are taken from; not given: this process.
        paths: folders that go on PYTHONPATH as well, such as a checkout of Megatron-LM.
        check_workers: let each worker look whether it was reached, and say so if not (``reached.py``).

    Raises:
        MusaTitanError: an unknown framework, ``env_vars`` that is no mapping of text to text, a preloaded library with
            which no process would start, or a hook in `base` beside `check_workers`.
    """
    if framework not in ("slime", "miles"):
        raise MusaTitanError(f"framework {framework!r} is neither slime nor miles")
    merged = dict(base or {})
    own = _checked(merged.get("env_vars") or {})
    source = os.environ if environment is None else environment
    variables = {name: value for name, value in source.items() if _is_forwarded(name)}
    variables |= own
    variables[f"{framework.upper()}_MUSA_PATCH_AT_STARTUP"] = own.get(f"{framework.upper()}_MUSA_PATCH_AT_STARTUP", "1")
    variables.setdefault("MUSA_TITAN_PATH", str(REPOSITORY))
    if framework == "slime" and variables.get("ACCELERATOR_BACKEND", "musa") == "musa":
        variables.setdefault("MUSA_PATCH_PATH", str(REPOSITORY / "musa_titan" / "rl" / "slime_musa" / "bootstrap"))
    variables.setdefault("RAY_EXPERIMENTAL_NOSET_MUSA_VISIBLE_DEVICES", "1")
    variables["PYTHONPATH"] = _joined(paths, own.get("PYTHONPATH", ""))
    _check_preload(variables.get("LD_PRELOAD", ""))
    merged["env_vars"] = variables
    if check_workers:
        from musa_titan.rl.reached import HOOK

        if merged.setdefault("worker_process_setup_hook", HOOK) != HOOK:
            raise MusaTitanError(
                f"the runtime_env has a worker_process_setup_hook, and Ray runs one only: call {HOOK} from it"
            )
    return merged


def _is_forwarded(name: str) -> bool:
    return name in FORWARDED_NAMES or name.startswith(FORWARDED_PREFIXES)


def _joined(paths: tuple[str, ...], given: str) -> str:
    """This checkout (when it is one: an installed package needs no path), `paths`, and what was given; each once."""
    first = [str(REPOSITORY)] if (REPOSITORY / "sitecustomize.py").is_file() else []
    return os.pathsep.join(dict.fromkeys([*first, *paths, *filter(None, given.split(os.pathsep))]))


def _checked(variables: Any) -> dict[str, str]:
    if not isinstance(variables, Mapping):
        raise MusaTitanError(
            f"env_vars of the runtime_env is {type(variables).__name__}, not a mapping of names to text"
        )
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise MusaTitanError(f"env_vars: {name}={value!r} is not text; put it in quotes")
    return dict(variables)


def _check_preload(value: str) -> None:
    """Refuse an LD_PRELOAD with which no program starts."""
    if not value:
        return
    from musa_titan.rl.common.memory_saver import OFF_SWITCH, preload_problem

    problem = preload_problem(value)
    if problem is not None:
        raise MusaTitanError(
            f"every process of the job would die at its start with LD_PRELOAD={value} ({problem}): {OFF_SWITCH}"
        )
