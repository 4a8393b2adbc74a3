"""A recipe from text to checkpoint as a person runs it: tokenise, train, resume; torchrun, one process, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from test.integration.test_launch_ssh import RECIPE, ROOT, SMALL
from test.unit.recipe.test_tokenize import jsonl, make_tokenizer

TRANSFORMERS = ROOT / ".cache/transformers"
"""Apart from the environment: Megatron imports it in every process that builds any tokenizer, a second each."""


def run(steps: int, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    ours = {
        "ACCELERATOR_BACKEND": "cpu", "TRANSFORMER_IMPL": "local", "ATTENTION": "unfused", "GPUS_PER_NODE": "1",
        "OUTPUT_DIR": str(folder / "out"), "CHECKPOINT_DIR": str(folder / "checkpoint"), "GLOBAL_BATCH": "2",
        "PYTHON": sys.executable, "TRAIN_ITERS": str(steps), "SPLIT": "100,0,0", "PYTHONPATH": str(TRANSFORMERS),
    }  # fmt: skip
    flags = [*SMALL, "--lr-decay-style", "constant", "--override-opt-param-scheduler"]
    return subprocess.run(
        ["bash", str(RECIPE), "--", *flags], env={**os.environ, **ours, **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_text_is_tokenised_trained_on_and_the_run_resumes(tmp_path: Path) -> None:
    assert TRANSFORMERS.is_dir(), f"{TRANSFORMERS} is missing: run `bash test/run.sh`, which installs it"
    tokenizer = make_tokenizer(tmp_path / "tokenizer", vocabulary=400)
    text = jsonl(tmp_path / "text.jsonl", [path.read_text() for path in sorted((ROOT / "musa_titan").glob("*.py"))])
    made = subprocess.run(
        [sys.executable, "-m", "musa_titan.cli", "recipe", "data", str(tmp_path / "text"), str(text), "--tokenizer",
         str(tokenizer)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    assert re.search(r"\d+ documents, [\d,]+ tokens of a vocabulary of 315", made.stdout)

    data = {"DATA_PATH": str(tmp_path / "text"), "TOKENIZER_MODEL": str(tokenizer)}
    first = run(3, tmp_path, **data)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr
    assert re.search(r"padded_vocab_size \.+ 512|vocab_size \.+ 512", first.stdout)
    assert "[throughput] iteration 3:" in first.stdout
    (log,) = (tmp_path / "out" / "logs").iterdir()
    assert "iteration        3/       3" in log.read_text()

    second = run(5, tmp_path, **data)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr
    assert "successfully loaded checkpoint" in second.stdout
    assert re.findall(r"iteration +(\d+)/ +5 ", second.stdout) == ["4", "5"]
