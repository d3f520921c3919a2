"""Attention kernels of the CPU, which graphs are captured with, by what any device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["ANYWHERE"]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
            *, attn_mask: torch.Tensor | None = None, scale: float | None = None) -> list[torch.Tensor]:  # fmt: skip
    """The result; where the CPU's kernel gives log-sum-exps for its backward, nothing is computed."""
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    return [out, q.new_empty(q.shape[:3])]


def backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, rows: torch.Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of q, k and v. The forward runs again: fused kernels differ in what they save."""
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        made = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
        return list(torch.autograd.grad(made, (q, k, v), gradient))


ANYWHERE: Mapping[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": backward,
}
