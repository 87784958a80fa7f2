"""An optimizer on the CPU for a model on a GPU: gradients arrive, and parameters are stepped, during backward."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.in_backward import StepInBackward, check_given, params_of
from fused_lwlr.optim.validate import checked_options


class CPUOffload(StepInBackward):
    """The handle that `offload_to_cpu` returns, see there.

    The thread of backward starts the copies of gradients. One more thread waits for them, steps the copies of the
    parameters, and starts the copies of the weights.
    """

    called = "offload_to_cpu()"

    def __init__(self, model: nn.Module, optimizer: FusedOptimizer, max_bytes: int):
        params = params_of(optimizer)
        # parameter of the model -> its copy on the CPU, which the optimizer steps
        self._copies: dict[Any, Tensor] = {}
        for param in params:
            copy = torch.empty_like(param, device="cpu", pin_memory=param.device.type != "cpu", requires_grad=False)
            self._copies[param] = nn.Parameter(copy.copy_(param.detach()), requires_grad=param.requires_grad)
        self._param_of_copy: dict[Any, Tensor] = {copy: param for param, copy in self._copies.items()}
        # a weight with another version was changed by the user since it was copied
        self._versions: dict[Any, int] = {param: param._version for param in params}
        self._stream = CopyStream(params[0].device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload_to_cpu")
        self._jobs: list[Future[None]] = []
        super().__init__(model, optimizer, max_bytes)
        replace_parameters(optimizer, self._copies)

    def remove(self) -> None:
        """Removes all hooks, and gives the model's parameters and their state on its device back to the optimizer.

        An error of a step that `optimizer.step()` did not raise is raised here, once and before anything changes.
        """
        self._wait()
        if self._hooks is not None:
            super().remove()
            replace_parameters(self._optimizer, self._param_of_copy)

    def reset(self) -> None:
        self._wait_for_jobs()
        self._jobs = []
        super().reset()
        for param in self._params():
            # `optimizer.zero_grad()` does not know the parameters of the model
            param.grad = None

    def pull_weights(self) -> None:
        wait(self._jobs)
        self._stream.wait_for_device()
        self._stream.copy(self._changed(self._copies))
        wait_for_copies = self._stream.record()
        wait_for_copies()

    def push_weights(self) -> None:
        self._stream.wait_for_device()
        self._send(self._copies)
        self._stream.make_device_wait()

    def check_added(self, params: Sequence[Tensor]) -> None:
        if any(param in self._copies for param in params):
            # as torch says it of the copies, which are in the groups
            raise ValueError("some parameters appear in more than one parameter group")

    def check_copy(self) -> None:
        raise RuntimeError(
            "an optimizer cannot be copied after offload_to_cpu(), since its copy would step no model: remove() the "
            "handle first, or load state_dict() into a new optimizer"
        )

    def _params(self) -> list[Tensor]:
        return [self._param_of_copy.get(param, param) for param in super()._params()]

    def _step_bucket(self, params: list[Tensor]) -> None:
        for param in params:
            if param not in self._copies:
                self._refuse_unhooked(param)
        # an error of the second thread would come when the gradients are gone
        checked_options(self._optimizer.options, self._optimizer.param_groups, ())
        device_grads = [param.grad for param in params if param.grad is not None]
        grads = [torch.empty_like(grad, device="cpu", pin_memory=grad.device.type != "cpu") for grad in device_grads]
        self._stream.wait_for_device()
        self._stream.copy([*self._changed(params), *zip(grads, device_grads, strict=True)])
        wait_for_copies = self._stream.record()
        self._versions.update((param, param._version) for param in params)
        for param in params:
            param.grad = None
        self._jobs.append(self._thread.submit(self._step_copies, params, grads, wait_for_copies))

    def _wait_for_jobs(self) -> None:
        """Waits for full buckets, and lets the device wait for the copies of their weights."""
        wait(self._jobs)
        self._stream.make_device_wait()

    def _wait(self) -> None:
        # Ctrl-C may end the wait: then the jobs stay known
        self._wait_for_jobs()
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def _step_copies(self, params: list[Tensor], grads: list[Tensor], wait_for_grads: Callable[[], None]) -> None:
        """Steps the copies of parameters, and starts to send them. The second thread runs this."""
        wait_for_grads()
        copies = [self._copies[param] for param in params]
        for copy, grad in zip(copies, grads, strict=True):
            # older versions of torch have no `grad_dtype`
            if grad.dtype != (getattr(copy, "grad_dtype", None) or copy.dtype):
                copy.grad_dtype = grad.dtype
            copy.grad = grad
        super()._step_bucket(copies)
        # weights that were changed since are kept: a checkpoint may be loaded after a backward pass that raised
        self._send([param for param in params if param._version == self._versions[param]])

    def _changed(self, params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns the weights that the user has changed since the last copy, as pairs for `CopyStream.copy`."""
        return [(self._copies[param], param) for param in params if param._version != self._versions[param]]

    def _send(self, params: Iterable[Tensor]) -> None:
        """Starts to copy weights to the model."""
        self._stream.copy((param, self._copies[param]) for param in params)
        self._versions.update((param, param._version) for param in params)


