"""Recipes of TE v2.0 with Moore Threads' block scaling in the place of MXFP8."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E4M3 = _FormatHelper(448, 448)
    E5M2 = _FormatHelper(57344, 57344)
    HYBRID = _FormatHelper(448, 57344)


class Recipe:
    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def mtfp8(self) -> bool:
        return isinstance(self, MTFP8BlockScaling)

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    interval: int = -1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class MTFP8BlockScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    tile_size: int = 128

    def __post_init__(self) -> None:
        assert self.tile_size == 128, "only 128 is supported"
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."
        assert not self.fp8_dpa, "FP8 attention is not supported"
        assert not self.fp8_mha, "FP8 attention is not supported"


MXFP8BlockScaling = MTFP8BlockScaling
