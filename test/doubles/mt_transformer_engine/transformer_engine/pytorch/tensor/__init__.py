class QuantizedTensor:
    """Base class of quantised tensors."""


class Quantizer:
    """Base class of their builders."""
