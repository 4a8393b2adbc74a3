"""SGLang's endpoints, as far as slime and miles use them.

Each is a function of the request's JSON that returns the reply's. Names and fields are SGLang's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from musa_titan.rl.engine.generate import Sampler
from musa_titan.rl.engine.updates import WeightUpdater
from musa_titan.rl.engine.weights import checkpoint_views, load_model

Reply = dict[str, Any]


@dataclass
class Engine:
    """One model, and what is asked of it. Requests come from many threads; one at a time computes."""

    model_path: str
    seed: int = 0
    server_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from transformers import AutoTokenizer

        self.model = load_model(self.model_path)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        self.views = checkpoint_views(self.model)
        self.updater = WeightUpdater(self.views)
        self.sampler = Sampler(self.model, self.seed)
        self.weight_version = "default"
        self.snapshot: dict[str, torch.Tensor] = {}
        self.lock = threading.Lock()
        self.running = threading.Event()
        self.running.set()
        self.aborts = 0

    # -- generation -------------------------------------------------------------------------------------------------

    def generate(self, request: Reply) -> Reply:
        aborts = self.aborts
        prompt = request.get("input_ids") or self.tokenizer.encode(request["text"])
        parameters = request.get("sampling_params") or {}
        self.running.wait()
        with self.lock:
            if aborts != self.aborts:
                return self._reply(prompt, [], [], "abort", "")
            out = self.sampler.run(list(prompt), parameters, self._stop_ids(parameters))
        shown = out.tokens[:-1] if out.finish == "stop" and not parameters.get("no_stop_trim") else out.tokens
        text = self.tokenizer.decode(shown, skip_special_tokens=parameters.get("skip_special_tokens", True))
        return self._reply(prompt, out.tokens, out.logprobs, out.finish, text)

    def _stop_ids(self, parameters: Reply) -> set[int]:
        stop = set(parameters.get("stop_token_ids") or ())
        eos = self.model.generation_config.eos_token_id
        return stop | set(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def _reply(self, prompt: Any, tokens: list[int], logprobs: list[float], finish: str, text: str) -> Reply:
        return {
            "text": text,
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": finish},
                "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
                "prompt_tokens": len(prompt),
                "completion_tokens": len(tokens),
                "cached_tokens": 0,
                "weight_version": self.weight_version,
            },
        }

    def abort(self, request: Reply) -> Reply:
        self.aborts += 1
        return {}

    def pause(self, request: Reply) -> Reply:
        self.running.clear()
        with self.lock:  # what is being generated ends first
            return {"success": True, "message": ""}

    def resume(self, request: Reply) -> Reply:
        self.running.set()
        return {"success": True, "message": ""}

    # -- weights ----------------------------------------------------------------------------------------------------

    def join_group(self, request: Reply) -> Reply:
        self.updater.join(
            request["group_name"],
            request["master_address"],
            int(request["master_port"]),
            int(request["rank_offset"]),
            int(request["world_size"]),
        )
        return {"success": True, "message": "joined"}

    def leave_group(self, request: Reply) -> Reply:
        self.updater.leave(request["group_name"])
        return {"success": True, "message": "left"}

    def update_distributed(self, request: Reply) -> Reply:
        return self._update(
            request,
            lambda: self.updater.receive(request["group_name"], request["names"], request["dtypes"], request["shapes"]),
        )

    def update_tensor(self, request: Reply) -> Reply:
        entries = request["serialized_named_tensors"]
        return self._update(request, lambda: self.updater.read_shared(entries, request.get("load_format")))

    def update_disk(self, request: Reply) -> Reply:
        return self._update(request, lambda: self.updater.read_disk(request["model_path"]))

    def _update(self, request: Reply, action: Callable[[], None]) -> Reply:
        with self.lock, torch.no_grad():
            action()
        if request.get("weight_version") is not None:
            self.weight_version = str(request["weight_version"])
        return {"success": True, "message": "updated"}

    def set_version(self, request: Reply) -> Reply:
        self.weight_version = str(request["new_version"])
        return {"success": True, "new_version": self.weight_version}

    def check_weights(self, request: Reply) -> Reply:
        """``snapshot``, ``reset_tensors`` (to zero) and ``compare`` with the snapshot: a test of the whole sync."""
        action = request["action"]
        with self.lock, torch.no_grad():
            if action == "snapshot":
                self.snapshot = {name: view.clone() for name, view in self.views.items()}
            elif action == "reset_tensors":
                for name in self.snapshot:
                    if not name.endswith("inv_freq"):
                        self.views[name].zero_()
            elif action == "compare":
                different = [n for n, kept in self.snapshot.items() if not torch.equal(self.views[n], kept)]
                if different:
                    raise ValueError(f"{len(different)} weights differ from the snapshot, first {different[0]}")
        return {"success": True, "message": action}

    # -- information ------------------------------------------------------------------------------------------------

    def health(self, request: Reply) -> Reply:
        return {}

    def model_info(self, request: Reply) -> Reply:
        return {
            "model_path": self.model_path,
            "tokenizer_path": self.model_path,
            "is_generation": True,
            "weight_version": self.weight_version,
        }

    def server_info(self, request: Reply) -> Reply:
        return {**self.server_args, "model_path": self.model_path, "rehearsal_engine": True, "internal_states": []}

    def loads(self, request: Reply) -> Reply:
        return {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]}

    def accept(self, request: Reply) -> Reply:
        """Endpoints that manage GPU memory, profiles or quantised layouts: nothing to do here."""
        return {"success": True, "message": "nothing to do on a CPU"}


def routes_of(engine: Engine) -> dict[str, Callable[[Reply], Reply]]:
    """Path → handler, for GET and POST alike."""
    handlers: dict[str, Callable[[Reply], Reply]] = {
        "/generate": engine.generate,
        "/abort_request": engine.abort,
        "/pause_generation": engine.pause,
        "/continue_generation": engine.resume,
        "/init_weights_update_group": engine.join_group,
        "/destroy_weights_update_group": engine.leave_group,
        "/update_weights_from_distributed": engine.update_distributed,
        "/update_weights_from_tensor": engine.update_tensor,
        "/update_weights_from_disk": engine.update_disk,
        "/update_weight_version": engine.set_version,
        "/weights_checker": engine.check_weights,
        "/v1/loads": engine.loads,
    }
    for path in ("/health", "/health_generate", "/flush_cache"):
        handlers[path] = engine.health
    for path in ("/model_info", "/get_model_info", "/get_weight_version"):
        handlers[path] = engine.model_info
    for path in ("/server_info", "/get_server_info"):
        handlers[path] = engine.server_info
    for path in (
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/post_process_weights",
        "/begin_weight_update",
        "/end_weight_update",
        "/pull_weights",
        "/start_profile",
        "/stop_profile",
    ):
        handlers[path] = engine.accept
    return handlers
