"""Hooks for ``test.integration.runner.Runner.run(hooks=...)`` on the torch_musa double.

A hook runs in a forked rank before training, so what it changes dies with the rank.
"""

from __future__ import annotations

from typing import Any


def single_tensor_adam(recorder: Any) -> None:
    """Let torch's Adam update one tensor at a time, as it does on a CPU. On a device it takes foreach kernels, whose
    order of operations rounds differently."""
    from torch.optim import adam

    adam._default_to_fused_or_foreach = lambda *args, **kwargs: (False, False)


def loaders_draw_aside(recorder: Any) -> None:
    """With MUSA_DOUBLE_SHARED_RNG=1: data loaders do not move the device's generator, as in the CPU backend."""
    import torch

    if torch.device("cuda").type == "musa":
        from torch.utils.data import DataLoader

        from musa_titan.accelerator.cpu.rng import _iterate_aside

        DataLoader.__iter__ = _iterate_aside(DataLoader.__iter__)


def like_the_cpu_backend(recorder: Any) -> None:
    """What a run on the double needs, besides the shared generator, to be bitwise equal to one on the CPU backend."""
    single_tensor_adam(recorder)
    loaders_draw_aside(recorder)


def without_tensor_type(recorder: Any) -> None:
    """Leave out the repair ``tensor_type``."""
    import torch

    torch.Tensor.type = torch.Tensor.type.__wrapped__


def without_parameter_objects(recorder: Any) -> None:
    """Leave out the repair ``parameter_objects``."""
    import torch

    torch.nn.Module._apply = torch.nn.Module._apply.__wrapped__


def without_data_assignment(recorder: Any) -> None:
    """Leave out the repair ``data_assignment``."""
    import torch

    torch.Tensor.data = torch._C.TensorBase.data


def without_device_capability(recorder: Any) -> None:
    """Leave out the repair ``device_capability``."""
    import torch

    torch.cuda.get_device_capability = torch.musa.get_device_capability
    torch.cuda.get_device_properties = torch.musa.get_device_properties


def without_nccl_options(recorder: Any) -> None:
    """Leave out the repair ``nccl_options``."""
    import torch.distributed as dist

    if hasattr(dist, "ProcessGroupNCCL"):
        del dist.ProcessGroupNCCL
