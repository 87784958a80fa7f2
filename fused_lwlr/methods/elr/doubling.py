"""Doubles weights and compares: which outputs change, and by which powers of two biases and statistics change."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fused_lwlr.measure.layers import Layer
from fused_lwlr.methods.minibatches import loss_of, tensors_in
from fused_lwlr.methods.restoring import as_it_was

# Doubling is exact in floating point, so outputs that should not change mostly have the same bits. Gradients
# get more room: kernels of the backward pass may add in any order, and halves of small float16 numbers round.
_OUTPUTS, _GRADIENTS = 1e-4, 1e-2
# The eps of normalizations during the comparison: far below relevant variances, but large enough that noise of a
# constant channel stays small, which 1e-30 would not ensure.
_EPS = 1e-12

NO_POWER = "a bias or running statistics do not change by a single power of its scale"
Exponents = dict[Tensor | nn.Module, int | None]  # None: no power of two, or not the same one in every call


def may_be_invariant(param: Tensor) -> bool:
    """Whether a parameter may be scale-invariant: it is trained, and a weight."""
    return param.requires_grad and param.dim() >= 2


class Trial(NamedTuple):
    """The result of doubling some weights: the reason why they are not scale-invariant ("" if they are), and the powers
    of two by which biases and running statistics change."""

    problem: str
    exponents: Exponents


class Doubling:
    """Runs a model in training mode with some weights doubled, and compares the results with the unchanged model's."""

    def __init__(self, model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        self._model, self._batch, self._loss_fn = model, batch, loss_fn
        self._device = next(model.parameters()).device
        norms = {module for module in model.modules() if isinstance(module, _NormBase)}
        self._norms = [module for module in norms if module.running_mean is not None]
        biases = ((module, module._parameters.get("bias")) for module in model.modules() if module not in norms)
        self._biases = {module: bias for module, bias in biases if bias is not None}
        eps = ((m, name, vars(m).get(name)) for m in model.modules() for name in ("eps", "variance_epsilon"))
        self._eps = [(m, name, value) for m, name, value in eps if isinstance(value, float) and 0 < value < 0.01]
        self._paused = False
        self._recorded: dict[nn.Module, list[Tensor]] = {}
        self._calls: Counter[nn.Module] = Counter()
        self._values: dict[Tensor, Tensor] = {}
        self._found: Exponents = {}

    def __enter__(self) -> "Doubling":
        with ExitStack() as stack:
            stack.callback(torch.clear_autocast_cache)
            stack.callback(self._set_eps, None)
            hooks = [(module, self._before_biased) for module in self._biases]
            for module, hook in [*hooks, *((module, self._before_norm) for module in self._norms)]:
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            self._set_eps(_EPS)
            self._outputs, self._grads = self._run([])
            if not all(tensor.isfinite().all() for tensor in (*self._outputs, *self._grads.values())):
                # for example, a module adds eps to variances in half precision, and eps underflows
                self._set_eps(None)
                self._outputs, self._grads = self._run([])
            if not any(tensor.isfinite().any() for tensor in self._outputs):
                raise ValueError("the model's outputs hold no finite floating-point number to compare")
            self._evaluation = self._evaluate([], {})
            self._close = stack.pop_all().close
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def alone(self, weights: list[Layer]) -> Trial:
        """Doubles the weights in training mode."""
        outputs, grads = self._run(weights)
        if not _same(outputs, self._outputs, _OUTPUTS):
            return Trial("outputs change with its scale", self._found)
        # not if a weight is 0: the variance of a filter of zeros is eps, which does not double
        halved, base = (
            [layer.of(of.get(layer.param, torch.zeros_like(layer.param)) * (layer.param != 0)) for layer in weights]
            for of in (grads, self._grads)
        )
        if not _same([2 * grad for grad in halved], base, _GRADIENTS):
            return Trial("its gradient does not halve when it is doubled", self._found)
        # outputs may hide it, as in front of a residual branch that starts at a millionth
        others = self._grads.keys() & grads.keys() - {layer.param for layer in weights}
        if any(_power(grads[param], self._grads[param], _GRADIENTS) for param in others):
            return Trial("gradients of other weights change with its scale", self._found)
        return Trial("", self._found)

    def together(self, weights: list[Layer], bias: Layer | None = None) -> Trial:
        """Doubles the weights in training mode, and in evaluation mode together with the tensors that depend on them.

        Args:
            bias: the part of a bias that belongs to a slice of a weight and is doubled with it.
        """
        weights = weights if bias is None else [*weights, bias]
        trial = self.alone(weights)
        if trial.problem:
            return trial
        if bias is not None:  # its other parts stay, so the whole bias has no power
            trial.exponents.pop(bias.param, None)
        if None in trial.exponents.values():
            return Trial(NO_POWER, trial.exponents)
        if not _same(self._evaluate(weights, trial.exponents), self._evaluation, _OUTPUTS):
            return Trial("outputs in evaluation mode change with its scale", trial.exponents)
        return trial

    def _run(self, weights: list[Layer]) -> tuple[list[Tensor], dict[Tensor, Tensor]]:
        """Returns outputs, and gradients of weights that may be invariant. The run without weights is the reference."""
        if not weights:
            self._recorded = {module: [] for module in (*self._biases, *self._norms)}
        self._recording = not weights
        self._calls.clear()
        self._found = {}
        with as_it_was(self._model):
            _double(weights)
            self._values = {bias: bias.detach().clone() for bias in self._biases.values()}
            outputs, loss = self._forward(self._loss_fn)
            # not torch.autograd.grad, which checkpointed activations refuse
            loss.backward()
            grads: dict[Tensor, Tensor] = {}
            for p in self._model.parameters():
                if may_be_invariant(p) and p.grad is not None:
                    # the next pass writes to the same memory if DDP has views of its buckets
                    grads[p] = p.grad.clone() if p.grad._is_view() else p.grad
        return outputs, grads

    def _evaluate(self, weights: list[Layer], exponents: Exponents) -> list[Tensor]:
        self._paused = True
        with as_it_was(self._model), torch.no_grad():
            self._model.eval()
            _double(weights)
            for key, power in exponents.items():
                if isinstance(key, Tensor):
                    _set(key, key * 2.0 ** (power or 0))
                else:
                    key.get_buffer("running_mean").mul_(2.0 ** (power or 0))
                    key.get_buffer("running_var").mul_(4.0 ** (power or 0))
            # not the loss function, which may be for outputs in training mode
            outputs, _ = self._forward(lambda output, _: torch.zeros(()))
        self._paused = False
        return outputs

    def _forward(self, loss_fn: Callable[[Any, Any], Tensor]) -> tuple[list[Tensor], Tensor]:
        """Returns copies of the outputs, and the loss."""
        outputs: list[Tensor] = []

        def keep(output: Any, targets: Any) -> Tensor:
            outputs.extend(tensor.detach().clone() for tensor in tensors_in(output) if tensor.is_floating_point())
            return loss_fn(output, targets)

        return outputs, loss_of(self._model, self._batch, keep, self._device)

    def _before_biased(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Scale the bias by the power of two by which the output would be scaled if it were zero."""
        if self._paused:
            return
        bias = self._biases[module]
        with torch.no_grad():
            _set(bias, torch.zeros_like(bias))
            power = self._observe(bias, module, module.forward(*args, **kwargs))
        _set(bias, self._values[bias] * 2.0**power)

    def _before_norm(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._paused:
            self._observe(module, module, (args, kwargs))

    def _observe(self, key: Tensor | nn.Module, module: nn.Module, value: Any) -> int:
        """Records and returns the power of two between a tensor of this run and of the reference run."""
        tensor = next((t for t in tensors_in(value) if t.is_floating_point()), None)
        if tensor is None:
            return 0
        recorded = self._recorded[module]
        if self._recording:
            recorded.append(tensor.detach().clone())
            return 0
        call = self._calls[module]
        self._calls[module] += 1
        power = _power(tensor.detach(), recorded[call]) if call < len(recorded) else None
        self._found[key] = power if self._found.get(key, power) == power else None
        return power or 0

    def _set_eps(self, eps: float | None) -> None:
        for module, name, value in self._eps:
            setattr(module, name, value if eps is None else min(value, eps))


def _power(scaled: Tensor, base: Tensor, tolerance: float = _OUTPUTS) -> int | None:
    """Returns the i with scaled = 2^i · base: 0 if both are zero, None if no i fits."""
    if scaled.shape != base.shape:
        return None
    scaled, base = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (scaled, base))
    large, small = scaled.norm().item(), base.norm().item()
    if large == small == 0:
        return 0
    if not (math.isfinite(large) and math.isfinite(small) and large and small):
        return None
    power = round(math.log2(large / small))
    return power if (scaled - base * 2.0**power).norm().item() <= tolerance * large else None


def _same(new: list[Tensor], old: list[Tensor], tolerance: float) -> bool:
    return len(new) == len(old) and all(_close(a, b, tolerance) for a, b in zip(new, old, strict=True))


def _close(new: Tensor, old: Tensor, tolerance: float) -> bool:
    if new.shape != old.shape or not torch.equal(new.isfinite(), old.isfinite()):
        return False
    new, old = (t.detach().nan_to_num(0, 0, 0).to(torch.promote_types(t.dtype, torch.float32)) for t in (new, old))
    return bool((new - old).norm() <= tolerance * old.norm())


def _double(weights: list[Layer]) -> None:
    for layer in weights:
        part = layer.of(layer.param.detach())
        _set(part, 2 * part)


def _set(param: Tensor, value: Tensor) -> None:
    # without autograd's version counter, since the graph may hold the parameter; and autocast holds casts of it
    param.data.copy_(value)
    torch.clear_autocast_cache()
