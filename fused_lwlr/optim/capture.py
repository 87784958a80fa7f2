"""What must hold for a step to be captured in a CUDA graph."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_lwlr.kernels import reference

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer
    from fused_lwlr.optim.plan import Plan


def is_capturing(params: list[Tensor]) -> bool:
    """Whether a step on these parameters would be captured."""
    return bool(params) and params[0].is_cuda and torch.cuda.is_current_stream_capturing()


def check_capture(optimizer: "FusedOptimizer", plan: "Plan | None") -> None:
    """Raise RuntimeError if a replay would not do what a step does.

    Args:
        plan: what the optimizer would step by, or None if it would have to make a new one.
    """
    name = type(optimizer).__name__
    if not all(group["capturable"] for group in optimizer.param_groups):
        raise RuntimeError(f"this {name}.step() cannot be captured in a CUDA graph: construct it with capturable=True")
    if plan is None or plan.new:
        raise RuntimeError(
            f"{name}.step() is captured before a step with the same parameters and gradients was taken: take one "
            "first, on a side stream, as for the rest of the training step"
        )
    if optimizer.gate.nonfinite == "raise":
        raise RuntimeError("nonfinite='raise' cannot be captured: a replay cannot raise; use nonfinite='skip'")
    if any(part.backend is reference for part in plan.parts):
        raise RuntimeError("the PyTorch reference cannot be captured in a CUDA graph: use backend='triton'")
    for group in optimizer.param_groups:
        for option in ("lr", "weight_decay"):
            if isinstance(group[option], Tensor) and not group[option].is_cuda:
                raise RuntimeError(f"{option} is a tensor on the CPU, which a replay would not read: put it on the GPU")
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            raise RuntimeError("betas cannot be tensors in a CUDA graph, since a replay would not read them")
