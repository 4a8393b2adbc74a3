"""The name that Megatron imports."""

from transformer_engine import common, pytorch

__version__ = "2.0.0"
__all__ = ["common", "pytorch"]
