"""Steps during backward: parameters are stepped, and their gradients freed, whenever a bucket of gradients is full."""

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fused_lwlr.kernels.tensors import untraced
from fused_lwlr.memory import find_overlap
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.handle import Handle
from fused_lwlr.optim.step_plan import StepPlan
from fused_lwlr.shards import is_distributed, local


class StepInBackward(Handle):
    """The handle that `step_in_backward` returns, see there."""

    called = "step_in_backward()"

    def __init__(self, model: nn.Module, optimizer: FusedOptimizer, max_bytes: int):
        self._optimizer, self._max_bytes = optimizer, max_bytes
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._bucket: list[Tensor] = []
        self._bytes = 0
        # the parameters whose gradients this step has seen, and the plans of its buckets
        self._seen: set[int] = set()
        self._plans: list[StepPlan] = []
        optimizer.use_handle(self)
        # None after remove()
        self._hooks: list[Any] | None = [
            param.register_post_accumulate_grad_hook(hook_of(self)) for param in self._params() if param.requires_grad
        ]

    def remove(self) -> None:
        """Removes all hooks: `optimizer.step()` steps all parameters again. Gradients that are left stay."""
        if self._hooks is None:
            return
        self._optimizer.use_handle(None)
        for handle in self._hooks:
            handle.remove()
        self._hooks = None

    def reset(self) -> None:
        self._bucket, self._bytes, self._plans = [], 0, []
        for param in self._params():
            if id(param) in self._seen:
                param.grad = None
        self._seen.clear()

    def collect(self, param: Tensor) -> None:
        """Puts a new gradient into the bucket, and steps the bucket if it is full."""
        if param.grad is None:
            raise RuntimeError(
                f"parameter {self._names[id(param)]!r} has no gradient after its backward: another hook has taken it, "
                f"such as a second optimizer's after {self.called}. Give each parameter to one optimizer"
            )
        if self._optimizer.holds_averages:
            # the next backward pass would add to this gradient
            self._seen.add(id(param))
            raise RuntimeError(f"backward() within averaged() after {self.called}: it would step the averages")
        if id(param) in self._seen:
            raise RuntimeError(
                f"parameter {self._names[id(param)]!r} has a second gradient before optimizer.step(): with "
                f"{self.called} gradients cannot be accumulated, since the first may have been used already. Call "
                "optimizer.step() after every backward(), and optimizer.zero_grad() after a backward() that raised"
            )
        self._seen.add(id(param))
        self._bucket.append(param)
        self._bytes += param.grad.numel() * param.grad.element_size()
        if self._bytes >= self._max_bytes:
            collected = set(map(id, self._bucket))
            for other in self._params():
                if other.grad is not None and id(other) not in collected:
                    self._refuse_unhooked(other)
            check_gradients_are_final(self.called, self._optimizer)
            self._step_bucket(self._bucket)
            self._bucket, self._bytes = [], 0

    def end_step(self) -> tuple[StepPlan, ...]:
        """Steps the parameters that have a gradient still. Returns the plans of all buckets."""
        check_gradients_are_final(self.called, self._optimizer)
        last_bucket = [param for param in self._params() if param.grad is not None]
        if last_bucket:
            self._step_bucket(last_bucket)
        self._bucket, self._bytes = [], 0
        self._wait()
        plans, self._plans = tuple(self._plans), []
        self._seen.clear()
        return plans

    def _refuse_unhooked(self, param: Tensor) -> NoReturn:
        raise RuntimeError(
            f"parameter {self._names.get(id(param), 'that was added')!r} has a gradient that no hook saw: call "
            "zero_grad() before backward(), and after requires_grad_() or add_param_group() call "
            f"handle.remove() and {self.called} again"
        )

    def _params(self) -> list[Tensor]:
        """Returns the parameters whose gradients are collected."""
        return params_of(self._optimizer)

    def _wait(self) -> None:
        """Waits until all buckets are stepped. Raises the first error of a step."""

    def _step_bucket(self, params: list[Tensor]) -> None:
        """Steps parameters by the plan of the bucket with the same index in the last step, and frees gradients."""
        self._plans.append(self._optimizer.step_bucket(len(self._plans), params))
        for param in params:
            param.grad = None


