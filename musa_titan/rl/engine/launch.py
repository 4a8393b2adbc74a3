"""Starts the rehearsal engine where a framework would start SGLang."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import urllib.error
import urllib.request
from multiprocessing.process import BaseProcess
from typing import Any

from musa_titan.patching.spec import MusaTitanError
from musa_titan.rl.engine.server import serve

START_TIMEOUT = 300.0
"""Seconds for importing transformers and loading the model on a busy machine."""


def launch(server_args: Any) -> BaseProcess:
    """Start the server that SGLang's `server_args` describe, and return its process once it is healthy.

    Raises:
        MusaTitanError: it ended or did not answer within START_TIMEOUT, or an engine of several nodes is asked for.
    """
    if getattr(server_args, "nnodes", 1) > 1:
        raise MusaTitanError(
            "the rehearsal engine (--musa-rollout-engine cpu) runs on one node; lower the GPUs an engine has"
        )
    host = server_args.host.strip("[]")
    process = multiprocessing.get_context("spawn").Process(
        target=serve,
        args=(
            host,
            server_args.port,
            server_args.model_path,
            server_args.random_seed,
            _plain(server_args),
            os.getpid(),
        ),
        daemon=True,
    )
    process.start()
    _wait_until_healthy(process, f"http://{server_args.host}:{server_args.port}/health")
    return process


def _plain(server_args: Any) -> dict[str, Any]:
    """What JSON can hold of the arguments, for ``/server_info``."""
    values = {spec.name: getattr(server_args, spec.name) for spec in dataclasses.fields(server_args)}
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool | None)}


def _wait_until_healthy(process: BaseProcess, url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        if not process.is_alive():
            raise MusaTitanError(
                f"the rehearsal engine at {url} ended with exit code {process.exitcode}; see its output above"
            )
        time.sleep(0.2)
    process.kill()
    raise MusaTitanError(f"the rehearsal engine at {url} did not answer within {START_TIMEOUT:.0f} s")
