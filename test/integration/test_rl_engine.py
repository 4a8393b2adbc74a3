"""The rehearsal engine over HTTP: generation with log-probabilities, and weights by each way that trainers have."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-rl" / "bin" / "python"

PROGRAM = Path(__file__).with_name("rl_engine_program.py")
ROUTES = (
    "/health /health_generate /flush_cache /get_weight_version /model_info /server_info /get_server_info "
    "/v1/loads?include=core /abort_request /pause_generation /continue_generation /release_memory_occupation "
    "/resume_memory_occupation /post_process_weights /begin_weight_update /end_weight_update /pull_weights "
    "/start_profile /stop_profile"
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one engine answered to a series of requests."""
    assert PYTHON.is_file(), f"{PYTHON} is missing: run `bash test/run.sh`, which installs miles there"
    folder = tmp_path_factory.mktemp("engine")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for command in (
        ["-m", "musa_titan.rl.rehearsal.assets", str(folder)],
        [str(PROGRAM), str(folder / "hf"), ROUTES],
    ):
        done = subprocess.run([str(PYTHON), *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def logprobs(meta: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in meta["output_token_logprobs"]]


def test_log_probabilities_are_those_of_a_forward_pass_without_a_cache(answers: dict[str, Any]) -> None:
    assert logprobs(answers["first"]) == pytest.approx(answers["logits"], abs=0.02)


def test_samples_of_one_prompt_differ_and_greedy_ones_do_not(answers: dict[str, Any]) -> None:
    assert answers["first"]["output_token_logprobs"] != answers["again"]["output_token_logprobs"]
    assert answers["greedy"][0] == answers["greedy"][1]


def test_a_broadcast_changes_what_is_generated_and_the_version(answers: dict[str, Any]) -> None:
    assert answers["joined"]["success"]
    assert answers["updated"]["success"]
    assert answers["version"] == "7"
    assert logprobs(answers["after"]) != logprobs(answers["first"])


def test_weights_from_disk_restore_every_tensor(answers: dict[str, Any]) -> None:
    assert "45 weights differ from the snapshot" in answers["differs"]["message"]
    assert answers["same"]["success"]


def test_errors_are_answers_and_not_a_dead_server(answers: dict[str, Any]) -> None:
    assert answers["unknown"]["status"] == 404
    assert answers["bad"]["message"] == "no safetensors files in /nowhere"


def test_every_endpoint_that_trainers_use_answers(answers: dict[str, Any]) -> None:
    assert set(answers["routes"].values()) == {200}
