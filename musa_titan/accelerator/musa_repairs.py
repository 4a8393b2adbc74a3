"""What torch on MUSA still lacks for unmodified Megatron once torchada has renamed ``torch.cuda``.

One function per gap; each says what was observed without it, and writes through the journal. A gap is closed where it
shows, not by version: a repair acts only when the plain behaviour is wrong, so a torch_musa or torchada that closes the
gap itself makes it a no-op. Nothing here knows a Megatron symbol.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal

logger = logging.getLogger(__name__)

CAPABILITY = (8, 3)
"""What ``torch.cuda.get_device_capability`` answers. An S5000 is (3, 1), and Megatron asserts a major of 8 for
``--moe-grouped-gemm``; from 9 on it takes a device for a Hopper card, from 10 on for one without the
``CUDA_DEVICE_MAX_CONNECTIONS=1`` requirement."""

_MUSA_TYPE, _CUDA_TYPE = "torch.musa.", "torch.cuda."


def report_available(journal: Journal) -> None:
    """``torch.cuda.is_available`` stays False when torchada was imported before TORCHADA_FORCE_CUDA_AVAILABLE was set,
    and Megatron's initialisation asserts it."""
    if not torch.cuda.is_available():
        journal.set(torch.cuda, "is_available", _musa().is_available)


def answer_cuda_type_names(journal: Journal) -> None:
    """``Tensor.type()`` says ``torch.musa.FloatTensor``; Megatron's optimizers compare with ``torch.cuda.FloatTensor``
    (clip_grads raises AssertionError, distrib_optimizer TypeError)."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace(_MUSA_TYPE, _CUDA_TYPE)
        if isinstance(dtype, str):
            dtype = dtype.replace(_CUDA_TYPE, _MUSA_TYPE)
        return original(self, dtype, *args, **kwargs)

    journal.set(torch.Tensor, "type", type_)


def claim_capability(journal: Journal) -> None:
    """A capability of (3, 1) fails Megatron's gates for kernels that MUSA does have. ``torch.musa`` keeps the truth."""
    properties_of = torch.cuda.get_device_properties
    if torch.cuda.get_device_capability()[0] >= CAPABILITY[0]:
        return

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return CAPABILITY

    @functools.wraps(properties_of)
    def get_device_properties(device: Any = None) -> Any:
        return _Properties(properties_of(device))

    journal.set(torch.cuda, "get_device_capability", get_device_capability)
    journal.set(torch.cuda, "get_device_properties", get_device_properties)


class _Properties:
    """Device properties with the capability that :func:`claim_capability` claims."""

    major, minor = CAPABILITY

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __repr__(self) -> str:
        return f"{self._real!r} as capability {CAPABILITY}"


def accept_new_group_arguments(journal: Journal) -> None:
    """torchada's ``new_group`` lacks ``sort_ranks`` and its ``init_process_group`` lacks ``_ranks`` of torch 2.13:
    TypeError. A call with such an argument goes to torch's own function, translated here."""
    for name in _GROUP_FUNCTIONS:
        wrapped = getattr(dist, name)
        torchs_own = inspect.unwrap(wrapped)
        lacking = set(inspect.signature(torchs_own).parameters) - set(_own_parameters(wrapped))
        if lacking:
            journal.set(dist, name, _reach_around(wrapped, torchs_own, frozenset(lacking)))


def _reach_around(wrapped: Callable[..., Any], torchs_own: Callable[..., Any], lacking: frozenset[str]) -> Any:
    @functools.wraps(wrapped)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(inspect.signature(torchs_own).bind(*args, **kwargs).arguments)
        if lacking.isdisjoint(given):
            return wrapped(*args, **kwargs)
        if given.get("device_id") is not None:
            given["device_id"] = torch.device(given["device_id"])  # torchada's torch.device says musa for cuda
        return torchs_own(**_translated(given))

    return call


def translate_composite_backends(journal: Journal) -> None:
    """torchada knows the word ``nccl`` only: ``cpu:gloo,cuda:nccl`` reaches c10d and fails, there being no NCCL."""
    for name in _GROUP_FUNCTIONS:
        journal.set(dist, name, _with_arguments(getattr(dist, name), _translated))


def _translated(arguments: dict[str, Any]) -> dict[str, Any]:
    backend = arguments.get("backend")
    return {**arguments, "backend": musa_backend(backend)} if isinstance(backend, str) else arguments


