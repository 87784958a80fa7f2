"""Hooks and profiler labels of `step()`, for which torch's own wrapper takes longer than all of a small step."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.optim import optimizer as torch_optimizer

Step = TypeVar("Step", bound=Callable[..., Any])


def hooked(step: Step) -> Step:
    """`torch.optim.Optimizer.profile_hook_step`, left out where there is neither a hook nor a profiler to serve.

    torch wraps the `step` of a subclass that has its own, and runs the hooks then; ours runs none within it.
    """
    full = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        self = args[0]
        wanted = (
            torch._C._autograd._profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )
        if wanted and getattr(type(self).step, "served", False):
            return full(*args, **kwargs)
        return step(*args, **kwargs)

    # so that torch does not wrap it again
    wrapper.hooked = wrapper.served = True  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
