"""Real miles-rl from PyPI, real Ray, Megatron as trainer, on a CPU: the whole loop, as ``rehearse_cpu.sh`` runs it.

Three runs are whole loops: two pipeline stages with weights broadcast, two expert-parallel ranks with weights in shared
memory, and one trainer whose weights never reach the engine, the negative control. What concerns trainers alone
is tried on the rollout that the first of them has recorded, without an engine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from test.integration.test_rl_checkpoint import convert_back_and_compare

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-rl" / "bin" / "python"
TIMEOUT = 300


@dataclass(frozen=True)
class Rehearsal:
    folder: Path
    status: int
    output: str
    log: str
    iterations: list[dict[str, Any]]
    problems: list[str]
    left: list[psutil.Process]
    """Processes of the job, by its folder in their environment, that outlived the script."""


@pytest.fixture(scope="module")
def rehearse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rehearsal]:
    """``rehearse("pp2", SYNC="colocated")``: one run of the script; the tiny model is made by the first and shared."""
    assert PYTHON.is_file(), f"{PYTHON} is missing: run `bash test/run.sh`, which installs miles there"
    shared = tmp_path_factory.mktemp("rehearsals")

    def run(name: str, *flags: str, during: Callable[..., None] | None = None, **variables: str) -> Rehearsal:
        folder = shared / name
        folder.mkdir()
        if (shared / "model").is_dir():
            shutil.copytree(shared / "model", folder / "model")
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = {**inherited, "SETUP": "no", "OUTPUT_DIR": str(folder), **variables}
        command = ["bash", str(ROOT / "examples/rl/miles/rehearse_cpu.sh"), *(["--", *flags] if flags else [])]
        script = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=shared
        )
        if during is not None:
            during(psutil.Process(script.pid), folder / "log.txt")
        output, _ = script.communicate(timeout=TIMEOUT)
        if not (shared / "model").is_dir():
            shutil.copytree(folder / "model", shared / "model")
        summary = json.loads((folder / "summary.json").read_text())
        log = (folder / "log.txt").read_text()
        return Rehearsal(
            folder, script.returncode, output, log, summary["iterations"], summary["problems"], processes_with(folder)
        )

    return run


def processes_with(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OUTPUT_DIR") == str(folder):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollouts")


@pytest.fixture(scope="module")
def pipeline(rehearse: Callable[..., Rehearsal], rollouts: Path) -> Rehearsal:
    return rehearse(
        "pipeline", "--save-debug-rollout-data", f"{rollouts}/{{rollout_id}}.pt", LAYOUT="pp2", SYNC="distributed"
    )


@pytest.fixture(scope="module")
def train(rehearse: Callable[..., Rehearsal], pipeline: Rehearsal, rollouts: Path) -> Callable[..., Rehearsal]:
    """``train("mooncake", "--musa-p2p", ...)``: one step of trainers alone, on the pipeline's first rollout."""
    alone = ("--debug-train-only", "--load-debug-rollout-data", f"{rollouts}/{{rollout_id}}.pt")
    return lambda name, *flags, **variables: rehearse(name, *alone, *flags, NUM_ROLLOUT="1", **variables)


@pytest.fixture(scope="module")
def experts(rehearse: Callable[..., Rehearsal], pipeline: Rehearsal) -> Rehearsal:
    return rehearse("experts", LAYOUT="ep2", SYNC="colocated")


@pytest.fixture(scope="module")
def without_sync(rehearse: Callable[..., Rehearsal], pipeline: Rehearsal) -> Rehearsal:
    return rehearse("without-sync", "--debug-skip-weight-update", LAYOUT="single")


@pytest.fixture(params=["pipeline", "experts"])
def complete(request: pytest.FixtureRequest) -> Rehearsal:
    return request.getfixturevalue(request.param)


def test_three_iterations_with_reward_and_loss(complete: Rehearsal) -> None:
    assert complete.status == 0, complete.output[-3000:] + complete.log[-3000:]
    assert len(re.findall(r"^iteration \d+: reward \S+  loss \S+", complete.output, re.MULTILINE)) == 3
    assert all(one["grad_norm"] > 0 for one in complete.iterations)
    assert complete.left == []


def test_the_engine_has_the_trainers_weights(complete: Rehearsal) -> None:
    assert all(one["logprob_difference"] < 0.05 for one in complete.iterations)


def test_without_weight_sync_the_difference_shows_and_the_script_fails(without_sync: Rehearsal) -> None:
    assert without_sync.status == 1
    assert without_sync.iterations[0]["logprob_difference"] < 0.05  # both started from one checkpoint
    assert without_sync.iterations[-1]["logprob_difference"] > 0.1
    assert "their weights are not the same" in without_sync.problems[-1]


def test_first_gradient_norm_is_equal_in_all_layouts(
    pipeline: Rehearsal, experts: Rehearsal, without_sync: Rehearsal
) -> None:
    """The first rollout is the same in all: the engine's sampling depends on prompts only, not on their order."""
    norms = [run.iterations[0]["grad_norm"] for run in (without_sync, pipeline, experts)]
    assert max(norms) - min(norms) < 1e-6 * max(norms), norms


