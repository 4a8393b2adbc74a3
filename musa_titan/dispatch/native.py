"""An installed DeepEP behind the surface that Megatron calls.

=====================  =============================================================================================
installed              what differs
=====================  =============================================================================================
NVIDIA v1              nothing
NVIDIA v2, legacy      ``deep_ep.utils`` has no ``EventOverlap``, without which Megatron takes DeepEP for missing
MT-DeepEP, public      ``num_mtl_bytes`` and ``get_mtl_buffer_size_hint``; no ``num_worst_tokens``, no ``bias``
MT-DeepEP with ACE     made for ``token_num`` x ``hidden_size`` x ``num_topk``; combine takes its input only from
                       ``get_ace_combine_buffer``; bf16 only
=====================  =============================================================================================

What is there is read from signatures, not from a version: wheels of one version number differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch

from musa_titan.dispatch import wire
from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.options import get_options
from musa_titan.fp8.quantized import E4M3, Quantized

ROW_BYTES = 16
"""DeepEP's kernels take rows of a multiple of this; between nodes of ``ROW_BYTES_BETWEEN_NODES``."""
ROW_BYTES_BETWEEN_NODES = 512
NEEDED = ("get_dispatch_layout", "dispatch", "combine", "get_dispatch_config", "get_combine_config", "set_num_sms")


@dataclass(frozen=True)
class Surface:
    """What an installed ``deep_ep`` accepts."""

    name: str
    size_argument: str
    hint: str
    parameters: Mapping[str, frozenset[str]]
    """Method -> names of its parameters."""
    ace: bool


def probe(module: ModuleType) -> Surface:
    """Read the surface of an installed ``deep_ep``.

    Raises:
        DispatchError: it is none of the known ones.
    """
    buffer = getattr(module, "Buffer", None)
    problem = None
    if buffer is None:
        problem = f"it has no Buffer, only {', '.join(n for n in dir(module) if not n.startswith('_')) or 'nothing'}"
    else:
        absent = [name for name in NEEDED if not hasattr(buffer, name)]
        problem = f"its Buffer has no {', '.join(absent)}" if absent else None
    made = frozenset() if buffer is None else _parameters(buffer.__init__)
    size = next((name for name in ("num_nvl_bytes", "num_mtl_bytes") if name in made), None)
    if problem is None and size is None:
        problem = f"its Buffer takes ({', '.join(sorted(made - {'self'}))}) and no number of bytes"
    if problem is not None:
        raise DispatchError(
            f"native dispatch: the installed deep_ep has an unknown API: {problem}. Known are NVIDIA's DeepEP v1, v2 "
            "with its legacy Buffer, and MT-DeepEP. Install one of these, or use --musa-dispatch ace or collective"
        )
    assert buffer is not None
    assert size is not None
    ace = "use_ace" in made and hasattr(buffer, "get_ace_combine_buffer")
    name = "MT-DeepEP with ACE" if ace else "MT-DeepEP" if size == "num_mtl_bytes" else "DeepEP"
    parameters = {method: _parameters(getattr(buffer, method)) for method in ("dispatch", "combine")}
    return Surface(name, size, f"get_{size.split('_')[1]}_buffer_size_hint", {**parameters, "__init__": made}, ace)


def native_buffer(module: ModuleType) -> type[NativeBuffer]:
    """The class that stands for ``module.Buffer``.

    Raises:
        DispatchError: the API of `module` is unknown.
    """
    surface = probe(module)
    return type("Buffer", (NativeBuffer,), {"native": module.Buffer, "surface": surface})


