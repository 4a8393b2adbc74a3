"""A software double of torch_musa: the PrivateUse1 backend "musa" over host memory. Test code only.

``import torch_musa`` with this directory's parent on ``sys.path`` renames PrivateUse1 for the life of the process, so
tests import it in processes of their own. NAMES.md says which names exist, where the public torch_musa defines them,
and what the double cannot show. Switches: ``MUSA_DOUBLE_DEVICES`` (default 8) and ``MUSA_DOUBLE_SHARED_RNG=1``.
"""

# ruff: noqa: E402, F401, I001 - re-exports, in the order in which they depend on one another
from __future__ import annotations

import os
import sys

import torch

__version__ = "2.7.1"  # the public release whose names are provided

torch.utils.rename_privateuse1_backend("musa")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch_musa brings an inductor backend, the double has none

from . import _build

_MUSAC = _build.load()

from .core._lazy_init import (
    MusaError,
    _initialized,
    _is_in_bad_fork,
    _lazy_call,
    _lazy_init,
    check_error,
    is_initialized,
    musart,
)
from .core.device import (
    Device as device,  # noqa: N813 - torch_musa's name
    DeviceOf as device_of,  # noqa: N813
    _DeviceGuard,
    _exchange_device,
    _maybe_exchange_device,
    can_device_access_peer,
    current_device,
    device_count,
    get_amp_supported_dtype,
    get_arch_list,
    get_device_capability,
    get_device_name,
    get_device_properties,
    is_available,
    is_bf16_supported,
    is_tf32_supported,
    set_device,
    synchronize,
)
from .core.stream import (
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    _set_stream_by_id,
    current_stream,
    default_stream,
    set_stream,
    stream,
)
from .core import amp, mccl, memory
from .core.memory import (
    MemPool,
    MemPoolContext,
    MUSAPluggableAllocator,
    _dump_snapshot,
    _record_memory_history,
    _set_allocator_settings,
    change_current_allocator,
    empty_cache,
    get_allocator_backend,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_all,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
    use_mem_pool,
)
from .core.random import (
    default_generators,
    fork_rng,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .musa_graph import MUSAGraph, graph, graph_pool_handle, is_current_stream_capturing, make_graphed_callables

OutOfMemoryError = torch.OutOfMemoryError


def ipc_collect() -> None:
    """There is no interprocess memory."""


def _install() -> None:
    """What importing torch_musa changes in torch."""
    from ._tensor_types import tensor_types
    from .distributed import register

    module = sys.modules[__name__]
    for name, kind in tensor_types().items():
        setattr(module, name, kind)
    torch._register_device_module("musa", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.version.musa = _MUSAC._musa_version
    torch.random.fork_rng = fork_rng
    register()


_install()
