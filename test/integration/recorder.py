"""Runs inside a rank: records exact losses, gradient norms and final parameters of one training job."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any


class Recorder:
    """What one rank observed. Floats are kept as ``float.hex`` text, so that equality means bitwise equality."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        self.model: list[Any] = []
        self.args: Any = None
        self.at_end: list[Callable[[], None]] = []
        """Called after training, before the result is written; fill `extra` here."""

    def attach(self) -> None:
        """Observe Megatron's training loop by wrapping two functions that it looks up as globals."""
        training = importlib.import_module("megatron.training.training")
        log, signature = training.training_log, inspect.signature(training.training_log)
        setup = training.setup_model_and_optimizer

        def training_log(*args: Any, **kwargs: Any) -> Any:
            seen = signature.bind(*args, **kwargs).arguments
            losses = {name: float(value).hex() for name, value in sorted(seen["loss_dict"].items())}
            norm = seen["grad_norm"]
            self.steps.append(
                {
                    "iteration": seen["iteration"],
                    "losses": losses,
                    "grad_norm": None if norm is None else float(norm).hex(),
                }
            )
            return log(*args, **kwargs)

        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            made = setup(*args, **kwargs)
            self.model = made[0]
            return made

        training.training_log = training_log
        training.setup_model_and_optimizer = setup_model_and_optimizer

    def result(self) -> dict[str, Any]:
        for finish in self.at_end:
            finish()
        return {"steps": self.steps, "parameters": self._parameters(), "extra": self.extra}

    def _parameters(self) -> dict[str, str]:
        """Name -> SHA-256 prefix of the parameter's bytes after the last step; the chunk's index is in the name."""
        import torch

        found = {}
        for chunk, model in enumerate(self.model):
            for name, parameter in model.named_parameters():
                raw = parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
                found[f"{chunk}:{name.removeprefix('module.').removeprefix('module.')}"] = hashlib.sha256(
                    raw
                ).hexdigest()[:16]
        return found
