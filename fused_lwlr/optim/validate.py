"""What a parameter, its gradient and its state must be for a step."""

import math
from typing import Any, get_args

import torch
from torch import Tensor

from fused_lwlr.kernels.identity import FACTS
from fused_lwlr.optim.gate import Nonfinite
from fused_lwlr.scaling import Scaling
from fused_lwlr.shards import PLAIN

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def same_width(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors go into one computation: both complex or neither, both double precision or neither."""
    double = (torch.float64, torch.complex128)
    return a.is_complex() == b.is_complex() and (a.dtype in double) == (b.dtype in double)


def same_placement(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are spread over processes alike; plain ones are not."""
    return all(getattr(a, name, None) == getattr(b, name, None) for name in ("placements", "device_mesh"))


def _place(tensor: Any) -> str:
    if not hasattr(tensor, "placements"):
        return "a plain tensor"
    return f"{tensor.placements} on processes {tensor.device_mesh.mesh.tolist()}"


def label_of(group: dict[str, Any], position: int) -> str:
    """What messages call a parameter: its name, or its place."""
    return repr(group["param_names"][position]) if "param_names" in group else f"number {position} of its group"


def usual_gradient(param: Tensor) -> tuple[Any, ...] | None:
    """`FACTS` of the gradients, plain tensors, by which a parameter can be stepped without a closer look; None if none.

    Almost all parameters and gradients are plain tensors of the same dtype, device, shape and layout.
    """
    usual = type(param) in PLAIN and param.layout is torch.strided and param.dtype in FLOATING
    if not usual or 0 in param.stride() or param.is_neg():
        return None
    facts: tuple[Any, ...] = FACTS(param)
    return facts


def validate(optimizer: str, group: dict[str, Any], position: int, param: Tensor, grad: Tensor) -> None:
    """Raise RuntimeError unless a parameter can be stepped by its gradient.

    Args:
        optimizer: what messages call it.
        group, position: where the parameter is.
    """
    label = label_of(group, position)
    if param.layout != torch.strided or grad.layout != torch.strided:
        raise RuntimeError(
            f"{optimizer} does not support sparse gradients: that of parameter {label} is {grad.layout}; "
            "use sparse=False in its layer, or torch.optim.SparseAdam for it"
        )
    if not (param.is_floating_point() or param.is_complex()):
        raise RuntimeError(f"{optimizer} cannot optimize parameter {label} of dtype {param.dtype}")
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
        raise RuntimeError(f"the gradient of parameter {label} is {grad.dtype}, but the parameter is {param.dtype}")
    if param.is_conj() or param.is_neg():
        raise RuntimeError(
            f"parameter {label} is a lazy conjugate or negative: call resolve_conj() or resolve_neg() on it first"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise RuntimeError(
            f"elements of parameter {label} share memory (strides {param.stride()}), so they cannot be "
            "updated in place: clone() it first"
        )


def check_control(scaling: Any, clip_global_norm: Any, nonfinite: Any, rescale_weights: Any) -> None:
    """Raise ValueError unless these options of an optimizer are what they should be."""
    if scaling is not None and not isinstance(scaling, Scaling):
        raise ValueError(f"scaling={scaling!r} must be a scaling such as fused_lwlr.ELR(goal=0.01), or None")
    if clip_global_norm is not None and not (
        type(clip_global_norm) in (int, float) and math.isfinite(clip_global_norm) and clip_global_norm > 0
    ):
        raise ValueError(f"clip_global_norm={clip_global_norm!r} must be a finite number above 0, or None")
    if nonfinite not in get_args(Nonfinite):
        raise ValueError(f"nonfinite={nonfinite!r} is not one of {', '.join(map(repr, get_args(Nonfinite)))}")
    if rescale_weights is not False and not hasattr(rescale_weights, "norms"):
        raise ValueError(
            f"rescale_weights={rescale_weights!r:.80} must be False or what "
            "fused_lwlr.scale_invariant(model, batch, loss_fn) returns: which layers are scale-invariant is measured"
        )