def test_mooncake_and_offload_in_the_trainers_stages_give_the_same_gradient_bitwise(
    train: Callable[..., Rehearsal], pipeline: Rehearsal, tmp_path: Path
) -> None:
    """Features of pretraining, switched on in miles by the flags that pretraining has."""
    mooncake = ("--musa-p2p", "mooncake", "--musa-p2p-transport", "tcp")
    # Two stages hold so little that a block is away only if its way back is not hidden.
    offload = (
        "--musa-offload --musa-offload-short-pipeline --musa-offload-prefetch 0 --musa-offload-min-bytes 0".split()
    )
    run = train("stages", *mooncake, *offload, "--musa-offload-report-dir", str(tmp_path), LAYOUT="pp2")
    assert run.status == 0, run.output[-3000:] + run.log[-3000:]
    assert "pipeline [0, 1] uses Mooncake over tcp" in run.log
    moved = json.loads((tmp_path / "offload.rank0.jsonl").read_text().splitlines()[-1])
    assert moved["counters"]["copied_in"] == moved["counters"]["copied_out"] > 0
    assert run.iterations[0]["grad_norm"] == pipeline.iterations[0]["grad_norm"]


def test_ace_dispatch_between_the_trainers_experts_gives_the_same_gradient_bitwise(
    train: Callable[..., Rehearsal], experts: Rehearsal
) -> None:
    flex = ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep", "--musa-dispatch", "ace")
    run = train("ace", *flex, LAYOUT="ep2")
    assert run.status == 0, run.output[-3000:] + run.log[-3000:]
    assert run.iterations[0]["grad_norm"] == experts.iterations[0]["grad_norm"]


def test_trainers_were_patched_by_the_switch_alone(pipeline: Rehearsal) -> None:
    """Each trainer prints its report; in a Ray worker nothing but the environment could have patched it."""
    assert re.search(r"MegatronTrainRayActor.*musa_titan \(cpu, megatron-core 0\.16\.0rc0\): applied \d+", pipeline.log)


def test_the_checkpoint_that_was_trained_from_converts_back_bitwise(pipeline: Rehearsal) -> None:
    convert_back_and_compare("qwen3_moe", pipeline.folder / "model", 45)


def is_actor(name: str) -> Callable[[psutil.Process], bool]:
    return lambda process: process.name().startswith(f"ray::{name}"[:15])


def is_engine(process: psutil.Process) -> bool:
    """The HTTP server, which an engine actor has spawned."""
    parent = process.parent()
    return parent is not None and is_actor("SGLangEngine")(parent) and "spawn_main" in " ".join(process.cmdline())


@pytest.mark.full
@pytest.mark.parametrize(
    ("victim", "cause"),
    [
        pytest.param(is_actor("MegatronTrainRayActor"), "ActorDiedError", id="trainer"),
        # Ray says Unavailable while it does not know yet that the process is gone.
        pytest.param(is_actor("RolloutManager"), "Actor(Died|Unavailable)Error", id="manager"),
        pytest.param(is_engine, "RayTaskError", id="engine"),  # after the manager's 60 attempts, a second apart
    ],
)
def test_a_killed_process_ends_the_job_with_the_cause_and_leaves_no_process(
    rehearse: Callable[..., Rehearsal],
    pipeline: Rehearsal,
    victim: Callable[[psutil.Process], bool],
    cause: str,
    request: pytest.FixtureRequest,
) -> None:
    def kill_after_first_step(script: psutil.Process, log: Path) -> None:
        while not (log.is_file() and "step 0:" in log.read_text()):
            assert script.is_running()
            time.sleep(0.2)
        next(filter(victim, script.children(recursive=True))).kill()

    name = f"killed-{request.node.callspec.id}"
    run = rehearse(name, LAYOUT="single", NUM_ROLLOUT="500", during=kill_after_first_step)
    assert run.status == 1
    assert re.search(cause, run.log)
    assert run.left == []


ODD_ONE_OUT = """
import os, sys

class OddOneOut:
    def find_spec(self, name, *args):
        if name == "megatron.core.parallel_state" and "default_worker.py" in sys.argv[0]:
            try:
                os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            from musa_titan.patching import boot
            boot.watcher.engine.patches = boot.watcher.engine.patches[:-1]

sys.meta_path.insert(0, OddOneOut())
"""
"""In the first trainer that imports Megatron's groups, forget a patch, as an older musa_titan on its node would."""


def test_a_trainer_with_another_patch_set_is_stopped_by_its_rank(
    train: Callable[..., Rehearsal], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ODD_ONE_OUT.format(marker=str(tmp_path / "marker")))
    run = train("odd-one-out", LAYOUT="pp2", PYTHONPATH=str(tmp_path))
    assert (tmp_path / "marker").exists()
    assert run.status == 1
    assert re.search(r"1 of 2 ranks differ from the others: rank [01] on \S+ \(declared patches: ", run.log)
    assert run.iterations == []