def musa_backend(backend: str) -> str:
    """``nccl`` -> ``mccl`` and ``cpu:gloo,cuda:nccl`` -> ``cpu:gloo,musa:mccl``; other names stay."""
    names = {"cuda": "musa", "nccl": "mccl"}
    return ",".join(
        ":".join(names.get(word.strip().lower(), word) for word in part.split(":")) for part in backend.split(",")
    )


def drop_nccl_options(journal: Journal) -> None:
    """MCCL is registered without the extended creator, so ``pg_options`` cannot reach it, and a CPU-built torch has no
    ``ProcessGroupNCCL`` to make them of: AttributeError under ``--high-priority-stream-groups`` and
    ``--nccl-communicator-config-path``. The options are accepted and dropped; TORCH_MCCL_HIGH_PRIORITY=1 is what MCCL
    offers instead."""
    said = False

    def without_options(arguments: dict[str, Any]) -> dict[str, Any]:
        nonlocal said
        if not isinstance(arguments.get("pg_options"), _NCCLOptions):
            return arguments
        if not said:
            logger.warning("NCCL process group options have no effect on MCCL; use TORCH_MCCL_HIGH_PRIORITY=1")
            said = True
        return {**arguments, "pg_options": None}

    if not hasattr(dist, "ProcessGroupNCCL"):
        journal.set(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {"Options": _NCCLOptions}))
        for name in _GROUP_FUNCTIONS:
            journal.set(dist, name, _with_arguments(getattr(dist, name), without_options))


class _NCCLOptions:
    """Stands in for ``ProcessGroupNCCL.Options``: any field can be set, none is read."""

    def __init__(self, **fields: Any) -> None:
        self.config = type("NCCLConfig", (), {})()
        self.__dict__.update(fields)


def keep_parameter_objects(journal: Journal) -> None:
    """``Module.cuda()`` assigns ``param.data`` on CUDA, but on PrivateUse1 it makes new Parameters (c10 counts CPU and
    PrivateUse1 tensors as incompatible). Their Python attributes are gone: ``sequence_parallel`` and ``allreduce``
    among them, so gradients stay unreduced without an error. Tied parameters come apart for the same reason."""
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = dict(self._parameters)
        result = original(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._parameters.get(name)
            if old is not None and new is not None and new is not old:
                self._parameters[name] = _become(old, new)
        return result

    journal.set(torch.nn.Module, "_apply", apply)


def _become(old: torch.nn.Parameter, new: torch.nn.Parameter) -> torch.nn.Parameter:
    """`old` with the tensor of `new`; where torch cannot swap (weak references), `new` with the attributes of `old`."""
    attributes = dict(old.__dict__)
    kept = old
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except RuntimeError:
        kept = new
    kept.__dict__.update(attributes)
    return kept


def assign_data_across_devices(journal: Journal) -> None:
    """``param.data = musa_tensor`` on a CPU parameter raises "incompatible tensor type", while CUDA takes it (Megatron
    does it under ``--use-cpu-initialization``). The parameter then takes over a tensor on the device."""
    plain: Any = torch.Tensor.data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        try:
            plain.__set__(self, value)
        except RuntimeError:
            if value.device.type == self.device.type:
                raise
            _take_over(self, value)

    journal.set(torch.Tensor, "data", property(plain.__get__, set_data))


def _take_over(tensor: torch.Tensor, value: torch.Tensor) -> None:
    attributes = dict(tensor.__dict__)
    other = torch.Tensor._make_subclass(type(tensor), value.detach(), tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    tensor.__dict__.update(attributes)


_GROUP_FUNCTIONS = ("init_process_group", "new_group")


def _with_arguments(function: Callable[..., Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`function` called with its arguments, by name, as `change` returns them."""
    signature = inspect.signature(inspect.unwrap(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**change(dict(signature.bind(*args, **kwargs).arguments)))

    return call


def _own_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function, follow_wrapped=False).parameters)


def _musa() -> Any:
    return torch.musa  # type: ignore[attr-defined]


REPAIRS: tuple[tuple[str, Callable[[Journal], None]], ...] = (
    ("availability", report_available),
    ("tensor_type", answer_cuda_type_names),
    ("device_capability", claim_capability),
    ("group_arguments", accept_new_group_arguments),
    ("composite_backend", translate_composite_backends),
    ("nccl_options", drop_nccl_options),
    ("parameter_objects", keep_parameter_objects),
    ("data_assignment", assign_data_across_devices),
)
"""Name -> repair, in the order of installation. A mutation test leaves one out and expects the failure it names."""
