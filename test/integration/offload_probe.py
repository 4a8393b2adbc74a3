"""Runs inside a rank: live bytes after every event of the schedule, and gradients before every optimizer step.

Bytes come from a ledger that sees every tensor torch makes and knows nothing of the offload engine.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from test.integration.recorder import Recorder


def attach(recorder: Recorder) -> None:
    """Fill ``extra``: ``live`` (bytes after each event) and ``peaks`` (most bytes up to there since the event before),
    one list for each iteration, and ``gradients`` (a hash for each iteration)."""
    from megatron.training import training

    setup = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = setup(*args, **kwargs)
        record_gradients(recorder, made[0], made[1])
        record_bytes(recorder)
        return made

    training.setup_model_and_optimizer = setup_model_and_optimizer


def attach_gradients(recorder: Recorder) -> None:
    """Only the gradients."""
    from megatron.training import training

    setup = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = setup(*args, **kwargs)
        record_gradients(recorder, made[0], made[1])
        return made

    training.setup_model_and_optimizer = setup_model_and_optimizer


def record_gradients(recorder: Recorder, model: list[Any], optimizer: Any) -> None:
    gradients: list[str] = recorder.extra.setdefault("gradients", [])
    step = optimizer.step

    def step_and_record(*args: Any, **kwargs: Any) -> Any:
        digest = hashlib.sha256()
        for chunk in model:
            for name, parameter in sorted(chunk.named_parameters()):
                grad = getattr(parameter, "main_grad", None)
                grad = parameter.grad if grad is None else grad
                digest.update(name.encode())
                if grad is not None:
                    digest.update(grad.detach().cpu().float().contiguous().numpy().tobytes())
        gradients.append(digest.hexdigest()[:16])
        return step(*args, **kwargs)

    optimizer.step = step_and_record


def record_bytes(recorder: Recorder) -> None:
    """Snapshots outside of whatever wraps the schedule's functions, so after the configured patches."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from musa_titan.pretrain import offload_binding
    from test.unit.offload.ledger import Ledger

    def slabs() -> set[int]:
        session = offload_binding._session
        return session.engine.pool.addresses() if session is not None else set()

    ledger = Ledger(slabs)
    live: list[list[int]] = recorder.extra.setdefault("live", [])
    peaks: list[list[int]] = recorder.extra.setdefault("peaks", [])

    def note() -> None:
        live[-1].append(settled(ledger))
        peaks[-1].append(ledger.peak)
        ledger.peak = 0

    for name in ("forward_step", "backward_step"):
        setattr(schedules, name, and_then(getattr(schedules, name), note))
    train_step = training.train_step

    def observed_train_step(*args: Any, **kwargs: Any) -> Any:
        live.append([])
        peaks.append([])
        with ledger:
            ledger.peak = 0
            return train_step(*args, **kwargs)

    training.train_step = observed_train_step


def settled(ledger: Any, samples: int = 10) -> int:
    """Bytes live once nothing goes any more: a thread of gloo drops a finished collective's tensors a little later
    than it reports the end."""
    found, same = ledger.live(), 0
    while same < samples:
        time.sleep(0.001)
        again = ledger.count()
        found, same = (found, same + 1) if again == found else (again, 0)
    return int(found)


def and_then(function: Any, observe: Any) -> Any:
    def observed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        observe()
        return result

    return observed


def copy_late(recorder: Recorder) -> None:
    """A device whose copies are done events after they were issued, and that overwrites memory at once."""
    from musa_titan.offload.virtual import VirtualDevice
    from musa_titan.pretrain import offload_setup

    offload_setup.make_device = lambda accelerator: VirtualDevice(out_lag=3, in_lag=2)
