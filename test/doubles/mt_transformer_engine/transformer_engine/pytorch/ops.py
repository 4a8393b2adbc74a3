"""The operation-based API: names that Megatron's annotations mention. The double fuses nothing."""

import torch


class FusibleOperation(torch.nn.Module): ...


class Sequential(torch.nn.Sequential): ...
