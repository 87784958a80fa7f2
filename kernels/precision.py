"""The dtypes that arithmetic is done in."""

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Returns a float32 copy of a half-precision tensor, and any other tensor itself."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of sums: float64 if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
