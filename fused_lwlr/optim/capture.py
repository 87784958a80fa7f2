"""Checks before a step is captured in a CUDA graph."""

from torch import Tensor

from fused_lwlr.kernels import reference
from fused_lwlr.optim.options import Groups, StepOptions
from fused_lwlr.optim.plan import Plan


def are_on_gpu(groups: Groups) -> bool:
    """Returns whether any parameter is on a GPU, so that a step during a capture is captured."""
    return any(param.is_cuda for group in groups for param in group["params"])


def check_capture(options: StepOptions, groups: Groups, plan: Plan | None) -> Plan:
    """Raises RuntimeError if a replay would not do what a step does.

    Args:
        options, groups: of the optimizer.
        plan: what the optimizer would step by, or None if it would have to make a new one.

    Returns:
        The plan.
    """
    name = options.optimizer
    if not all(group["capturable"] for group in groups):
        raise RuntimeError(f"this {name}.step() cannot be captured in a CUDA graph: construct it with capturable=True")
    if options.in_backward:
        raise RuntimeError("step_in_backward() cannot be captured in a CUDA graph: remove() its handle before")
    if plan is None or not plan.stepped_as_now:
        raise RuntimeError(
            f"{name}.step() is captured before a step with the same parameters and gradients was taken: take one "
            "first, on a side stream, as for the rest of the training step"
        )
    if options.lr_in_momentum:
        raise RuntimeError("lr_in_momentum=True cannot be captured: lr is a number, which a replay would not read")
    if options.nonfinite == "raise":
        raise RuntimeError("nonfinite='raise' cannot be captured: a replay cannot raise; use nonfinite='skip'")
    if any(part.backend is reference for part in plan.parts):
        raise RuntimeError("the PyTorch reference cannot be captured in a CUDA graph: use backend='triton'")
    devices = {part.device for part in plan.parts}
    for group in groups:
        for option in ("lr", "weight_decay"):
            if isinstance(group[option], Tensor) and devices - {group[option].device}:
                raise RuntimeError(
                    f"{option} is a tensor on {group[option].device}, which a replay would not read: put it on "
                    f"{', '.join(map(str, devices))}, as the parameters are"
                )
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            raise RuntimeError("betas cannot be tensors in a CUDA graph, since a replay would not read them")
    return plan
