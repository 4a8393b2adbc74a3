"""Hooks that run inside a rank (``module:function`` of the runner): what carried its tensors, and accidents."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from test.integration.recorder import Recorder

SHORTER_BY = 8
"""Tokens by which lengths differ under `lengths_that_vary`: 32, 24, 16, 32, …"""


def count_messages(recorder: Recorder) -> None:
    """``extra["p2p"]``: statistics of this rank's session; absent if there is none."""

    def finish() -> None:
        sessions = importlib.import_module("musa_titan.pretrain.p2p_sessions").open_sessions()
        recorder.extra["p2p"] = [session.statistics() for session in sessions]
        recorder.extra["failures"] = [str(session.failure) for session in sessions if session.failure]

    recorder.at_end.append(finish)


def forbid_process_group_transfers(recorder: Recorder) -> None:
    """``isend`` and ``irecv`` of any process group end the run."""
    distributed = importlib.import_module("torch.distributed")

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process group was asked to send or receive")

    for name in ("isend", "irecv", "send", "recv", "batch_isend_irecv"):
        setattr(distributed, name, forbidden)


def lengths_that_vary(recorder: Recorder) -> None:
    """Micro-batches of different lengths, and a model configuration that says so."""
    training = importlib.import_module("megatron.training.training")
    driver = importlib.import_module("musa_titan.pretrain.driver")
    utils = importlib.import_module("megatron.core.utils")
    setup, next_batch = training.setup_model_and_optimizer, driver.next_batch
    seen = 0

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = setup(*args, **kwargs)
        for chunk in made[0]:
            utils.get_model_config(chunk).variable_seq_lengths = True
        return made

    def shortened_batch(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        fields = next_batch(*args, **kwargs)
        cut = SHORTER_BY * (seen % 3)
        seen += 1
        return [_shorten(field, cut) if cut else field for field in fields]

    training.setup_model_and_optimizer = setup_model_and_optimizer
    driver.next_batch = shortened_batch


def _shorten(field: Any, cut: int) -> Any:
    if field is None:
        return None
    return field[..., :-cut, :-cut] if field.dim() == 4 else field[:, :-cut]


def rank_1_dies_in_step_2(recorder: Recorder) -> None:
    """SIGKILL, as the kernel's memory killer would."""
    if os.environ["RANK"] == "1":
        _at_step(2, lambda: os.kill(os.getpid(), signal.SIGKILL))


def rank_1_raises_in_step_2(recorder: Recorder) -> None:
    """An exception in the middle of a step."""

    def burn() -> None:
        raise ArithmeticError("on purpose")

    if os.environ["RANK"] == "1":
        _at_step(2, burn)


def rank_1_has_no_library(recorder: Recorder) -> None:
    """As on a node where Mooncake was not installed."""
    if os.environ["RANK"] == "1":
        sys.modules["mooncake.engine"] = None  # type: ignore[assignment]


def close_in_order(recorder: Recorder) -> None:
    """``extra["closed"]``: whether destroying the process groups ended the session without a failure."""

    def finish() -> None:
        sessions = importlib.import_module("musa_titan.pretrain.p2p_sessions")
        open_before = sessions.open_sessions()
        importlib.import_module("torch.distributed").destroy_process_group()
        recorder.extra["closed"] = [session.closed and session.failure is None for session in open_before]
        recorder.extra["left"] = len(sessions.open_sessions())

    recorder.at_end.append(finish)


def _at_step(step: int, accident: Any) -> None:
    """Call `accident` in the middle micro-batch of `step`, before its forward."""
    driver = importlib.import_module("musa_titan.pretrain.driver")
    forward_step = driver.forward_step
    calls = 0

    def counting_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == MICROBATCHES * (step - 1) + MICROBATCHES // 2:
            accident()
        return forward_step(*args, **kwargs)

    driver.forward_step = counting_step


MICROBATCHES = 4
