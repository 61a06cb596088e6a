"""Matrix products with weights that stay the same."""

from __future__ import annotations

import torch


class PackedLinear:
    """`x @ weight.T + bias` with the weight arranged once for the device's GEMM.

    Args:
        weight: [out, in] float.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, in], dtype of the weight; bias: [out] or None. Returns [T, out]."""
        return torch.nn.functional.linear(x, self._weight, bias)
