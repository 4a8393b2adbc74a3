"""FP8 state: the autocast context, and how a recipe becomes quantisers."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformer_engine.common.recipe import DelayedScaling, Format, MTFP8BlockScaling, Recipe
from transformer_engine.pytorch.tensor.mtfp8_tensor import MTFP8Quantizer

CALLS: Counter[str] = Counter()
"""What ran in FP8 and with which recipe class; read by tests."""


def get_default_fp8_recipe() -> Recipe:
    return DelayedScaling()


class FP8GlobalStateManager:
    FP8_ENABLED = False
    FP8_CALIBRATION = False
    FP8_RECIPE: Recipe | None = None
    FP8_DISTRIBUTED_GROUP: Any = None
    IS_FIRST_FP8_MODULE = False
    FP8_AUTOCAST_DEPTH = 0

    @classmethod
    def reset(cls) -> None:
        cls.FP8_ENABLED, cls.FP8_RECIPE, cls.FP8_AUTOCAST_DEPTH = False, None, 0

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.FP8_ENABLED

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return cls.FP8_CALIBRATION

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.FP8_RECIPE if cls.FP8_RECIPE is not None else get_default_fp8_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.FP8_DISTRIBUTED_GROUP

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        first, cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE, False
        return first

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        if fp8_meta["recipe"].mtfp8():
            return
        raise NotImplementedError("the double has no delayed scaling")

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        if fp8_meta["recipe"].mtfp8():
            CALLS["recompute stash left alone"] += 1
            return
        raise NotImplementedError("the double has no delayed scaling")

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        if not fp8_meta["recipe"].mtfp8():
            raise NotImplementedError("the double has no delayed scaling")


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    manager = FP8GlobalStateManager
    saved = (manager.FP8_ENABLED, manager.FP8_CALIBRATION, manager.FP8_RECIPE, manager.FP8_DISTRIBUTED_GROUP)
    manager.FP8_ENABLED, manager.FP8_CALIBRATION, manager.FP8_DISTRIBUTED_GROUP = enabled, calibrating, fp8_group
    manager.FP8_RECIPE = fp8_recipe if fp8_recipe is not None else get_default_fp8_recipe()
    manager.IS_FIRST_FP8_MODULE = manager.FP8_AUTOCAST_DEPTH == 0
    manager.FP8_AUTOCAST_DEPTH += 1
    try:
        yield
    finally:
        manager.FP8_AUTOCAST_DEPTH -= 1
        manager.FP8_ENABLED, manager.FP8_CALIBRATION, manager.FP8_RECIPE, manager.FP8_DISTRIBUTED_GROUP = saved


@contextmanager
def fp8_model_init(enabled: bool = True, recipe: Recipe | None = None) -> Iterator[None]:
    if enabled:
        raise NotImplementedError("MTFP8 primary weights: the double has none, and none were seen in the original")
    yield


class RecipeState(abc.ABC):
    """Builder of the quantisers of one module in one direction."""

    @staticmethod
    def create(recipe: Recipe, *, mode: str, num_quantizers: int = 1, device: Any = None) -> RecipeState:
        if not recipe.mtfp8():
            raise ValueError(f"{type(recipe).__name__} is not supported")
        return MTFP8BlockScalingRecipeState(recipe, mode=mode, num_quantizers=num_quantizers)

    @abc.abstractmethod
    def make_quantizers(self) -> list[MTFP8Quantizer]: ...


class MTFP8BlockScalingRecipeState(RecipeState):
    """Forward: [activation]*n + [weight]*n + [activation]*n, which fits Linear (n=1) and GroupedLinear; backward:
    activations only."""

    def __init__(self, recipe: MTFP8BlockScaling, *, mode: str, num_quantizers: int = 1) -> None:
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers

    def make_quantizers(self) -> list[MTFP8Quantizer]:
        hybrid = self.recipe.fp8_format == Format.HYBRID
        dtype = "e5m2" if hybrid and self.mode == "backward" else "e4m3"
        activation = MTFP8Quantizer(dtype, 1, self.recipe.tile_size)
        if self.mode == "backward":
            return [activation] * self.num_quantizers
        weight = MTFP8Quantizer(dtype, self.recipe.tile_size, self.recipe.tile_size)
        n = self.num_quantizers // 3
        return [activation] * n + [weight] * n + [activation] * n
