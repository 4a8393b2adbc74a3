"""Gathering weights as FP8 codes: half the bytes of bf16, and the codes are those of the whole weight.

A distributed optimizer keeps the weights of a bucket one after the other in a flat buffer, and each rank owns an equal
range of it. Ranges begin and end anywhere: inside a weight, inside a 128x128 tile. So, with every rank doing the same:

1. the largest magnitude of each tile, as far as it lies in the rank's range; maximum over the ranks (4 bytes a tile);
2. scales from these maxima, the same everywhere, and codes of the rank's own range;
3. codes travel as uint8; what is no FP8 weight (norms, embeddings) travels as it is;
4. codes are put together; the buffer gets the values they stand for, so that all ranks hold the same weights.

The codes equal those of quantising the gathered high-precision weight, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from musa_titan.accelerator.collectives import all_gather_single
from musa_titan.fp8 import reference
from musa_titan.fp8.backend import Backend
from musa_titan.fp8.quantized import BLOCK, Format, Quantized, ScaleMode, blocks

EVEN = 1.05
"""Ranges are gathered padded to the longest if that costs at most this factor, and broadcast one by one otherwise."""


@dataclass(frozen=True)
class Weight:
    """A matrix [rows, columns] that lies at `start` in the flat buffer."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def tiles(self) -> tuple[int, int]:
        return blocks(self.rows), blocks(self.columns)


@dataclass(frozen=True)
class Piece:
    """The part of a rank's range that lies in one weight, or (`weight` None) in none. Offsets in the flat buffer."""

    start: int
    end: int
    weight: int | None


