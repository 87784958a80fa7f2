"""Checks of parameters and gradients before a step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.memory import check_inference, find_overlap, is_addressable, is_freed
from fused_lwlr.shards import local

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST_FLOAT32 = torch.finfo(torch.float32).max
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)


def same_width(a: Tensor, b: Tensor) -> bool:
    """Whether numbers of two tensors go into one computation.

    Both must be real or complex floating point, and double precision or not.
    """
    double = (torch.float64, torch.complex128)
    kinds = COMPLEX if b.is_complex() else FLOATING
    return a.dtype in kinds and (a.dtype in double) == (b.dtype in double)


def same_placement(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are spread over processes alike; plain ones are not."""
    return all(getattr(a, name, None) == getattr(b, name, None) for name in ("placements", "device_mesh"))


def _place(tensor: Any) -> str:
    if not hasattr(tensor, "placements"):
        return "a plain tensor"
    return f"{tensor.placements} on processes {tensor.device_mesh.mesh.tolist()}"


def label_of(group: dict[str, Any], position: int) -> str:
    """Returns the name of a parameter for messages, or its place."""
    return repr(group["param_names"][position]) if "param_names" in group else f"number {position} of its group"


def is_ordinary(param: Tensor) -> bool:
    """Returns whether a parameter without a gradient may wait in a table for one: a dense tensor with memory."""
    if param.is_nested or param.layout is not torch.strided or param.dtype not in (*FLOATING, *COMPLEX):
        return False
    return not (param.is_conj() or param.is_neg() or param.is_inference()) and is_addressable(local(param))


def check_memory(tensor: Tensor, what: str) -> None:
    """Raises RuntimeError if a tensor that a step would write to has no memory any more, or must not be written to."""
    if is_freed(tensor):
        raise RuntimeError(f"the storage of {what} was freed, so there is nothing to update: restore it before step()")
    check_inference(tensor, what)


def check_overlaps(tensors: Sequence[Tensor], labels: Sequence[str]) -> None:
    """Raises RuntimeError if two elements that a step would write to share memory.

    Args:
        tensors: what is written to.
        labels: what messages call each tensor.
    """
    found = find_overlap(tensors)
    if found is None:
        return
    first, second = found
    if first == second:
        raise RuntimeError(
            f"elements of {labels[first]} share memory (strides {tensors[first].stride()}), so they cannot be updated "
            "in place: clone() it first"
        )
    raise RuntimeError(
        f"{labels[first]} and {labels[second]} share memory, and one launch would update both at once: give the "
        "optimizer one parameter for that memory, or clone() one of them"
    )


def validate(
    optimizer: str, group: dict[str, Any], position: int, param: Tensor, grad: Tensor, *, fused: bool = False
) -> None:
    """Raises RuntimeError unless a parameter can be stepped by its gradient.

    Args:
        optimizer: the name of the optimizer, for messages.
        group, position: where the parameter is.
        fused: whether fused=True was asked for, which torch refuses for meta tensors.
    """
    label = label_of(group, position)
    if param.is_nested:
        raise RuntimeError(
            f"{optimizer} does not support nested tensors, such as parameter {label}: optimize its values() instead"
        )
    if param.is_meta and fused:
        raise RuntimeError(
            "`fused=True` requires all the params to be floating point Tensors of supported devices, but parameter "
            f"{label} is a meta tensor, which has no data: materialize it with to_empty(), or leave fused=None"
        )
    if param.layout == torch.strided and param.dtype not in (*FLOATING, *COMPLEX):
        raise RuntimeError(f"{optimizer} cannot optimize parameter {label} of dtype {param.dtype}")
    if grad.is_nested:
        raise RuntimeError(f"the gradient of parameter {label} is a nested tensor, but the parameter is not")
    if param.layout != torch.strided or grad.layout != torch.strided:
        raise RuntimeError(
            f"{optimizer} does not support sparse gradients: that of parameter {label} is {grad.layout}; "
            "use sparse=False in its layer, or torch.optim.SparseAdam for it"
        )
    if is_freed(grad):
        raise RuntimeError(f"the storage of the gradient of parameter {label} was freed: compute it again")
    if (grad.shape, grad.device) != (param.shape, param.device):
        raise RuntimeError(
            f"the gradient of parameter {label} is {tuple(grad.shape)} on {grad.device}, "
            f"but the parameter is {tuple(param.shape)} on {param.device}"
        )
    if not same_placement(grad, param):
        found, wanted = map(_place, (grad, param))
        raise RuntimeError(
            f"the gradient of parameter {label} is placed as {found}, but the parameter as {wanted}: redistribute it"
        )
    if not same_width(grad, param):
        raise RuntimeError(
            f"the gradient of parameter {label} is {grad.dtype}, but the parameter is {param.dtype}: convert it with "
            f"grad.to({param.dtype})"
        )
    if param.is_conj() or param.is_neg():
        raise RuntimeError(
            f"parameter {label} is a lazy conjugate or negative: call resolve_conj() or resolve_neg() on it first"
        )


def check_float32(hyper: Any, largest: float, params: Sequence[Tensor]) -> None:
    """Raises ValueError if a finite number of a hyper row is too large to compute with in float32.

    torch.optim raises RuntimeError then; float32 arithmetic would turn weights into NaN.
    """
    if all(param.dtype in (torch.float64, torch.complex128) for param in params):
        return
    for name, value in zip(hyper._fields, hyper, strict=True):
        if type(value) is float and largest < abs(value) < math.inf:
            raise ValueError(f"{name}={value} is too large for float32: it must be at most {largest:.3g}")
