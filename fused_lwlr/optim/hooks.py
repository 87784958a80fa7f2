"""Hooks, profiler and torch.compile around `step()`: torch's own wrapper adds a third to the time of a small step."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch.optim import optimizer as torch_optimizer

from fused_lwlr.kernels.tensors import untraced

Step = TypeVar("Step", bound=Callable[..., Any])


def hooked(step: Step) -> Step:
    """Does what `torch.optim.Optimizer.profile_hook_step` does, but costs nothing without hooks and a profiler.

    If a subclass defines `step`, torch wraps it and runs the hooks. This wrapper must not run them again.
    A compiled training loop breaks its graph here: tables of addresses must not be traced. If the step raises, the
    scale of a `GradScaler` is removed, so that later steps without one do not use it.
    """
    step_with_hooks = torch.optim.Optimizer.profile_hook_step(step)

    @untraced
    @wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        # a `step` of a subclass has no `runs_hooks`: torch has wrapped it, and runs the hooks there
        needs_hooks = getattr(type(self).step, "runs_hooks", False) and (
            _profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )
        try:
            return (step_with_hooks if needs_hooks else step)(self, *args, **kwargs)
        except BaseException:
            # GradScaler deletes them only after a step that did not raise
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise

    # `hooked` tells torch not to wrap it
    wrapper.hooked = wrapper.runs_hooks = True  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
