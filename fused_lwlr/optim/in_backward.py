"""Steps during backward: parameters are stepped, and their gradients freed, whenever a bucket of gradients is full."""

from collections.abc import Callable
from dataclasses import replace
from inspect import unwrap
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from fused_lwlr.memory import find_overlap
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.hooks import untraced
from fused_lwlr.optim.plan import Plan

# without the hooks of `step()`, which are for whole steps
step_bucket = unwrap(FusedOptimizer.step)


class StepInBackward:
    """The handle that `step_in_backward` returns, see there."""

    def __init__(self, model: nn.Module, optimizer: FusedOptimizer, max_bytes: int):
        self._optimizer, self._max_bytes = optimizer, max_bytes
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._bucket: list[Tensor] = []
        self._bytes = 0
        # of this step: the parameters whose gradient was made, and the plan of each bucket that was stepped
        self._arrived: set[int] = set()
        self._plans: list[Plan] = []
        switch(optimizer, True)
        optimizer._on_zero_grad = self.reset
        self._handles = [
            optimizer.register_step_pre_hook(self._begin_last),
            optimizer.register_step_post_hook(self._end_last),
            *(p.register_post_accumulate_grad_hook(hook_of(self)) for p in params_of(optimizer) if p.requires_grad),
        ]

    def remove(self) -> None:
        """Removes all hooks: from now on `optimizer.step()` steps all parameters. Gradients that are left stay."""
        for handle in self._handles:
            handle.remove()
        switch(self._optimizer, False)
        self._optimizer._on_zero_grad = None

    def reset(self) -> None:
        """Forgets the gradients of a backward pass that did not end. Parameters that were stepped stay stepped."""
        self._bucket, self._bytes, self._plans = [], 0, []
        self._arrived.clear()

    def collect(self, param: Tensor) -> None:
        """Puts a new gradient into the bucket, and steps the bucket if it is full."""
        if param.grad is None:
            return
        if id(param) in self._arrived:
            raise RuntimeError(
                f"parameter {self._names[id(param)]!r} has a second gradient before optimizer.step(): with "
                "step_in_backward() gradients cannot be accumulated, since the first may have been used already. Call "
                "optimizer.step() after every backward(), and optimizer.zero_grad() after a backward() that raised"
            )
        self._arrived.add(id(param))
        self._bucket.append(param)
        self._bytes += param.grad.numel() * param.grad.element_size()
        if self._bytes >= self._max_bytes:
            self._require_hooked()
            self._begin()
            step_bucket(self._optimizer)
            self._end()

    def _require_hooked(self) -> None:
        """Raises RuntimeError if a parameter outside of the bucket has a gradient, which would be used twice."""
        own = set(map(id, self._bucket))
        for param in params_of(self._optimizer):
            if param.grad is not None and id(param) not in own:
                raise RuntimeError(
                    f"parameter {self._names.get(id(param), 'that was added')!r} has a gradient that no hook saw: call "
                    "zero_grad() before backward(), and after requires_grad_() or add_param_group() call "
                    "handle.remove() and step_in_backward() again"
                )

    def _begin(self) -> None:
        """Lets the next step go by the plan of this bucket in the step before, if that still fits."""
        check_final(self._optimizer)
        known, number = self._optimizer._buckets, len(self._plans)
        self._optimizer._plan = known[number] if number < len(known) else None

    def _end(self) -> None:
        """Keeps the plan of the bucket, and frees its gradients."""
        if self._optimizer._plan is not None and any(param.grad is not None for param in self._bucket):
            self._plans.append(self._optimizer._plan)
        for param in self._bucket:
            param.grad = None
        self._bucket, self._bytes = [], 0

    def _begin_last(self, optimizer: FusedOptimizer, args: Any, kwargs: Any) -> None:
        """Prepares `optimizer.step()`, which steps the last bucket."""
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise RuntimeError(
                "step(closure) after step_in_backward(): the closure's backward() would step parameters before the "
                "step; call backward(), and then step() without a closure"
            )
        self._begin()

    def _end_last(self, optimizer: FusedOptimizer, args: Any, kwargs: Any) -> None:
        """Ends the step."""
        self._end()
        optimizer._buckets, self._plans = tuple(self._plans), []
        self._arrived.clear()


