"""Sampling one continuation, with the log-probability of each token."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Continuation:
    tokens: list[int]
    logprobs: list[float]
    """Of each token under softmax(logits / temperature), before top-k and top-p: what SGLang reports."""
    finish: str
    """``stop`` or ``length``."""


@dataclass
class Sampler:
    """Samples reproducibly although requests arrive in any order: the seed is the prompt and how often it came."""

    model: Any
    seed: int
    seen: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @torch.inference_mode()
    def run(self, prompt: list[int], parameters: dict[str, Any], stop_ids: set[int]) -> Continuation:
        """Continue `prompt` (token ids) under SGLang's sampling `parameters`."""
        generator = self._generator(prompt, parameters.get("sampling_seed"))
        temperature = float(parameters.get("temperature", 1.0))
        tokens: list[int] = []
        logprobs: list[float] = []
        cache = None
        step = torch.tensor([prompt])
        for _ in range(int(parameters.get("max_new_tokens", 128))):
            output = self.model(input_ids=step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = torch.log_softmax(output.logits[0, -1].float() / (temperature or 1.0), dim=-1)
            token = self._choose(distribution, temperature, parameters, generator)
            tokens.append(token)
            logprobs.append(float(distribution[token]))
            if token in stop_ids and not parameters.get("ignore_eos"):
                return Continuation(tokens, logprobs, "stop")
            step = torch.tensor([[token]])
        return Continuation(tokens, logprobs, "length")

    def _generator(self, prompt: list[int], seed: int | None) -> torch.Generator:
        key = tuple(prompt)
        self.seen[key] += 1
        text = f"{self.seed if seed is None else seed}:{self.seen[key]}:{prompt}"
        digest = hashlib.sha256(text.encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    @staticmethod
    def _choose(
        logprobs: torch.Tensor, temperature: float, parameters: dict[str, Any], generator: torch.Generator
    ) -> int:
        """A token id: the likeliest at temperature 0, else drawn from what top-k and top-p leave."""
        if temperature == 0.0:
            return int(logprobs.argmax())
        probabilities, order = logprobs.exp().sort(descending=True)
        top_k = int(parameters.get("top_k", -1))
        if top_k > 0:
            probabilities[top_k:] = 0.0
        before = probabilities.cumsum(0) - probabilities
        probabilities[before > float(parameters.get("top_p", 1.0))] = 0.0
        return int(order[torch.multinomial(probabilities, 1, generator=generator)])
