"""Hugging Face → Megatron → Hugging Face with real miles: bitwise, for a DeepSeek-V3-shaped model.

``test_rl_loop.py`` does the same for a Qwen3-MoE, from the checkpoint that its rehearsals have made.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-rl" / "bin" / "python"
RUN = "--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8 --micro-batch-size 1 --num-rollout 1"
CHECKPOINT = ("-m", "musa_titan.rl.checkpoint")
COMPARE = """
import sys, torch
from safetensors.torch import load_file
before, after = (load_file(folder + "/model.safetensors") for folder in sys.argv[1:])
assert before.keys() == after.keys(), before.keys() ^ after.keys()
for name in before:
    assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
print(len(before))
"""


def flags_of(family: str) -> list[str]:
    """The model's flags and those of a CPU, as the rehearsals have them."""
    lib = ROOT / "examples/rl/lib"
    source = f'. "{lib}/tiny_qwen3_moe.sh"; . "{lib}/tiny_{family}.sh"'
    program = source + '; printf "%s\\0" "${MODEL_ARGS[@]}" "${CPU_ARGS[@]}"'
    words = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    return [*words, *RUN.split(), "--prompt-data", "none", "--lr", "1e-3", "--seq-length", "64"]


def run(*command: str) -> str:
    assert PYTHON.is_file(), f"{PYTHON} is missing: run `bash test/run.sh`, which installs miles there"
    settings = {
        "ACCELERATOR_BACKEND": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    environment = {**os.environ, **settings, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([str(PYTHON), *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def convert_back_and_compare(family: str, folder: Path, tensors: int) -> None:
    """Make `folder`/back of `folder`/megatron: the files of `folder`/hf, the same bits in as many tensors."""
    model, megatron, back = folder / "hf", folder / "megatron", folder / "back"
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    flags = [*flags_of(family), "--hf-checkpoint", str(model)]
    run(*CHECKPOINT, "to-hf", "miles", str(megatron), str(back), "--", *flags)
    assert run("-c", COMPARE, str(model), str(back)).split() == [str(tensors)]
    assert (back / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_there_and_back_is_bitwise(tmp_path: Path) -> None:
    family = "deepseek_v3"
    run("-m", "musa_titan.rl.rehearsal.assets", str(tmp_path), "--family", family)
    model, megatron = str(tmp_path / "hf"), str(tmp_path / "megatron")
    run(*CHECKPOINT, "to-megatron", "miles", model, megatron, "--", *flags_of(family))
    convert_back_and_compare(family, tmp_path, 41)
