"""Small real jobs of the acceptance kit: who starts them, and what their logs say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from musa_titan.acceptance.evidence import CheckError
from musa_titan.recipe.trainer import Trainer

STEP = re.compile(r"iteration +(\d+)/ *\d+ \|.*?lm loss: (\S+)")
RATE = re.compile(r"\[throughput\] iteration \d+: ([\d,.]+) tokens/s/GPU, (\S+) TFLOP/s/GPU(?:, MFU ([\d.]+)%)?")

MODEL = """
--transformer-impl local --attention-backend unfused --num-layers 4 --hidden-size 64 --ffn-hidden-size 128
--num-attention-heads 4 --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16
--qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm --moe-layer-freq ([0]+[1]*3) --num-experts 8
--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-router-topk 2
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2
--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
--no-persist-layer-norm --mock-data --tokenizer-type NullTokenizer --vocab-size 512 --make-vocab-size-divisible-by 64
--num-workers 0 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8
--lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --seed 1234 --bf16 --use-distributed-optimizer --log-interval 1
--eval-iters 0 --eval-interval 100000 --distributed-timeout-minutes 5 --musa-throughput
""".split()
"""DeepSeek-V3 in small: latent attention, a sigmoid router with groups and bias, a dense layer, a shared expert."""


@dataclass(frozen=True)
class Log:
    """What the rank that logs the loss printed."""

    losses: list[float]
    texts: list[str]
    """The loss of each step as printed."""
    tokens_per_second: float | None
    tflops: float | None
    mfu: float | None
    directory: Path


@dataclass(frozen=True)
class Jobs:
    """Runs jobs of `world` ranks on `backend`, below `directory`."""

    backend: str
    world: int
    directory: Path
    trainer: Trainer | None = None
    """On a CPU: forks ranks from one import. None: torchrun."""

    def train(self, name: str, steps: int, flags: Sequence[str] = ()) -> Log:
        """Train the small model.

        Raises:
            CheckError: a rank failed, or a step is missing; with the end of its log.
        """
        directory = self.directory / name
        words = [*MODEL, "--train-iters", str(steps), *self._layout(), *flags]
        if self.trainer is not None:
            if any(self.trainer.train(directory, self.world, words)):
                raise CheckError(f"{name} failed; logs are in {directory}: {_reason(directory)}")
        else:
            self._run("musa_titan.recipe.train", directory, [str(directory), "--", *words])
        text = (directory / f"rank{self.world - 1}.log").read_text(errors="replace")
        found = STEP.findall(text)
        if not found or int(found[-1][0]) != steps:
            raise CheckError(f"{name}: step {steps} is missing; see {directory}")
        rates = RATE.findall(text)
        tokens, tflops, mfu = rates[-1] if rates else ("", "", "")
        return Log(
            losses=[float(loss) for _, loss in found],
            texts=[loss for _, loss in found],
            tokens_per_second=float(tokens.replace(",", "")) if tokens else None,
            tflops=float(tflops.replace(",", "")) if tflops else None,
            mfu=float(mfu) if mfu else None,
            directory=directory,
        )

    def ranks(self) -> list[dict[str, dict[str, Any]]]:
        """What each rank of :mod:`musa_titan.acceptance.ranks` found.

        Raises:
            CheckError: a rank failed before it could say so.
        """
        directory = self.directory / "ranks"
        self._run("musa_titan.acceptance.ranks", directory, [str(directory)])
        return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(self.world)]

    @property
    def pipeline(self) -> int:
        return 2 if self.world % 2 == 0 else 1

    @property
    def experts(self) -> int:
        return 2 if self.world % 4 == 0 else 1

    def _layout(self) -> list[str]:
        layout = ["--pipeline-model-parallel-size", str(self.pipeline)]
        return [*layout, "--expert-model-parallel-size", str(self.experts), "--moe-token-dispatcher-type", "alltoall"]

    def _run(self, module: str, directory: Path, arguments: list[str]) -> None:
        """Start `module` in all ranks."""
        directory.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ, "ACCELERATOR_BACKEND": self.backend, "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1", "MUSA_TITAN_REPORT_DIR": str(directory / "patches"),
        }  # fmt: skip
        if self.backend == "cpu":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
        command = [*torchrun, "--nproc-per-node", str(self.world), "-m", module, *arguments]
        log = directory / "start.log"
        with open(log, "wb") as stream:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, check=False
            )
        if done.returncode != 0:
            raise CheckError(f"{directory.name} failed; logs are in {directory}: {_reason(directory)}")


def _reason(directory: Path) -> str:
    """The last line with an error in any log."""
    for path in [*sorted(directory.glob("rank*.log")), *directory.glob("start.log")]:
        lines = [line for line in path.read_text(errors="replace").splitlines() if "Error" in line]
        if lines:
            return lines[-1].strip()[:300]
    return "no error in the logs"
