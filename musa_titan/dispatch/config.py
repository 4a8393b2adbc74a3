"""``deep_ep.Config``: how many bytes a Buffer needs. Kernel tuning in it means nothing to a copy engine."""

from __future__ import annotations

from dataclasses import dataclass

from musa_titan.dispatch.options import get_options

ROUTING_BYTES = 512
"""Room beside the values of a row: 8 bytes for each of up to 64 experts of a token."""


@dataclass(frozen=True)
class Config:
    """Same parameters as DeepEP's."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the window of a rank of `num_ranks` for rows of `hidden_bytes`."""
        return get_options().rows(num_ranks) * (hidden_bytes + ROUTING_BYTES)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: nothing here crosses nodes by RDMA of its own."""
        return 0
