"""What a session is configured with, and how large a slot has to be."""

from __future__ import annotations

from dataclasses import dataclass

from musa_titan.p2p.errors import P2PError

TRANSPORTS = ("auto", "rdma", "tcp", "musa")
FALLBACKS = ("error", "default")
DEFAULT_TIMEOUT = 600.0
DEFAULT_SLOT_BYTES = 16 * 1024 * 1024
"""For programs that tell neither a slot size nor the shape of an activation; larger messages travel in chunks."""


@dataclass(frozen=True, kw_only=True)
class P2PConfig:
    """Settings of one rank.

    All ranks of a pipeline must give the same `slot_bytes`, `slots`, `strict_slot` and `fallback`, and find the same
    transport; that is compared when they meet. The timeouts, `devices` and `host` may differ.
    """

    slot_bytes: int = DEFAULT_SLOT_BYTES
    slots: int = 2
    """Slots of a channel, that is: messages that may be on their way to one neighbour in one direction."""
    strict_slot: bool = False
    """Refuse a payload larger than a slot instead of sending it in chunks."""
    transport: str = "auto"
    timeout: float = DEFAULT_TIMEOUT
    """Seconds without any progress of a pending transfer after which the session fails. A peer that computes or
    compiles for longer than that is taken for stalled."""
    start_timeout: float = DEFAULT_TIMEOUT
    """Seconds that ranks wait for each other when the session is opened."""
    devices: str = ""
    """RDMA devices to use, separated by commas; empty: all."""
    host: str = ""
    """Name or address of the network interface for the engine's sockets; empty: the one that reaches MASTER_ADDR."""
    fallback: str = "error"
    """What happens on all ranks when one cannot start: ``error``, or ``default`` for the collective library."""

    def __post_init__(self) -> None:
        if self.slot_bytes < 1 or self.slots < 1:
            raise P2PError(
                f"mooncake p2p: {self.slots} slots of {self.slot_bytes:,} B cannot carry a message. "
                "Set --musa-p2p-slots and --musa-p2p-slot-bytes to at least 1"
            )
        if not self.timeout > 0:
            raise P2PError(f"mooncake p2p: a timeout of {self.timeout} s is none. Set --musa-p2p-timeout above 0")
        if not self.start_timeout > 0:
            raise P2PError(f"mooncake p2p: a start timeout of {self.start_timeout} s is none. Set it above 0")
        if self.transport not in TRANSPORTS:
            raise P2PError(f"mooncake p2p: transport {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if self.fallback not in FALLBACKS:
            raise P2PError(f"mooncake p2p: fallback {self.fallback!r} is not one of {', '.join(FALLBACKS)}")


def activation_bytes(
    *,
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    element_size: int,
    context_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """Bytes of the activation ``[seq / (CP * TP if sequence parallel), micro-batch, hidden]`` between two stages.

    Kimi-K2 (4096 tokens x 7168, bf16) gives 58,720,256; Ling-1T (4096 x 8192, bf16) gives 67,108,864.
    """
    tokens = seq_length // context_parallel_size
    if sequence_parallel:
        tokens //= tensor_parallel_size
    return tokens * micro_batch_size * hidden_size * element_size
