"""The functions of the CUDA extension ``fused_weight_gradient_mlp_cuda``, in plain torch, for devices without it.

With them Megatron's gradient accumulation fusion runs anywhere. The product is formed in the operands' dtype and then
added, which is to the bit what the unfused path does; the extension adds within the GEMM.

x: [n, in], grad_y: [n, out], same dtype; main_grad: [out, in], fp32 for the first, fp16 or bf16 for the second.
"""

from __future__ import annotations

import torch


def wgrad_gemm_accum_fp32(x: torch.Tensor, grad_y: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad += grad_yᵀ·x."""
    main_grad.add_(grad_y.t().matmul(x))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
