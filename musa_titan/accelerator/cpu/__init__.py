"""A plain CPU in the role of the accelerator: development, CI, and the rehearsal of a run without a GPU.

Unmodified Megatron talks to ``torch.cuda``. This package gives it a *view*: the same names, served by host memory,
gloo and one CPU generator. Tensors stay honest CPU tensors (``is_cuda`` is False, ``device.type`` is ``"cpu"``); only
what is asked of ``cuda`` is redirected. Every write goes through a journal, so that it can be taken back.

=================  ====================================================================================
``devices``        what ``"cuda"``, ``0`` or ``torch.device("cuda", 3)`` mean: the one translation table
``classes``        stand-ins for ``torch.device`` and ``torch.Generator``
``tensors``        factories with ``device=``, and methods of ``Tensor`` and ``Module``
``streams``        Stream, Event, current_stream
``memory``         memory statistics, from the resident set of the process
``rng``            ``torch.cuda``'s random state is the CPU's
``namespace``      what else ``torch.cuda`` has: device queries, nvtx, profiler, autocast
``collectives``    nccl is gloo
=================  ====================================================================================

Importing the package imports no torch.
"""

from musa_titan.accelerator.cpu.accelerator import CpuAccelerator

__all__ = ["CpuAccelerator"]
