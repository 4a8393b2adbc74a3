"""Routings of every kind, and what dispatch and combine must make of them, computed token by token on one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """What all ranks bring; index = rank."""

    name: str
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    experts: int

    @property
    def ranks(self) -> int:
        return len(self.x)

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks

    def targets(self, rank: int, token: int) -> list[int]:
        """Ranks that token goes to, ascending."""
        return sorted({int(e) // self.experts_per_rank for e in self.topk_idx[rank][token] if e >= 0})

    def received(self, rank: int) -> list[tuple[int, int]]:
        """(source, token) of each row that `rank` must receive, in order."""
        return [
            (source, token)
            for source in range(self.ranks)
            for token in range(self.x[source].shape[0])
            if rank in self.targets(source, token)
        ]


def make_case(
    name: str, ranks: int, *, tokens: list[int], hidden: int, topk: int, experts: int, dtype: torch.dtype, seed: int,
    drop: float = 0.0, only: int | None = None,
) -> Case:  # fmt: skip
    """Random bits (NaN payloads and all) routed at random; `drop`: part of choices that is -1; `only`: rank of all."""
    generator = torch.Generator().manual_seed(seed)
    x, indices, weights = [], [], []
    size = torch.empty(0, dtype=dtype).element_size()
    for count in tokens:
        raw = torch.randint(0, 256, (count, hidden * size), generator=generator, dtype=torch.uint8)
        x.append(raw.view(-1).view(dtype).view(count, hidden))
        per_rank = experts // ranks
        low, high = (0, experts) if only is None else (only * per_rank, (only + 1) * per_rank)
        choice = torch.rand(count, high - low, generator=generator).argsort(dim=1)[:, :topk] + low
        if choice.shape[1] < topk:
            choice = torch.cat([choice, choice.new_full((count, topk - choice.shape[1]), -1)], dim=1)
        dropped = torch.rand(count, topk, generator=generator) < drop
        indices.append(choice.masked_fill(dropped, -1))
        weights.append(torch.rand(count, topk, generator=generator))
    return Case(name, x, indices, weights, experts)


def all_cases(ranks: int) -> list[Case]:
    """Uneven, empty, all to one rank, top-1 and top-8, dropped choices, odd sizes, several types."""
    bf16, f32, u8 = torch.bfloat16, torch.float32, torch.uint8
    uneven = [3 + 7 * rank for rank in range(ranks)]
    even = [16] * ranks

    def case(name: str, **more: object) -> Case:
        settings = {"tokens": uneven, "hidden": 64, "topk": 2, "experts": 4 * ranks, "dtype": bf16, **more}
        return make_case(name, ranks, seed=len(name), **settings)  # type: ignore[arg-type]

    return [
        case("uneven"),
        case("top-1", topk=1),
        case("top-8", topk=8, experts=8 * ranks),
        case("all to the last rank", only=ranks - 1),
        case("all to rank 0", tokens=even, only=0),
        case("one rank has no tokens", tokens=[0, *even[1:]]),
        case("nobody has tokens", tokens=[0] * ranks),
        case("half of the choices dropped", drop=0.5),
        case("everything dropped", tokens=even, drop=1.1),
        case("hidden size of 37 bytes", hidden=37, dtype=u8),
        case("hidden size 7", hidden=7),
        case("fp32", dtype=f32),
        case("fp64", dtype=torch.float64),
        case("large", tokens=[700] * ranks, hidden=256),
    ]
