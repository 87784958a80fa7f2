"""Steps during backward: parameters are stepped, and their gradients freed, whenever a bucket of gradients is full."""

from dataclasses import replace
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr.memory import find_overlap
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.plan import Plan

# without the hooks of `step()`, which are for whole steps
step_bucket = unwrap(FusedOptimizer.step)


class StepInBackward:
    """The handle that `step_in_backward` returns, see there."""

    def __init__(self, model: nn.Module, optimizer: FusedOptimizer, max_bytes: int):
        self._optimizer, self._max_bytes = optimizer, max_bytes
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._pending: list[Tensor] = []
        self._bytes = 0
        # of this step: the parameters whose gradient was made, and the plan of each bucket that was stepped
        self._arrived: set[int] = set()
        self._plans: list[Plan] = []
        _switch(optimizer, True)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_last),
            optimizer.register_step_post_hook(self._after_last),
            *(p.register_post_accumulate_grad_hook(self._collect) for p in self._params() if p.requires_grad),
        ]

    def remove(self) -> None:
        """Removes all hooks: from now on `optimizer.step()` steps all parameters. Gradients that are left stay."""
        for handle in self._handles:
            handle.remove()
        _switch(self._optimizer, False)

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _collect(self, param: Tensor) -> None:
        """Puts a new gradient into the bucket, and steps the bucket if it is full."""
        if param.grad is None:
            return
        if id(param) in self._arrived:
            raise RuntimeError(
                f"parameter {self._names[id(param)]!r} has a second gradient before optimizer.step(): after "
                "step_in_backward() the first one may have been used already, so gradients cannot be accumulated; call "
                "optimizer.step() after every backward(), or remove() the handle"
            )
        self._arrived.add(id(param))
        self._pending.append(param)
        self._bytes += param.grad.numel() * param.grad.element_size()
        if self._bytes < self._max_bytes:
            return
        self._check()
        pending = set(map(id, self._pending))
        for other in self._params():
            if other.grad is not None and id(other) not in pending:
                raise RuntimeError(
                    f"parameter {self._names.get(id(other), 'that was added later')!r} has a gradient that "
                    "step_in_backward() did not see: zero_grad() before backward(), and call remove() and "
                    "step_in_backward() again after requires_grad_() or add_param_group()"
                )
        self._choose_plan()
        step_bucket(self._optimizer)
        self._finish_bucket()

    def _before_last(self, optimizer: FusedOptimizer, args: Any, kwargs: Any) -> None:
        """Prepares `optimizer.step()`, which steps the last bucket."""
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise RuntimeError(
                "step(closure) after step_in_backward(): the closure's backward() would step parameters before the "
                "step; call backward() and then step() without a closure"
            )
        self._check()
        self._choose_plan()

    def _after_last(self, optimizer: FusedOptimizer, args: Any, kwargs: Any) -> None:
        """Ends the step."""
        self._finish_bucket()
        optimizer._buckets = tuple(self._plans)
        self._plans = []
        self._arrived.clear()

    def _choose_plan(self) -> None:
        """Lets the next step go by the plan of this bucket in the step before, if it still fits."""
        known, number = self._optimizer._buckets, len(self._plans)
        self._optimizer._plan = known[number] if number < len(known) else None

    def _finish_bucket(self) -> None:
        """Keeps the plan of the bucket that was stepped, and frees its gradients."""
        assert self._optimizer._plan is not None
        self._plans.append(self._optimizer._plan)
        for param in self._pending:
            param.grad = None
        self._pending.clear()
        self._bytes = 0

    def _check(self) -> None:
        """Raises RuntimeError if gradients are not final when backward makes them."""
        if getattr(self._optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "GradScaler.step() after step_in_backward(): whether gradients overflowed is known only after "
                "backward(), when parameters were already stepped by scaled gradients; train in bfloat16, which needs "
                "no GradScaler, or do not call step_in_backward()"
            )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise RuntimeError(
                "step_in_backward() with a process group: DDP and fully_shard reduce gradients after or beside its "
                "hooks, so it is for one process without init_process_group()"
            )


def step_in_backward(model: nn.Module, optimizer: FusedOptimizer, *, max_bytes: int = 64 << 20) -> StepInBackward:
    """Steps parameters during `backward()`, so that the gradients of a whole model are never there at once.

        optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=1e-3, scaling=fused_lwlr.ClipByLayer(1.0))
        fused_lwlr.step_in_backward(model, optimizer, max_bytes=256 << 20)
        for x, y in batches:
            loss_fn(model(x), y).backward()  # steps most parameters
            optimizer.step()                 # steps the rest, and ends the step
            scheduler.step()

    Called once, after the optimizer is made and before the first `backward()`. Hooks collect gradients in the order in
    which `backward()` finishes them. When they take `max_bytes`, their parameters are stepped in one launch for each
    combination of dtypes, and `.grad` is None again. Parameters and state get the same bits as by a step after
    `backward()`, but for `stochastic_rounding`, whose noise depends on the bucket too. `optimizer.step()` frees the
    gradients that it uses.

    Gradients take at most `max_bytes` and the size of the largest gradient. The fewer bytes, the more launches.

    Args:
        model: the model that the parameters are of.
        optimizer: one of this package. Refused are options that need all gradients, or the norms of all weights,
            before the first parameter is stepped: clip_global_norm, nonfinite="skip" and "raise", rescale_weights,
            scaling=BalancedLR(). `ClipByLayer` works, as do all other scalings.
        max_bytes: the size of gradients, in bytes, that a bucket is stepped at.

    Returns:
        A handle. `handle.remove()` removes the hooks.

    Raises:
        RuntimeError: there are gradients already, step_in_backward() was called before for this optimizer, or there is
            a process group. Later, from `backward()` or `step()`: a second gradient of a parameter before
            `optimizer.step()` (gradient accumulation), a closure, a `torch.amp.GradScaler`, a capture in a CUDA graph.
        TypeError: the optimizer is not one of this package.
        ValueError: an option that is refused, or that is out of range; parameters that are not the model's, are on
            several devices, or share memory.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__module__}.{type(optimizer).__name__}: step_in_backward() is for optimizers "
            "of fused_lwlr, such as fused_lwlr.AdamW"
        )
    if type(max_bytes) is not int or max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes!r} must be an int, at least 1")
    if optimizer.options.in_backward:
        raise RuntimeError("step_in_backward() was called for this optimizer before: remove() its handle first")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = set(map(id, model.parameters()))
    foreign = sum(id(param) not in own for param in params)
    if foreign:
        raise ValueError(f"{foreign} of {len(params)} parameters of the optimizer are not parameters of model")
    devices = sorted({str(param.device) for param in params})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {', '.join(devices)}: step_in_backward() is for parameters on one device")
    if find_overlap(list({id(param): param for param in params}.values())) is not None:
        raise ValueError("parameters share memory: one would be changed while backward() needs another; clone() them")
    if any(param.grad is not None for param in params):
        raise RuntimeError("there are gradients before step_in_backward(): call optimizer.zero_grad() first")
    return StepInBackward(model, optimizer, max_bytes)


def _switch(optimizer: FusedOptimizer, in_backward: bool) -> None:
    optimizer.options = replace(optimizer.options, in_backward=in_backward)
    optimizer._plan, optimizer._buckets = None, ()
