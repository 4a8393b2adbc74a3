"""Run by ``test_rl_engine.py`` in the environment of miles: asks one rehearsal engine, prints the answers as JSON.

usage: python rl_engine_program.py MODEL "ENDPOINT ENDPOINT ..."
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from musa_titan.rl.engine.launch import launch
from musa_titan.rl.engine.weights import load_model

TIMEOUT = timedelta(seconds=60)
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@dataclasses.dataclass
class ServerArgs:
    """What the engine reads of SGLang's arguments."""

    model_path: str
    port: int
    host: str = "127.0.0.1"
    random_seed: int = 3
    nnodes: int = 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Client:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def call(self, path: str, **request: Any) -> dict[str, Any]:
        question = urllib.request.Request(self.url + path, json.dumps(request).encode())
        try:
            with urllib.request.urlopen(question, timeout=60) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.load(error)}

    def tokens(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        reply = self.call("/generate", input_ids=prompt, sampling_params={"max_new_tokens": 6, **sampling})
        return dict(reply["meta_info"])


def reference(model: str, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of one forward pass without a cache."""
    ids = torch.tensor([prompt + answer])
    with torch.inference_mode():
        values = torch.log_softmax(load_model(model)(input_ids=ids).logits[0].float(), -1)
    return [float(values[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]


def broadcast(client: Client, weight: torch.Tensor) -> dict[str, Any]:
    """Send one weight as a trainer does: a group of two, the trainer is its rank 0."""
    port, replies = free_port(), {}
    group = {"group_name": "g", "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    engine = threading.Thread(
        target=lambda: replies.update(joined=client.call("/init_weights_update_group", backend="gloo", **group))
    )
    engine.start()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=True)
    pg, _ = c10d._new_process_group_helper(
        2, 0, [], dist.Backend("gloo"), dist.PrefixStore("g", store), group_name="g", timeout=TIMEOUT
    )
    c10d._world.pg_group_ranks[pg] = {0: 0, 1: 1}
    engine.join()
    update = {"names": [EXPERT], "dtypes": ["bfloat16"], "shapes": [list(weight.shape)], "weight_version": "7"}
    engine = threading.Thread(
        target=lambda: replies.update(updated=client.call("/update_weights_from_distributed", group_name="g", **update))
    )
    engine.start()
    dist.broadcast(weight, 0, group=pg)
    engine.join()
    return replies


def main(model: str, endpoints: list[str]) -> None:
    args = ServerArgs(model, free_port())
    process = launch(args)
    client = Client(args.port)
    out: dict[str, Any] = {"first": client.tokens([5, 6, 7]), "again": client.tokens([5, 6, 7])}
    out["greedy"] = [client.tokens([5, 6], temperature=0), client.tokens([5, 6], temperature=0)]
    out["logits"] = reference(model, [5, 6, 7], [entry[1] for entry in out["first"]["output_token_logprobs"]])
    out |= broadcast(client, torch.full((32, 64), 0.5, dtype=torch.bfloat16))
    out["version"] = client.call("/model_info")["weight_version"]
    out["after"] = client.tokens([5, 6, 7])
    client.call("/update_weights_from_disk", model_path=model)
    client.call("/weights_checker", action="snapshot")
    client.call("/weights_checker", action="reset_tensors")
    out["differs"] = client.call("/weights_checker", action="compare")
    client.call("/update_weights_from_disk", model_path=model)
    out["same"] = client.call("/weights_checker", action="compare")
    out["unknown"] = client.call("/no_such_path")
    out["bad"] = client.call("/update_weights_from_disk", model_path="/nowhere")
    out["routes"] = {path: client.call(path).get("status", 200) for path in endpoints}
    print("RESULT", json.dumps(out))
    process.kill()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split())
