from transformer_engine.pytorch.tensor.mtfp8_tensor import MTFP8Quantizer as MXFP8Quantizer
from transformer_engine.pytorch.tensor.mtfp8_tensor import MTFP8Tensor as MXFP8Tensor

__all__ = ["MXFP8Quantizer", "MXFP8Tensor"]
