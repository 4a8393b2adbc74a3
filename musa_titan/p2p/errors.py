"""What can go wrong between two pipeline stages. Each message names the rank and a remedy; that of a transfer also the
peer, the channel, and the chunk (sequence) or message it is about."""

from __future__ import annotations

from musa_titan.patching.spec import MusaTitanError


class P2PError(MusaTitanError):
    """Base of all errors of pipeline transfers."""


class EngineError(P2PError):
    """The transfer engine is missing, cannot be started as asked, or refused memory or a transfer."""


class HandshakeError(P2PError):
    """The stages of a pipeline do not fit together: other settings, another run, or one that never came."""


class PeerLostError(P2PError):
    """A neighbour's process has ended, or its machine is gone."""


class PeerStalledError(P2PError):
    """A neighbour lives but nothing arrived within the timeout."""


class RemoteFailureError(P2PError):
    """Another stage reported the failure that ended the session."""


class MismatchError(P2PError):
    """A message is not what the receiver expects: its shape, dtype, sequence or run."""


class SlotError(P2PError):
    """A payload does not fit into a slot and may not be split."""
