"""Who moves tokens for an expert group: decided once for all its ranks, from what all of them can do.

==============  ====================================================================================================
``ace``         peer copies; the group must be on one node. On the host between processes; on a device where the
                accelerator copies between peers without a kernel
``collective``  all-to-all of the process group
``auto``        on the host ``ace`` where ranks can share memory; on a device ``collective``
==============  ====================================================================================================

An installed DeepEP comes before all of this, see :mod:`musa_titan.dispatch.native`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from musa_titan.accelerator.interface import Accelerator
from musa_titan.accelerator.select import select_accelerator
from musa_titan.dispatch.ace import AceTransport
from musa_titan.dispatch.collective import CollectiveTransport
from musa_titan.dispatch.engine import CopyEngine, InlineEngine, StreamEngine, ThreadEngine
from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.fabric import DeviceFabric, Fabric, HostFabric, open_tensor, share_tensor
from musa_titan.dispatch.flags import Flags, words_needed
from musa_titan.dispatch.options import BackendName, Options
from musa_titan.dispatch.shared import Place, here, open_files, why_not_shared
from musa_titan.dispatch.transport import Transport


def open_transport(group: dist.ProcessGroup, window_bytes: int, options: Options) -> tuple[Transport, CopyEngine]:
    """The transport of `group` and where its work runs. Called by all ranks of the group.

    Raises:
        DispatchError: ``ace`` was asked for and cannot serve this group, with the reason.
    """
    accelerator = select_accelerator()
    on_host = accelerator.device_type == "cpu"
    device = torch.device("cpu") if on_host else torch.device(accelerator.device_type, _index(accelerator))
    if _choose(group, options.backend, accelerator) == "ace":
        return _ace(group, window_bytes, options, accelerator, device)
    transport = CollectiveTransport(group, device)
    return transport, InlineEngine() if on_host else StreamEngine(accelerator.runtime)


def _choose(group: dist.ProcessGroup, asked: BackendName, accelerator: Accelerator) -> BackendName:
    if asked == "collective":
        return asked
    if accelerator.device_type != "cpu":
        if asked == "auto":
            return "collective"
        probe = accelerator.probe("peer_copy")
        if not probe.usable:
            raise DispatchError(f"ace dispatch: {probe.detail}. Use --musa-dispatch collective")
    places: list[Place] = [here()] * dist.get_world_size(group)
    dist.all_gather_object(places, here(), group=group)
    reason = why_not_shared(places)
    if reason is None:
        return "ace"
    if asked == "ace":
        raise DispatchError(
            f"ace dispatch: {reason}. Use --musa-dispatch native or collective, or an expert group inside a node"
        )
    return "collective"


def _ace(
    group: dist.ProcessGroup, window_bytes: int, options: Options, accelerator: Accelerator, device: torch.device
) -> tuple[Transport, CopyEngine]:
    on_host = device.type == "cpu"
    files = open_files(group, words_needed(dist.get_world_size(group)), window_bytes if on_host else 0)
    flags = Flags(files, dist.get_rank(group), options.timeout)
    fabric: Fabric
    engine: CopyEngine
    if on_host:
        fabric, engine = HostFabric([file.window for file in files]), ThreadEngine()
    else:
        fabric = DeviceFabric(group, window_bytes, device, accelerator.runtime, share_tensor, open_tensor)
        engine = StreamEngine(accelerator.runtime)
    return AceTransport(files, flags, fabric, window_bytes), engine


def _index(accelerator: Accelerator) -> int:
    return int(accelerator.runtime.current_device())
