"""Products that run while their operands or results travel around the ring of a tensor-parallel group.

Gather: every rank holds the rows of one part. In each of ``world`` rounds it multiplies the part it has while sending
that part's codes and scales, in one message, to the next rank and receiving another from the previous one.

Scatter: every rank has all rows of a product of which it needs the sum over ranks for one part only. The sum for part c
starts at rank c + 1, goes around the ring, and each rank adds its own product, computed while the message travels; it
ends at rank c. The order of the additions is thus fixed.

Rows of a product do not depend on each other, so both give the bits of the product over everything at once; the scatter
those of a sum in ring order, which for two ranks is any order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from musa_titan.fp8.backend import Form
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.quantized import Quantized


def gather_and_multiply(
    layer: Fp8Layer, form: Form, part: Quantized, weight: Quantized, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """`part`: this rank's [m, K] -> the product `form` of all ranks' rows with `weight`: [world * m, N]."""
    rank, world, rows = dist.get_rank(group), dist.get_world_size(group), part.codes.shape[0]
    y: torch.Tensor | None = None
    message = _pack(part)
    for step in range(world):
        incoming = torch.empty_like(message)
        travelling = _exchange(message, incoming, group) if step < world - 1 else []
        product = layer.product(form, _unpack(message, part), weight, dtype)
        y = product.new_empty(world * rows, product.shape[1]) if y is None else y
        source = (rank - step) % world
        y[source * rows : (source + 1) * rows] = product
        for work in travelling:
            work.wait()
        message = incoming
    assert y is not None
    return y


def multiply_and_scatter(
    layer: Fp8Layer, form: Form, a: Quantized, weight: Quantized, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """`a`: [world * m, K] -> this rank's rows [m, N] of the sum over ranks of the product `form` with `weight`."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    total: torch.Tensor | None = None
    travelling: list[dist.Work] = []
    incoming: torch.Tensor | None = None
    for step in range(world):
        product = layer.product(form, _part(a, (rank - 1 - step) % world, world), weight, dtype)
        for work in travelling:
            work.wait()
        total = product if incoming is None else incoming + product
        if step < world - 1:
            incoming = torch.empty_like(total)
            travelling = _exchange(total, incoming, group)
    assert total is not None
    return total


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Send to the next rank of the ring and receive from the previous one."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(world))
    operations = [
        dist.P2POp(dist.isend, outgoing, ranks[(rank + 1) % world], group),
        dist.P2POp(dist.irecv, incoming, ranks[(rank - 1) % world], group),
    ]
    works: list[dist.Work] = dist.batch_isend_irecv(operations)
    return works


def _pack(q: Quantized) -> torch.Tensor:
    """Codes, then the scales of `q` (none for one scale a tensor, which all ranks have): flat uint8."""
    codes = q.codes.reshape(-1)
    if q.kind == "tensor":
        return codes
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % q.scale_inv.element_size()))
    return torch.cat([codes, q.scale_inv.reshape(-1).view(torch.uint8)])


def _unpack(message: torch.Tensor, like: Quantized) -> Quantized:
    """What :func:`_pack` packed from a matrix shaped as `like`."""
    codes = message[: like.codes.numel()].view(like.codes.shape)
    if like.kind == "tensor":
        return Quantized(codes, like.scale_inv, like.kind, like.format, like.exact_in_bf16)
    scales = message[message.numel() - like.scale_inv.nbytes :].view(torch.float32).view(like.scale_inv.shape)
    return Quantized(codes, scales, like.kind, like.format, like.exact_in_bf16)


def _part(q: Quantized, index: int, parts: int) -> Quantized:
    """Rows of part `index` out of `parts` equal ones."""
    rows = q.codes.shape[0] // parts
    where = slice(index * rows, (index + 1) * rows)
    scale_inv = q.scale_inv if q.kind == "tensor" else q.scale_inv[where]
    return Quantized(q.codes[where], scale_inv, q.kind, q.format, q.exact_in_bf16)
