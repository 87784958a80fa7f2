"""What a scaling's formula is written in, besides operators: it runs as PyTorch, and is compiled by Triton.

A formula turns norms into one factor. It is written once; each backend gives these names its own meaning.
"""

import torch
from torch import Tensor

__all__ = ["Tensor", "maximum", "minimum", "where"]


def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """`a` where the condition holds, `b` elsewhere."""
    return torch.where(condition, a, b)


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    """The smaller of two, NaN if `a` is."""
    return torch.where(a > b, b, a)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    """The larger of two, NaN if `a` is."""
    return torch.where(a < b, b, a)
