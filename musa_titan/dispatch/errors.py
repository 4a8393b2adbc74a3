"""What goes wrong in dispatch."""

from musa_titan.patching.spec import MusaTitanError


class DispatchError(MusaTitanError):
    """Token dispatch cannot go on. The message names ranks (of the expert group), values, limits and the remedy."""
