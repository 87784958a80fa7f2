"""Checks before a step is captured in a CUDA graph."""

from torch import Tensor

from fused_lwlr.kernels import reference
from fused_lwlr.optim.layer_options import Groups
from fused_lwlr.optim.options import StepOptions
from fused_lwlr.optim.step_plan import StepPlan


def are_on_gpu(groups: Groups) -> bool:
    """Returns whether any parameter is on a GPU, so that a step during a capture is captured."""
    return any(param.is_cuda for group in groups for param in group["params"])


def check_capture(options: StepOptions, groups: Groups, plan: StepPlan | None) -> None:
    """Raises RuntimeError if a replay would differ from a step."""
    name = options.class_name
    # groups of another optimizer may lack it
    if not all(group.get("capturable") for group in groups):
        raise RuntimeError(f"this {name}.step() cannot be captured in a CUDA graph: construct it with capturable=True")
    if plan is None or not plan.repeats:
        raise RuntimeError(
            f"{name}.step() is captured before a step with the same parameters and gradients was taken: take one "
            "first, on a side stream, as for the rest of the training step"
        )
    if options.lr_in_momentum:
        raise RuntimeError("lr_in_momentum=True cannot be captured: lr is a number, which a replay would not read")
    if options.nonfinite == "raise":
        raise RuntimeError("nonfinite='raise' cannot be captured: a replay cannot raise; use nonfinite='skip'")
    if any(each.backend is reference for each in plan.launch_plans):
        raise RuntimeError("the PyTorch reference cannot be captured in a CUDA graph: use backend='triton'")
    if options.factor_formula is not None and plan.reducer is not None:
        raise RuntimeError(
            "scaling= with sharded parameters cannot be captured in a CUDA graph: its factors are computed from "
            "numbers of the host, which a replay would not read"
        )
    devices = sorted({str(each.device) for each in plan.launch_plans})
    if len(devices) > 1:
        raise RuntimeError(
            f"parameters are on {' and '.join(devices)}, but a CUDA graph has the launches of one device: capture one "
            "optimizer for each device"
        )
    for group in groups:
        for option in ("lr", "weight_decay"):
            if isinstance(group[option], Tensor) and str(group[option].device) not in devices:
                raise RuntimeError(
                    f"{option} is a tensor on {group[option].device}, but a replay reads only tensors on the device "
                    f"of the parameters: move it to {devices[0]}"
                )
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            raise RuntimeError("betas cannot be tensors in a CUDA graph, since a replay would not read them")
