"""Tensors whose memory holds the negative of what they mean, as those do that are the imaginary part of a conjugate."""

import torch

# torch has a complex half as well, and warns of it
WITH_COMPLEX = (torch.float32, torch.float64)


def imaginary(tensor):
    """The same values, at every other place in memory; a plain copy in dtypes that no complex one is made of."""
    return torch.complex(torch.zeros_like(tensor), tensor).imag if tensor.dtype in WITH_COMPLEX else tensor.clone()


def negated(tensor):
    """The same values with the same strides as `imaginary` has, and lazily negated."""
    if tensor.dtype not in WITH_COMPLEX:
        return tensor.clone()
    lazy = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg()
    return lazy
