from transformer_engine.pytorch.module.fp8_padding import Fp8Padding
from transformer_engine.pytorch.module.fp8_unpadding import Fp8Unpadding
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.linear import LayerNormLinear, Linear
from transformer_engine.pytorch.module.norm import LayerNorm, RMSNorm

__all__ = ["Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm"]
