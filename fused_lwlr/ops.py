"""Pick the backend of an operation: Triton for GPUs, the PyTorch reference for everything else."""

import importlib
from types import ModuleType
from typing import Literal, get_args

import torch

from fused_lwlr.kernels import reference

Backend = Literal["auto", "triton", "torch"]


def check_backend(backend: str) -> None:
    """Raise ValueError unless `backend` is one of "auto", "triton" and "torch"."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, get_args(Backend)))}")


def pick(backend: Backend, device: torch.device, dtype: torch.dtype, *, addressable: bool = True) -> ModuleType:
    """The module that holds the operations for tensors of one kind.

    "auto" takes Triton on GPUs, save for float64 and for tensors that kernels cannot address, and the reference
    everywhere else.

    Args:
        addressable: whether kernels can read and write all tensors, see `fused_lwlr.memory`.

    Raises:
        ImportError: Triton is asked for, or the tensors are on a GPU, and it is not installed.
        ValueError: Triton is asked for and cannot run on such tensors.
    """
    check_backend(backend)
    wide = dtype in (torch.float64, torch.complex128)
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or wide or not addressable)):
        return reference
    if not addressable:
        raise ValueError(
            f"backend={backend!r} cannot work on tensors without a data pointer (wrapper subclasses, meta tensors, "
            "torch.func transforms) or on inference tensors: pass backend='auto' or backend='torch'"
        )
    try:
        triton = importlib.import_module("fused_lwlr.kernels.triton")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"backend={backend!r} on {device.type} tensors needs Triton, which is not installed: "
            "pip install triton, or pass backend='torch'"
        ) from error
    if not triton.supports(device, dtype):
        raise ValueError(
            f"backend={backend!r} cannot work on {dtype} tensors on {device.type}: Triton takes float32, bfloat16 "
            "and float16, on a GPU, or on a CPU with TRITON_INTERPRET=1 set before triton is first imported; "
            "pass backend='torch'"
        )
    return triton
