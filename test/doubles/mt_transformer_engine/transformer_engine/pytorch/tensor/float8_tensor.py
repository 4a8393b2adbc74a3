from transformer_engine.pytorch.tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """Per-tensor scaling; the double makes none."""
