"""Real Megatron training jobs for tests: one server imports everything once, every job forks its ranks from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class JobFailedError(AssertionError):
    """A rank ended with a non-zero exit code; the message has the tail of its log."""


@dataclass(frozen=True)
class RankResult:
    """What one rank recorded; see ``recorder.py``."""

    steps: list[dict[str, Any]]
    parameters: dict[str, str]
    extra: dict[str, Any]
    log: str

    @property
    def grad_norms(self) -> list[str]:
        return [step["grad_norm"] for step in self.steps]


@dataclass(frozen=True)
class JobResult:
    ranks: list[RankResult]

    @property
    def losses(self) -> list[dict[str, str]]:
        """Per step: loss name -> ``float.hex``, from the rank that has them (the last pipeline stage)."""
        return [
            step["losses"] for step in next(rank for rank in self.ranks if rank.steps and rank.steps[0]["losses"]).steps
        ]

    @property
    def lm_losses(self) -> list[float]:
        return [float.fromhex(step["lm loss"]) for step in self.losses]

    @property
    def grad_norms(self) -> list[str]:
        return self.ranks[0].grad_norms

    @property
    def fingerprint(self) -> list[tuple[Any, ...]]:
        """What two runs of the same mathematics share bitwise: the losses and gradient norm of every step."""
        return [(tuple(losses.items()), norm) for losses, norm in zip(self.losses, self.grad_norms, strict=True)]

    @property
    def parameters(self) -> list[dict[str, str]]:
        """Per rank: parameter -> hash after the last step. Comparable between runs of the same parallel layout."""
        return [rank.parameters for rank in self.ranks]


class Runner:
    """Starts the server at the first job and keeps it until :meth:`close`.

    `environment` is the server's: settings given by variable, ``ACCELERATOR_BACKEND``, and `megatron`, a directory
    that holds another release, go there; `paths` come next on its search path. Jobs differ in their flags, and in
    `env`, which only the ranks see.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        megatron: Path | None = None,
        paths: Sequence[Path] = (),
    ) -> None:
        self._environment = {
            **os.environ, "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1", **(environment or {}),
        }  # fmt: skip
        first = [*([megatron] if megatron is not None else []), *paths, ROOT]
        self._environment["PYTHONPATH"] = os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        args: Sequence[str],
        directory: Path,
        world_size: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        hooks: Sequence[str] = (),
        timeout: float = 240,
        grace: float = 5,
    ) -> JobResult:
        """Train with `args` on `world_size` ranks; `hooks` (``module:function``, called with the recorder) run before.

        Raises:
            JobFailedError: any rank ended with an error.
        """
        codes = self.start(args, directory, world_size, env=env, hooks=hooks, timeout=timeout, grace=grace)
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        if failed:
            raise JobFailedError(
                "\n".join(f"rank {r} exited {codes[r]}\n{self.log(directory, r)[-3000:]}" for r in failed[:2])
            )
        results = []
        for rank in range(world_size):
            content = json.loads((directory / f"rank{rank}.json").read_text())
            results.append(RankResult(**content, log=self.log(directory, rank)))
        return JobResult(results)

    def start(
        self,
        args: Sequence[str],
        directory: Path,
        world_size: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        hooks: Sequence[str] = (),
        timeout: float = 240,
        grace: float = 5,
    ) -> list[int]:
        """As :meth:`run`, but return the ranks' exit codes and raise nothing; logs are in ``directory/rankN.log``."""
        directory.mkdir(parents=True, exist_ok=True)
        job = {
            "args": list(args), "directory": str(directory), "world_size": world_size, "env": dict(env or {}),
            "hooks": list(hooks), "timeout": timeout, "grace": grace,
        }  # fmt: skip
        server = self._running()
        assert server.stdin is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        codes: list[int] = self._answer(server)["codes"]
        return codes

    @staticmethod
    def log(directory: Path, rank: int) -> str:
        path = directory / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait(timeout=30)
            self._server = None

    def _running(self) -> subprocess.Popen[str]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "test.integration.rank_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, cwd=ROOT, env=self._environment,
            )  # fmt: skip
            assert self._answer(self._server)["ready"]
        return self._server

    @staticmethod
    def _answer(server: subprocess.Popen[str]) -> dict[str, Any]:
        """The next JSON line; other output of the server (a library's print) is passed on."""
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
            print(line, end="")
        raise JobFailedError(f"the rank server ended with exit code {server.wait()}")