class CopyStream:
    """Copies between a device and the CPU, on a separate stream; between CPUs, a copy is done when `copy` returns."""

    def __init__(self, device: torch.device):
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream() if device.type == "cpu" else self._module.Stream(device)

    def wait_for_device(self) -> None:
        """Lets later copies wait for all work that the device has now."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    @torch.no_grad()
    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Starts copies, each from the second tensor of a pair to the first one."""
        with self._module.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                if source.device.type != "cpu":
                    # the caller may free it before it is copied
                    source.record_stream(self._stream)

    def record(self) -> Callable[[], None]:
        """Returns a function that waits for all copies which were started before this call."""
        event = self._stream.record_event()
        return (lambda: None) if event is None else event.synchronize

    def make_device_wait(self) -> None:
        """Lets later work of the device wait for all copies that were started."""
        self._module.current_stream(self._device).wait_stream(self._stream)


def replace_parameters(optimizer: FusedOptimizer, new_params: dict[Any, Tensor]) -> None:
    """Replaces parameters of an optimizer by new ones of the same shapes, and moves their state to the new device."""
    state: dict[Any, Any] = {}
    for key, entries in optimizer.state.items():
        new_key = new_params.get(key, key)
        state[new_key] = entries
        if key in new_params:
            # counts of the host stay there
            state[new_key] = {
                name: value.to(new_key.device) if isinstance(value, Tensor) and name != "step" else value
                for name, value in entries.items()
            }
    for group in optimizer.param_groups:
        group["params"] = [new_params.get(param, param) for param in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(state)


def offload_to_cpu(model: nn.Module, optimizer: FusedOptimizer, *, max_bytes: int = 64 << 20) -> CPUOffload:
    """Keeps the state of an optimizer in the memory of the CPU and steps there, while `backward()` runs on the GPU.

        optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=1e-3, scaling=fused_lwlr.LAMB())
        fused_lwlr.offload_to_cpu(model, optimizer)
        for x, y in batches:
            loss_fn(model(x), y).backward()  # copies gradients to the CPU, and steps parameters there
            optimizer.step()                 # steps the rest, and waits until the model has the new weights

    Call it before a `backward()`, and use model and optimizer after `step()` only. It gets copies of the parameters,
    in pinned memory. Hooks collect gradients in the order in which `backward()` makes them. When these take
    `max_bytes`, they are copied to the CPU on a separate stream, and freed. Another thread steps their parameters when
    they arrive, and copies the new weights back. The results have the bits of a step on the CPU after `backward()`.

    The GPU keeps the weights, and gradients of about `max_bytes`. The CPU has the weights, the state, and gradients
    that wait for their step. Weights of the model that are changed in place, as by `model.load_state_dict()`, are
    copied to the CPU with the next gradient. The optimizer cannot be copied or pickled; its state dict can.

    Args:
        model: has all parameters of the optimizer.
        optimizer: an optimizer of this package. The options that `step_in_backward` refuses are refused here, too.
        max_bytes: the size of gradients, in bytes, at which these are copied and stepped.

    Returns:
        A handle, whose `remove()` moves the state to the GPU and lets `step()` step the parameters of the model again.

    Raises:
        RuntimeError: as for `step_in_backward`, or a process group exists: pass `offload_policy=CPUOffloadPolicy()` to
            `fully_shard`. Errors of a step are raised by `optimizer.step()`.
        TypeError: the optimizer is not from this package, or the model is not a module.
        ValueError: as for `step_in_backward`.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "offload_to_cpu() with a process group: it copies gradients before DDP averages them. Pass "
            "offload_policy=CPUOffloadPolicy() to fully_shard, which copies gradients and weights itself"
        )
    check_given(CPUOffload.called, model, optimizer, max_bytes)
    return CPUOffload(model, optimizer, max_bytes)
