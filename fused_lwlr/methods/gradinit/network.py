"""A model as a function of its parameters, which can be differentiated twice. The model itself does not change."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from fused_lwlr.methods.gradinit.norms import DifferentiableWeightNorm
from fused_lwlr.methods.minibatches import loss_of
from fused_lwlr.methods.restoring import as_it_was
from fused_lwlr.shards import is_distributed

T = TypeVar("T")
Params = dict[str, Tensor]


class Network:
    """The loss of a model as a function of its parameters.

    Trainable parameters are replaced, a tied one at all its uses; frozen ones stay. Use it inside
    `twice_differentiable(model)`.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.weights: Params = {name: param.detach() for name, param in trained.items()}
        self._holder = _Holder(model)
        names = {id(param): name for name, param in trained.items()}
        # all places of a tied weight, and each place once, also in a module that has several names
        self._places = {
            f"{path}.{own}": names[id(param)]
            for path, module in self._holder.named_modules()
            for own, param in module._parameters.items()
            if id(param) in names
        }
        self._loss_fn = loss_fn
        self._device = next(model.parameters()).device

    def scaled(self, scales: Iterable[float]) -> Params:
        """α·W of every parameter, as leaves of a new graph."""
        pairs = zip(self.weights.items(), scales, strict=True)
        return {name: (weight * scale).requires_grad_() for (name, weight), scale in pairs}

    def run(self, params: Params, batch: Any, use: Callable[[Tensor], T]) -> T:
        """`use(loss)` of a minibatch.

        The parameters stay in place while `use` runs, since layers under `torch.utils.checkpoint` compute once more
        when it takes gradients.
        """
        values = {place: params[name] for place, name in self._places.items()}

        def evaluate(model: nn.Module) -> T:
            return use(loss_of(model, batch, self._loss_fn, self._device))

        # With tie_weights=True, functional_call replaces a parameter once for each name of its module, and then
        # restores a replacement, not the original.
        result: T = functional_call(self._holder, values, (evaluate,), tie_weights=False)
        return result

    def towards_scales(self, gradients: Sequence[Tensor | None]) -> list[float | None]:
        """⟨∂/∂(αW), W⟩ of every parameter: the derivative with respect to its scale, None without a gradient."""
        pairs = zip(gradients, self.weights.values(), strict=True)
        dots = [(gradient * weight).sum() for gradient, weight in pairs if gradient is not None]
        values = iter(torch.stack(dots).tolist() if dots else [])
        return [None if gradient is None else next(values) for gradient in gradients]


class _Holder(nn.Module):
    """Calls a function of the model with the parameters that `functional_call` put into it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, use: Callable[[nn.Module], T]) -> T:
        return use(self.model)


def check_model(model: nn.Module, function: str) -> None:
    """Refuses a model whose weights cannot be scaled."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "model is wrapped in DistributedDataParallel, whose replicas would get different scales: call "
            f"{function} on one process, and wrap the model after that, which sends its weights to all processes"
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("model has no parameter that requires a gradient: set requires_grad of its parameters")
    for name, param in model.named_parameters():
        if is_distributed(param):
            raise ValueError(f"{name!r} is a DTensor: call {function} before the model is sharded")
        if param.requires_grad and param.is_complex():
            raise ValueError(
                f"{name!r} is {param.dtype}: {function} needs real parameters, such as torch.view_as_real of it"
            )
        if param.requires_grad and param.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name!r} is {param.dtype}, too coarse for gradients of gradients: call {function} on model.float(), "
                "and convert the model after that"
            )


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Batch statistics in normalizations, dropout off, everything differentiable twice; restored afterwards.

    Autocast is off, attention takes its plain form, and so do recurrent layers: fused kernels of both have a first
    derivative only. A compiled model runs without its compiled code.
    """
    device = next(model.parameters()).device
    with ExitStack() as stack:
        stack.enter_context(as_it_was(model))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(DifferentiableWeightNorm())
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        for module in model.modules():
            if isinstance(module, _NormBase):
                module.train()
        yield


def rescale_(model: nn.Module, scales: Mapping[str, float]) -> None:
    """Multiply parameters in place by their scales: in one call, which an interrupt cannot split."""
    params = dict(model.named_parameters())
    with torch.no_grad():
        torch._foreach_mul_([params[name] for name in scales], list(scales.values()))