class NativeConfig:
    """A native Config under DeepEP's names, for rows padded as the kernels want them."""

    def __init__(self, config: Any, surface: Surface) -> None:
        self.native = config
        self._surface = surface

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for peers of the node."""
        padded = -(-hidden_bytes // ROW_BYTES_BETWEEN_NODES) * ROW_BYTES_BETWEEN_NODES
        return int(getattr(self.native, self._surface.hint)(padded, num_ranks))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for other nodes."""
        padded = -(-hidden_bytes // ROW_BYTES_BETWEEN_NODES) * ROW_BYTES_BETWEEN_NODES
        return int(self.native.get_rdma_buffer_size_hint(padded, num_ranks))


class NativeBuffer:
    """``deep_ep.Buffer`` of an installed package; made by :func:`native_buffer`."""

    native: ClassVar[Any]
    surface: ClassVar[Surface]

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **more: Any) -> None:
        surface, options = self.surface, get_options()
        arguments = {surface.size_argument: num_nvl_bytes, "num_rdma_bytes": num_rdma_bytes, **more}
        if surface.ace:
            if not options.hidden:
                raise DispatchError("native dispatch: MT-DeepEP with ACE needs the hidden size, Options.hidden")
            arguments.update(
                use_ace=True, token_num=options.tokens, hidden_size=self._padded(options.hidden, 2, num_rdma_bytes),
                num_topk=options.topk,
            )  # fmt: skip
            if "train_mode" in surface.parameters["__init__"]:
                arguments["train_mode"] = True
        self.buffer = self.native(group, **self._accepted("__init__", arguments))
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """For the native kernels."""
        cls.native.set_num_sms(new_num_sms)

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> NativeConfig:
        """The native choice."""
        return NativeConfig(cls.native.get_dispatch_config(num_ranks), cls.surface)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> NativeConfig:
        """The native choice."""
        return NativeConfig(cls.native.get_combine_config(num_ranks), cls.surface)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # not made yet
            raise AttributeError(name)
        return getattr(self.buffer, name)

    def dispatch(self, x: Any, handle: Any = None, **arguments: Any) -> tuple[Any, ...]:
        """See :meth:`musa_titan.dispatch.buffer.Buffer.dispatch`. FP8 messages go as a pair of codes and scales."""
        options = get_options()
        fp8 = not isinstance(x, tuple) and (options.fp8_dispatch if handle is None else options.fp8_combine_grad)
        if self.surface.ace:
            self._check_ace(x, fp8)
        if isinstance(x, tuple):
            return tuple(self._call("dispatch", x, handle=handle, **arguments))
        hidden, dtype = x.shape[1], x.dtype
        padded = self._pad(x)
        if fp8:
            q = wire.quantizer(x.device).quantize(padded, "row", E4M3, "pow2")
            sent = (q.codes.view(torch.float8_e4m3fn), q.scale_inv)
            received, *rest = self._call("dispatch", sent, handle=handle, **arguments)
            if rest[-1] is not None:
                rest[-1].current_stream_wait()
            codes, scales = received
            back = Quantized(codes.view(torch.uint8), scales, "row", E4M3, exact_in_bf16=True)
            values = wire.quantizer(x.device).dequantize(back, dtype)
        else:
            values, *rest = self._call("dispatch", padded, handle=handle, **arguments)
        return (self._cut(values, hidden, rest), *rest)

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None, **arguments: Any
    ) -> tuple[Any, ...]:
        """See :meth:`musa_titan.dispatch.buffer.Buffer.combine`."""
        hidden, padded = x.shape[1], self._pad(x)
        if self.surface.ace:
            padded, topk_weights = self._into_ace_buffer(padded, topk_weights)
        values, *rest = self._call("combine", padded, handle=handle, topk_weights=topk_weights, **arguments)
        return (self._cut(values, hidden, rest), *rest)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _call(self, method: str, x: Any, **arguments: Any) -> Any:
        config = arguments.get("config")
        if isinstance(config, NativeConfig):
            arguments["config"] = config.native
        return getattr(self.buffer, method)(x, **self._accepted(method, arguments))

    def _accepted(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`arguments` without those that the native method lacks; these may only say "nothing special"."""
        known = self.surface.parameters[method]
        refused = [name for name, value in arguments.items() if name not in known and not _says_nothing(value)]
        if refused:
            raise DispatchError(
                f"native dispatch: {self.surface.name} here does not take {', '.join(refused)} in {method}. Use a "
                "newer wheel, or --musa-dispatch ace or collective"
            )
        return {name: value for name, value in arguments.items() if name in known}

    def _check_ace(self, x: Any, fp8: bool) -> None:
        options = get_options()
        if fp8 or isinstance(x, tuple) or x.dtype != torch.bfloat16:
            what = "FP8" if fp8 or isinstance(x, tuple) else str(x.dtype)
            raise DispatchError(
                f"native dispatch: {self.surface.name} moves bf16 only, not {what}. Drop --musa-fp8-alltoall and train "
                "with --bf16, or use --musa-dispatch collective"
            )
        if x.shape[0] > options.tokens:
            raise DispatchError(
                f"native dispatch: {x.shape[0]} tokens, but the ACE buffers were made for {options.tokens}. Set "
                f"--musa-dispatch-tokens {x.shape[0]}"
            )

    def _into_ace_buffer(
        self, x: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy into the only memory that the copy engine reads from."""
        options = get_options()
        limit = options.tokens * options.topk
        if x.shape[0] > limit:
            raise DispatchError(
                f"native dispatch: {x.shape[0]} rows to combine, but the ACE buffers hold {limit}, "
                f"{options.tokens} tokens x {options.topk} choices. Set --musa-dispatch-tokens "
                f"{-(-x.shape[0] // options.topk)}"
            )
        given = self.buffer.get_ace_combine_buffer(
            num_out_tokens=x.shape[0], hidden=x.shape[1], num_topk=options.topk, with_topk=weights is not None
        )
        values, room = given if isinstance(given, (tuple, list)) else (given, None)
        values.copy_(x)
        if weights is None:
            return values, None
        if room is None:
            raise DispatchError(
                f"native dispatch: {self.surface.name} gave no room for weights. Use --musa-dispatch collective"
            )
        room.copy_(weights)
        return values, room

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        width = self._padded(x.shape[1], x.element_size(), self.num_rdma_bytes)
        return x if width == x.shape[1] else torch.nn.functional.pad(x, (0, width - x.shape[1]))

    @staticmethod
    def _padded(hidden: int, element_size: int, rdma_bytes: int) -> int:
        multiple = (ROW_BYTES_BETWEEN_NODES if rdma_bytes else ROW_BYTES) // element_size
        return -(-hidden // multiple) * multiple

    @staticmethod
    def _cut(values: torch.Tensor, hidden: int, rest: list[Any]) -> torch.Tensor:
        if values.shape[1] == hidden:
            return values
        if rest[-1] is not None:
            rest[-1].current_stream_wait()
        return values[:, :hidden].contiguous()


def _says_nothing(value: Any) -> bool:
    """Whether an argument is what leaving it out means: no tensor, no padding, an alignment of 1."""
    return value is None or (isinstance(value, int) and value in (0, 1))


def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
