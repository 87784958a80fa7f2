"""Tensors that store the negative of their values, such as the imaginary part of a conjugate."""

import torch

# torch also has a complex half dtype, and warns about it
WITH_COMPLEX = (torch.float32, torch.float64)


def imaginary(tensor):
    """The same values, at every other place in memory; a plain copy for dtypes without a complex type."""
    return torch.complex(torch.zeros_like(tensor), tensor).imag if tensor.dtype in WITH_COMPLEX else tensor.clone()


def negated(tensor):
    """The same values and strides as `imaginary`, lazily negated."""
    if tensor.dtype not in WITH_COMPLEX:
        return tensor.clone()
    lazy = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg()
    return lazy