class WeightGather:
    """Gathers one flat buffer over `group`; made once, used every step."""

    def __init__(
        self, buffer: torch.Tensor, weights: Sequence[Weight], group: dist.ProcessGroup, backend: Backend,
        fmt: Format, mode: ScaleMode,
    ) -> None:  # fmt: skip
        self.buffer, self.weights, self.group = buffer, list(weights), group
        self.backend, self.format, self.mode = backend, fmt, mode
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        length = buffer.numel() // self.world
        self.pieces = [self._pieces(rank * length, (rank + 1) * length) for rank in range(self.world)]
        self.tile_offsets = [0]
        for weight in self.weights:
            self.tile_offsets.append(self.tile_offsets[-1] + weight.tiles[0] * weight.tiles[1])

    def start(self) -> Pending:
        """Begin; the caller may compute until :meth:`Pending.wait`, but must leave the buffer alone."""
        amax = self._tile_amax()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        finite = torch.isfinite(amax)
        scale, scale_inv = reference.scales(torch.where(finite, amax, 0.0), self.format, self.mode)
        scale_inv = torch.where(finite, scale_inv, torch.nan)
        codes = [self._encode(piece, scale, finite) for piece in self._own(fp8=True)]
        rest = [self.buffer[piece.start : piece.end] for piece in self._own(fp8=False)]
        return Pending(
            self,
            scale_inv,
            Transfer(codes, self._lengths(fp8=True), torch.uint8, self.buffer.device, self.group),
            Transfer(rest, self._lengths(fp8=False), self.buffer.dtype, self.buffer.device, self.group),
        )

    def finish(self, scale_inv: torch.Tensor, codes: list[torch.Tensor], rest: list[torch.Tensor]) -> list[Quantized]:
        """Put every rank's contribution in its place; returns the quantised weights in order."""
        flat = [torch.empty(w.rows * w.columns, dtype=torch.uint8, device=self.buffer.device) for w in self.weights]
        for rank, pieces in enumerate(self.pieces):
            at = {True: 0, False: 0}
            for piece in pieces:
                fp8, length = piece.weight is not None, piece.end - piece.start
                part = (codes if fp8 else rest)[rank][at[fp8] : at[fp8] + length]
                at[fp8] += length
                if piece.weight is not None:
                    offset = piece.start - self.weights[piece.weight].start
                    flat[piece.weight][offset : offset + length] = part
                elif rank != self.rank:
                    self.buffer[piece.start : piece.end] = part
        return [self._install(index, flat[index], scale_inv) for index in range(len(self.weights))]

    # -- one weight ---------------------------------------------------------------------------------------------------

    def _install(self, index: int, codes: torch.Tensor, scale_inv: torch.Tensor) -> Quantized:
        weight = self.weights[index]
        scales = self._tiles(scale_inv, index).contiguous()
        q = Quantized(codes.view(weight.rows, weight.columns), scales, "tile", self.format, self.mode == "pow2")
        self.buffer[weight.start : weight.end] = self.backend.dequantize(q, self.buffer.dtype).view(-1)
        return q

    def _tile_amax(self) -> torch.Tensor:
        """Largest magnitudes in this rank's range, fp32 [tiles of all weights]; infinity for what is not finite."""
        found = torch.zeros(self.tile_offsets[-1], device=self.buffer.device)
        for piece in self._own(fp8=True):
            assert piece.weight is not None
            first, values = self._tile_rows(piece)
            amax, finite = reference.block_amax(values, "tile")
            tiles = self._tiles(found, piece.weight)[first // BLOCK :][: amax.shape[0]]
            tiles.copy_(torch.maximum(tiles, torch.where(finite, amax, torch.inf)))
        return found

    def _encode(self, piece: Piece, scale: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Codes of one piece of this rank's range, flat uint8."""
        assert piece.weight is not None
        first, values = self._tile_rows(piece)
        rows = slice(first // BLOCK, first // BLOCK + blocks(values.shape[0]))
        codes = reference.encode_blocks(
            values, self._tiles(scale, piece.weight)[rows], self._tiles(finite, piece.weight)[rows], "tile", self.format
        )
        skipped = piece.start - self.weights[piece.weight].start - first * self.weights[piece.weight].columns
        return codes.view(-1)[skipped : skipped + piece.end - piece.start]

    def _tile_rows(self, piece: Piece) -> tuple[int, torch.Tensor]:
        """(first row, fp32 [rows, columns]) of the tile rows that hold `piece`; zeros where others own the values."""
        weight = self.weights[piece.weight or 0]
        start, end = piece.start - weight.start, piece.end - weight.start
        first = start // weight.columns // BLOCK * BLOCK
        last = -(-end // weight.columns)
        values = torch.zeros((last - first) * weight.columns, device=self.buffer.device)
        skipped = start - first * weight.columns
        values[skipped : skipped + end - start] = self.buffer[piece.start : piece.end].float()
        return first, values.view(last - first, weight.columns)

    def _tiles(self, per_tile: torch.Tensor, index: int) -> torch.Tensor:
        return per_tile[self.tile_offsets[index] : self.tile_offsets[index + 1]].view(self.weights[index].tiles)

    # -- who owns what ------------------------------------------------------------------------------------------------

    def _pieces(self, start: int, end: int) -> list[Piece]:
        pieces: list[Piece] = []
        at = start
        for index, weight in sorted(enumerate(self.weights), key=lambda item: item[1].start):
            low, high = max(weight.start, start), min(weight.end, end)
            if low >= high:
                continue
            if at < low:
                pieces.append(Piece(at, low, None))
            pieces.append(Piece(low, high, index))
            at = high
        if at < end:
            pieces.append(Piece(at, end, None))
        return pieces

    def _own(self, fp8: bool) -> list[Piece]:
        return [piece for piece in self.pieces[self.rank] if (piece.weight is not None) == fp8]

    def _lengths(self, fp8: bool) -> list[int]:
        """Elements that each rank contributes."""
        return [
            sum(piece.end - piece.start for piece in pieces if (piece.weight is not None) == fp8)
            for pieces in self.pieces
        ]


class Transfer:
    """Every rank's contribution on its way to all; `lengths` may differ between ranks."""

    def __init__(
        self, parts: list[torch.Tensor], lengths: list[int], dtype: torch.dtype, device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self.lengths, longest = lengths, max(lengths)
        rank, world = dist.get_rank(group), len(lengths)
        own = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
        self.works: list[dist.Work] = []
        if longest * world <= EVEN * sum(lengths):
            whole = torch.empty(world * longest, dtype=dtype, device=device)
            padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
            self._keep = padded
            self.works.append(all_gather_single(whole, padded, group, async_op=True))
            self.received = [whole[r * longest : r * longest + length] for r, length in enumerate(lengths)]
            return
        self.received = [
            own if r == rank else torch.empty(length, dtype=dtype, device=device) for r, length in enumerate(lengths)
        ]
        for source, part in enumerate(self.received):
            if part.numel():
                work = dist.broadcast(part, dist.get_global_rank(group, source), group=group, async_op=True)
                self.works.append(work)

    def wait(self) -> list[torch.Tensor]:
        """What each rank contributed."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass
class Pending:
    """A gather under way."""

    gather: WeightGather
    scale_inv: torch.Tensor
    codes: Transfer
    rest: Transfer

    def wait(self) -> list[Quantized]:
        """Finish; returns the quantised weights in order, and the buffer holds what they stand for."""
        return self.gather.finish(self.scale_inv, self.codes.wait(), self.rest.wait())