def step_in_backward(model: nn.Module, optimizer: FusedOptimizer, *, max_bytes: int = 64 << 20) -> StepInBackward:
    """Steps parameters during `backward()`, so that the gradients of a whole model are never there at once.

        optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=1e-3, scaling=fused_lwlr.ClipByLayer(1.0))
        fused_lwlr.step_in_backward(model, optimizer, max_bytes=256 << 20)
        for x, y in batches:
            loss_fn(model(x), y).backward()  # steps most parameters
            optimizer.step()                 # steps the rest, and ends the step

    To be called once, before the first `backward()`. Hooks collect gradients in the order in which `backward()` makes
    them. When these take `max_bytes`, their parameters are stepped in one launch for each combination of dtypes, and
    `.grad` is None again, as after `optimizer.step()`. Parameters and state get the bits of a step after `backward()`;
    the noise of `stochastic_rounding` alone is another in each bucket.

    Args:
        model: has all parameters of the optimizer.
        optimizer: one of this package. What needs all gradients or all weights before the first parameter is stepped
            is refused: clip_global_norm, nonfinite="skip" and "raise", rescale_weights and BalancedLR.
        max_bytes: the size of gradients, in bytes, at which a bucket is stepped. Gradients take at most that and the
            size of the largest gradient.

    Returns:
        A handle, whose `remove()` removes the hooks.

    Raises:
        RuntimeError: there are gradients already, the optimizer has such a handle, or there is a process group. Later,
            by `backward()` or `step()`: a second gradient of a parameter before `optimizer.step()`, a closure, a
            `torch.amp.GradScaler`, or a capture in a CUDA graph.
        TypeError: the optimizer is not one of this package.
        ValueError: an option that is refused, `max_bytes` below 1, or parameters that are not the model's, are on
            several devices or share memory.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(f"optimizer is {type(optimizer)}: step_in_backward() takes those of fused_lwlr, such as AdamW")
    if type(max_bytes) is not int or max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes!r} must be an int, at least 1")
    if optimizer.options.in_backward:
        raise RuntimeError("step_in_backward() was called for this optimizer before: remove() its handle first")
    params, own = params_of(optimizer), set(map(id, model.parameters()))
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
    check_final(optimizer)
    return StepInBackward(model, optimizer, max_bytes)


def check_final(optimizer: FusedOptimizer) -> None:
    """Raises RuntimeError if gradients are not final when backward has made them."""
    if getattr(optimizer, "found_inf", None) is not None:
        raise RuntimeError(
            "GradScaler.step() after step_in_backward(): parameters were stepped by scaled gradients already, before "
            "it was known whether these overflowed; train in bfloat16, which needs no GradScaler"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "step_in_backward() with a process group: DDP averages gradients over processes after its hooks, and "
            "fully_shard is not supported; it is for one process, without init_process_group()"
        )


def hook_of(handle: StepInBackward) -> Callable[[Tensor], None]:
    """Returns a hook of a parameter. It does not keep the handle alive: the collector of cycles looks into no hook."""
    reference = ref(handle)

    @untraced
    def hook(param: Tensor) -> None:
        found = reference()
        if found is not None:
            found.collect(param)

    return hook


def params_of(optimizer: FusedOptimizer) -> list[Tensor]:
    """Returns all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def switch(optimizer: FusedOptimizer, in_backward: bool) -> None:
    """Begins or ends steps in buckets, which have other plans than whole steps."""
    optimizer.options = replace(optimizer.options, in_backward=in_backward)
    optimizer._plan, optimizer._buckets = None, ()
