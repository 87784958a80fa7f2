"""The dtypes that arithmetic is done in."""

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """A float32 copy of a half-precision tensor; the tensor itself where it is wider."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums are kept in: double precision, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