def step_in_backward(model: nn.Module, optimizer: FusedOptimizer, *, max_bytes: int = 64 << 20) -> StepInBackward:
    """Steps parameters during `backward()`, so that the gradients of a whole model never exist at once.

        optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=1e-3, scaling=fused_lwlr.ClipByLayer(1.0))
        fused_lwlr.step_in_backward(model, optimizer, max_bytes=256 << 20)
        for x, y in batches:
            loss_fn(model(x), y).backward()  # steps most parameters
            optimizer.step()                 # steps the rest, and ends the step

    Call it once, before the first `backward()`. Hooks collect gradients in the order in which `backward()` makes
    them. When these take `max_bytes`, their parameters are stepped in one launch for each combination of dtypes, and
    `.grad` becomes None, as after `optimizer.step()`. Parameters and state get the bits of a step after `backward()`.

    Args:
        model: has all parameters of the optimizer.
        optimizer: an optimizer of this package. These options are refused, since they need all gradients or all
            weights before the first step: clip_global_norm, nonfinite="skip" and "raise", rescale_weights, BalancedLR.
        max_bytes: the size of gradients, in bytes, at which a bucket is stepped. Gradients take at most this size plus
            the size of the largest gradient. Gradients that `fully_shard` has sharded count whole, so that all
            processes have the same buckets.

    Returns:
        A handle, whose `remove()` removes the hooks.

    Raises:
        RuntimeError: gradients exist already, the optimizer has such a handle, or a process group exists and a
            parameter is not sharded by `fully_shard`, or has `CPUOffloadPolicy` for a GPU with torch before 2.13.
            Later, by `backward()` or `step()`: a second gradient of a parameter before `optimizer.step()`, a gradient
            that another hook has taken, a closure, a `torch.amp.GradScaler`, or a capture in a CUDA graph.
        TypeError: the optimizer is not from this package, or the model is not a module.
        ValueError: an option is refused, `max_bytes` is below 1, or parameters are not in the model, are not
            initialized yet, are on several devices or share memory.
    """
    check_given(StepInBackward.called, model, optimizer, max_bytes)
    return StepInBackward(model, optimizer, max_bytes)


def check_given(called: str, model: nn.Module, optimizer: FusedOptimizer, max_bytes: int) -> None:
    """Raises an error if a model and an optimizer cannot be stepped in backward, see `step_in_backward`."""
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(f"optimizer is {type(optimizer)}: {called} needs one of fused_lwlr, such as AdamW")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model)}: {called} needs the module that the optimizer steps")
    if type(max_bytes) is not int or max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes!r} must be an int, at least 1")
    if optimizer.options.in_backward:
        raise RuntimeError(f"{called} after a handle for steps during backward: remove() the first handle")
    params, in_model = params_of(optimizer), set(map(id, model.parameters()))
    if not params:
        raise ValueError(f"{called} needs an optimizer with parameters, but its param groups are empty")
    foreign = sum(id(param) not in in_model for param in params)
    if foreign:
        raise ValueError(
            f"{foreign} of {len(params)} parameters of the optimizer are not parameters of model: pass the model that "
            "the optimizer steps"
        )
    if any(map(is_lazy, params)):
        raise ValueError(f"a parameter of a lazy module is not initialized yet: call the model once before {called}")
    devices = sorted({str(param.device) for param in params})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {', '.join(devices)}: {called} is for parameters on one device")
    if len(set(map(id, params))) < len(params):
        raise ValueError(f"a parameter is given to the optimizer twice, but {called} steps each one once: remove one")
    if find_overlap(list(map(local, params))) is not None:
        raise ValueError("parameters share memory: one would be changed while backward() needs another; clone() them")
    sharded: list[Any] = list(filter(is_distributed, params))
    offloaded = any(local(param).is_cpu and param.device_mesh.device_type != "cpu" for param in sharded)
    if offloaded and torch.__version__ < "2.13":
        raise RuntimeError(
            f"{called} with CPUOffloadPolicy needs torch 2.13, since older versions run hooks before gradients have "
            "arrived on the CPU: update torch, or call step() without it"
        )
    if any(param.grad is not None for param in params):
        raise RuntimeError(f"there are gradients before {called}: call optimizer.zero_grad() first")
    check_gradients_are_final(called, optimizer)


def check_gradients_are_final(called: str, optimizer: FusedOptimizer) -> None:
    """Raises RuntimeError if gradients change after backward: a GradScaler unscales them, or DDP averages them."""
    if getattr(optimizer, "found_inf", None) is not None:
        raise RuntimeError(
            f"GradScaler.step() after {called}: parameters were stepped by scaled gradients already, before "
            "it was known whether these overflowed; train in bfloat16, which needs no GradScaler"
        )
    parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    # fully_shard runs hooks with averaged gradients, in the same order on all processes
    if parallel and not all(map(is_distributed, params_of(optimizer))):
        raise RuntimeError(
            f"{called} with a process group needs parameters that fully_shard has sharded, since DDP averages "
            "gradients over processes after its hooks: shard the model with fully_shard, or call step() without it"
        )


def hook_of(handle: StepInBackward) -> Callable[[Tensor], None]:
    """Returns a hook of a parameter, with a weak reference: the garbage collector does not see cycles with hooks."""
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
