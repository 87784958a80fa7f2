"""Hooks, profiler and torch.compile around `step()`: torch's own wrappers take longer than a whole small step."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, imports torch._dynamo at the first call
from torch.compiler import is_dynamo_compiling
from torch.optim import optimizer as torch_optimizer

Step = TypeVar("Step", bound=Callable[..., Any])


def is_traced() -> bool:
    """Returns whether torch.compile traces this frame, or a frame above it that it could not trace."""
    return is_dynamo_compiling() or get_eval_frame_callback() is not None


def untraced(function: Step) -> Step:
    """Hides a function from torch.compile, without importing it if it is not used."""
    hidden = _disable_dynamo(function)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (hidden if is_traced() else function)(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def hooked(step: Step) -> Step:
    """Does what `torch.optim.Optimizer.profile_hook_step` does, but costs nothing without hooks and a profiler.

    torch wraps the `step` of a subclass that defines one, and runs the hooks then; ours runs none within it.
    A compiled training loop breaks its graph here: tables of addresses must not be traced.
    """
    full = torch.optim.Optimizer.profile_hook_step(step)

    @untraced
    @wraps(step)
    def serve(*args: Any, **kwargs: Any) -> Any:
        return (full if getattr(type(args[0]).step, "served", False) else step)(*args, **kwargs)

    @wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            is_traced()
            or _profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        ):
            return serve(self, *args, **kwargs)
        # the usual call; passing arguments takes longer
        return step(self, *args, **kwargs) if args or kwargs else step(self)

    # so that torch does not wrap it again
    wrapper.hooked = wrapper.served = True  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
