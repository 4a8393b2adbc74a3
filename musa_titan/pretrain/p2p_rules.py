"""What the Mooncake feature asks of Megatron's arguments and of the machine."""

from __future__ import annotations

import ctypes.util
import importlib.util
from typing import Any

from musa_titan.p2p.config import DEFAULT_TIMEOUT, P2PConfig, activation_bytes
from musa_titan.p2p.engine import PACKAGE, SYSTEM_LIBRARIES
from musa_titan.patching.spec import MusaTitanError

FP32_BYTES = 4


def validate(settings: Any, args: Any) -> None:
    """Refuse what cannot work.

    Raises:
        MusaTitanError: no pipeline, a bad value, or a slot that is too small under strict.
    """
    options = settings["p2p"]
    if args.pipeline_model_parallel_size < 2:
        raise MusaTitanError(
            "--musa-p2p mooncake carries tensors between pipeline stages, but --pipeline-model-parallel-size is "
            f"{args.pipeline_model_parallel_size}. Use at least 2 stages, or --musa-p2p default"
        )
    if getattr(args, "use_ring_exchange_p2p", False):
        raise MusaTitanError("--musa-p2p mooncake replaces --use-ring-exchange-p2p. Drop one of the two")
    needed = activation_bytes_of(args)
    P2PConfig(
        slot_bytes=needed if options.slot_bytes is None else options.slot_bytes,
        slots=options.slots,
        timeout=timeout_of(options, args),
    )
    if options.strict_slot and options.slot_bytes is not None and options.slot_bytes < needed:
        raise MusaTitanError(
            f"mooncake p2p: an activation of {args.seq_length} tokens x {args.micro_batch_size} x {args.hidden_size} "
            f"needs {needed:,} B, but a slot holds {options.slot_bytes:,} B. Set --musa-p2p-slot-bytes {needed} "
            "(or drop --musa-p2p-strict-slot to send in chunks)"
        )


def timeout_of(options: Any, args: Any) -> float:
    """Seconds that stages wait for each other: the user's, or those that Megatron gives its process groups.

    Args:
        args: Megatron's arguments, or None in programs on megatron.core alone.
    """
    if options.timeout is not None:
        return float(options.timeout)
    minutes = getattr(args, "distributed_timeout_minutes", None)
    return DEFAULT_TIMEOUT if minutes is None else 60.0 * minutes


def activation_bytes_of(args: Any) -> int:
    """Bytes of one activation between two stages, from Megatron's arguments."""
    # Megatron's configuration then makes pipeline_dtype fp32, whatever the parameters are.
    wide = getattr(args, "fp32_residual_connection", False)
    return activation_bytes(
        seq_length=args.decoder_seq_length or args.seq_length,
        micro_batch_size=args.micro_batch_size,
        hidden_size=args.hidden_size,
        element_size=FP32_BYTES if wide else args.params_dtype.itemsize,
        context_parallel_size=args.context_parallel_size,
        tensor_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
    )


def missing() -> str | None:
    """What this machine lacks, or None. Imports neither torch nor Mooncake."""
    if importlib.util.find_spec("mooncake") is None or importlib.util.find_spec("mooncake.engine") is None:
        return f"mooncake is not installed: pip install {PACKAGE}"
    for library, package in SYSTEM_LIBRARIES.items():
        if ctypes.util.find_library(library) is None:
            return f"Mooncake needs lib{library}: apt-get install {package}"
    return None
