"""What must hold for a step to be captured in a CUDA graph."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_lwlr.kernels import reference

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer
    from fused_lwlr.optim.plan import Plan
    from fused_lwlr.optim.tables import Tables


def is_capturing(groups: list[dict[str, Any]]) -> bool:
    """Whether a step on these param groups would be captured."""
    # without a context, which to ask for the stream would create, there is no capture
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return False
    return any(param.is_cuda for group in groups for param in group["params"])


def check_capture(optimizer: "FusedOptimizer", plan: "Plan | None") -> "Tables":
    """Raise RuntimeError, and let go of the gradients, if a replay would not do what a step does.

    Args:
        plan: what the optimizer would step by, or None if it would have to make a new one.

    Returns:
        The tables.
    """
    try:
        return _checked(optimizer, plan)
    except RuntimeError:
        if plan is not None:
            plan.tables.release()
        raise


def _checked(optimizer: "FusedOptimizer", plan: "Plan | None") -> "Tables":
    name = type(optimizer).__name__
    if not all(group["capturable"] for group in optimizer.param_groups):
        raise RuntimeError(f"this {name}.step() cannot be captured in a CUDA graph: construct it with capturable=True")
    if plan is None or plan.tables.new:
        raise RuntimeError(
            f"{name}.step() is captured before a step with the same parameters and gradients was taken: take one "
            "first, on a side stream, as for the rest of the training step"
        )
    if optimizer.gate.nonfinite == "raise":
        raise RuntimeError("nonfinite='raise' cannot be captured: a replay cannot raise; use nonfinite='skip'")
    if any(part.backend is reference for part in plan.tables.parts):
        raise RuntimeError("the PyTorch reference cannot be captured in a CUDA graph: use backend='triton'")
    devices = {part.table.columns["param"][0].device for part in plan.tables.parts}
    for group in optimizer.param_groups:
        for option in ("lr", "weight_decay"):
            if isinstance(group[option], Tensor) and devices - {group[option].device}:
                raise RuntimeError(
                    f"{option} is a tensor on {group[option].device}, which a replay would not read: put it on "
                    f"{', '.join(map(str, devices))}, as the parameters are"
                )
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            raise RuntimeError("betas cannot be tensors in a CUDA graph, since a replay would not read them")
    return plan.tables
