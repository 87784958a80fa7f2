"""Pick the backend of an operation: Triton kernels, or the PyTorch reference."""

import importlib
from functools import cache
from types import ModuleType
from typing import Literal, get_args

import torch

from fused_lwlr.kernels import reference
from fused_lwlr.kernels.tensors import DOUBLE
from fused_lwlr.warn import warn_user

Backend = Literal["auto", "triton", "torch"]
WORTH_A_WARNING = 1_000_000
"""The number of elements from which on `pick` warns that the reference is slow."""


def pick(
    backend: Backend, device: torch.device, dtype: torch.dtype, *, addressable: bool = True, elements: int = 0
) -> ModuleType:
    """The module that holds the operations for tensors of one kind.

    "auto" takes Triton kernels on GPUs and CPUs, and the reference elsewhere, for float64 and for tensors that kernels
    cannot address. If kernels cannot be compiled for this CPU it takes the reference, and warns if that is slow.

    Args:
        addressable: whether kernels can read and write all tensors, see `fused_lwlr.memory`.
        elements: number of elements of all tensors.

    Raises:
        ImportError: the backend is "triton", or the tensors are on a GPU, but Triton is not installed.
        RuntimeError: the backend is "triton", but kernels cannot be compiled for this CPU.
        ValueError: the backend is unknown, or "triton" but kernels cannot run on such tensors.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, get_args(Backend)))}")
    needs_reference = device.type not in ("cuda", "cpu") or dtype in DOUBLE or not addressable
    if backend == "torch" or (backend == "auto" and needs_reference):
        return reference
    problem = _problem_on_cpu() if device.type == "cpu" else None
    if backend == "auto" and problem is not None:
        if problem and elements >= WORTH_A_WARNING:
            _warn(problem)
        return reference
    if not addressable:
        raise ValueError(
            f"backend={backend!r} cannot work on tensors without a data pointer (wrapper subclasses, meta tensors, "
            "torch.func transforms) or on inference tensors: pass backend='auto' or backend='torch'"
        )
    try:
        triton = importlib.import_module("fused_lwlr.kernels.triton")
    except ImportError as error:
        raise ImportError(
            f"backend={backend!r} on {device.type} tensors cannot run, since {_import_problem(error)}: "
            "pip install triton, or pass backend='torch'"
        ) from error
    if not triton.supports(device, dtype):
        raise ValueError(
            f"backend={backend!r} cannot work on {dtype} tensors on {device.type}: Triton kernels take float32, "
            "bfloat16 and float16, on GPUs and CPUs, with TRITON_INTERPRET=1 on CPUs only; pass backend='torch'"
        )
    if problem:
        raise RuntimeError(f"backend={backend!r} cannot run on this CPU: {problem}; or pass backend='torch'")
    return triton


def describe(device: torch.device) -> str:
    """Returns the backend that "auto" takes for float32 on a device, and the reason if it is the reference."""
    try:
        module = pick("auto", device, torch.float32)
    except (ImportError, ValueError) as error:
        return str(error)
    if module is not reference:
        return "triton"
    reason = "no kernels for it"
    if device.type == "cpu":
        reason = _problem_on_cpu() or "Triton's interpreter is slower"
    return f"torch, since {reason}"


@cache
def _problem_on_cpu() -> str | None:
    """Why "auto" does not take Triton kernels on this CPU; "" for a reason that needs no warning, None if it does."""
    try:
        triton = importlib.import_module("fused_lwlr.kernels.triton")
    except ImportError as error:
        return _import_problem(error)
    problem: str | None = triton.problem_on_cpu()
    return problem


def _import_problem(error: ImportError) -> str:
    """Returns why Triton cannot be imported."""
    missing = isinstance(error, ModuleNotFoundError)
    return "Triton is not installed" if missing else f"Triton cannot be imported: {error}"


@cache
def _warn(problem: str) -> None:
    """Warns once that steps on the CPU are slow."""
    warn_user(
        f"backend='auto' takes the PyTorch reference on this CPU, which is slower than compiled kernels: {problem}. "
        "backend='torch' does the same without a warning",
    )
