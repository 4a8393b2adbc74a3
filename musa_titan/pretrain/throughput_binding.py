"""Factory of the throughput log (``pretrain/throughput.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from musa_titan.accounting.flops import flops_per_token
from musa_titan.accounting.shape import shape_of
from musa_titan.patching.spec import Context, MusaTitanError
from musa_titan.settings import Settings

CONVENTION = (
    "model FLOPs: 6 x active parameters without input embedding, and causal attention; recomputation is not counted"
)


@dataclass
class Meter:
    """Tokens since the last line, and what they cost."""

    flops: int
    """Of one token."""
    devices: int
    peak: float | None
    """FLOP/s of one device."""
    since: float
    tokens: int = 0

    def line(self, iteration: int, now: float) -> str:
        """What is logged at `now`; starts a new interval."""
        rate = self.tokens / max(now - self.since, 1e-9) / self.devices
        self.since, self.tokens = now, 0
        text = f" [throughput] iteration {iteration}: {rate:,.1f} tokens/s/GPU"
        text += f", {rate * self.flops / 1e12:,.4g} TFLOP/s/GPU"
        return text + (f", MFU {rate * self.flops / self.peak:.1%}" if self.peak else "")


def validate(settings: Settings, args: Any) -> None:
    """Refuse a peak that is none, and a model whose weights are not counted.

    Raises:
        MusaTitanError: with the flag to change.
    """
    peak = settings["throughput"].peak_tflops
    if peak is not None and peak <= 0:
        raise MusaTitanError(f"--musa-throughput-peak-tflops {peak:g} is no peak; give the device's, above 0")
    try:
        shape_of(args, 1)
    except MusaTitanError as error:
        raise MusaTitanError(f"--musa-throughput: {error}. Drop the flag") from None


def log_throughput(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Patch factory: after Megatron's own log of a step, ours, on the rank that prints the loss."""
    peak = context.settings["throughput"].peak_tflops
    meter: Meter | None = None

    def training_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal meter
        result = current(*args, **kwargs)
        meter = _count(meter, peak * 1e12 if peak is not None else None)
        return result

    return training_log


def _count(meter: Meter | None, peak: float | None) -> Meter:
    """Add a step to the meter and log at Megatron's interval; the first step only starts the clock."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args
    from megatron.training.utils import print_rank_last

    args = get_args()
    iteration = args.curr_iteration + 1
    now = time.perf_counter()
    if meter is None:
        flops = flops_per_token(shape_of(args, args.padded_vocab_size), args.seq_length)
        print_rank_last(f" [throughput] {flops / 1e9:,.4g} GFLOP a token; {CONVENTION}")
        return Meter(flops, args.world_size, peak, now)
    meter.tokens += get_current_global_batch_size() * args.seq_length
    if iteration % args.log_interval == 0:
        print_rank_last(meter.line(iteration, now))
    return meter
