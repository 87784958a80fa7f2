"""GradInit: scale every parameter so that the first step of the optimizer leaves the lowest loss."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fused_lwlr.methods.checks import check_choice, check_count, check_types, number, positive, require
from fused_lwlr.methods.gradinit.batches import Minibatches, PassEndedError, join
from fused_lwlr.methods.gradinit.network import Network, Params, check_model, rescale_, twice_differentiable
from fused_lwlr.methods.gradinit.result import GradInitResult, GradInitStep, warn_of_one_branch
from fused_lwlr.methods.gradinit.rules import Descent, RescaleAdam
from fused_lwlr.methods.progress import with_progress
from fused_lwlr.patterns import Selection, Selector, everything

Target = Literal["sgd", "adam"]
Mode = Literal["official", "paper"]


def gradinit_(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    optimizer: Target = "sgd",
    lr: float,
    gamma: float | None = None,
    relative_gamma: float | None = None,
    tau: float = 1e-2,
    steps: int | None = 390,
    min_scale: float = 0.01,
    select: Selector = everything,
    overlap: float = 0.5,
    penalty: float | None = None,
    normalize: bool = False,
    mode: Mode = "official",
    progress: bool = False,
) -> GradInitResult:
    """Scale the weights of a model, in place, so that one step of the optimizer brings the loss down the furthest.

        minimize over α   L(S̃; αW - η·𝒜[g])     subject to   ‖g‖ ≤ γ     where g = ∇L(S; αW)

    Every parameter W has a scale α; the minibatches S and S̃ share half of their samples (GradInit, Eq. 1 and
    Algorithm 1). If ‖g‖ > γ, the scales descend along the gradient of ‖g‖, a second-order gradient. Otherwise they
    descend along the gradient of the loss after the step, with 𝒜[g] held constant. For SGD, 𝒜[g] is g and the norm is
    ℓ2; for Adam, 𝒜[g] is sign(g) and the norm is ℓ1.

    Normalization layers use the statistics of the minibatch, and dropout is off. A tied parameter has one scale. A
    parameter that does not require a gradient has none. The function multiplies the weights by their scales and
    leaves buffers, `.grad`, training modes and random number generators unchanged. If it raises or is interrupted, the
    weights are unchanged too.

    Args:
        model: an initialized model in float32 or float64. It runs on the device of its parameters.
        batches: minibatches of the kinds that `calibrate` accepts, with samples along the first dimension. Two of them
            form one S. A step uses three, or two if it is on the constraint, so a run uses up to 3 · `steps`
            (4 · `steps` if `overlap` is below 0.5, 2 · `steps` if it is 1). A list, a DataLoader or another iterable
            is restarted when it ends. An iterator, such as a generator, cannot be restarted and must hold enough.
            With `steps=None` it is read once.
        loss_fn: returns the mean loss over a minibatch, a scalar.
        optimizer: "sgd" or "adam": the optimizer that will train the model.
        lr: η, the learning rate that will train the model.
        gamma: γ. If None, γ satisfies η·γ² = 0.1 for SGD and η·γ = 0.1 for Adam (Section 3.3). That rule ignores the
            model, but the norm depends on it, and ℓ1 grows with the number of parameters: compare
            `history[0].norm`. With `math.inf` there is no constraint.
        relative_gamma: γ as a multiple of the norm on the first S; replaces `gamma`. This option is not from the
            paper. Values a little below 1 keep both branches in use. At a high learning rate, try several values.
        tau: τ, the learning rate of the scales. The paper searches from 1e-3 to 1e-1.
        steps: T. The paper uses 390 for CIFAR-10, 2000 for ImageNet and 780 for translation. None ends after one pass
            over `batches`.
        min_scale: the lowest scale.
        select: the parameters whose scales are learned, as for a `Scaling`; others keep scale 1. By default all. The
            paper compares with weights alone, and with the scales of normalizations alone (Table 4).
        overlap: the fraction of S that S̃ contains too, from 0 to 1.
        penalty: λ. If given, there is no constraint, and the objective is L(S̃; αW - η·𝒜[g]) + λ·‖g‖ (Section 3.3,
            Table 2). Each step then has second-order gradients, and uses three minibatches.
        normalize: for SGD, 𝒜[g] is g/‖g‖, or γ·g/‖g‖ with mode="paper" (Section 3.1). The authors' scripts for
            CIFAR-10 use it.
        mode: "official" follows the authors' code, which differs from the text: Adam updates the scales, with a first
            moment for each branch; the loss is divided by η; gradients of scales are clipped to ±1; `min_scale`
            holds after every step and is 0 for biases; parameters that are zero keep their scale. "paper" uses
            gradient descent, and applies `min_scale` after steps on the objective only.
        progress: show a progress bar (needs rich).

    Returns:
        The scale of each parameter, and for each step the loss before and after one step of the optimizer, the norm,
        and the branch.

    Warns:
        UserWarning: γ is far from the norm: at least nine in ten steps were on the constraint, or no step was (only for
            10 steps or more).

    Raises:
        ValueError: an argument is out of range; there are too few minibatches, or two cannot be joined; the loss is
            not a scalar; the loss or a gradient is not finite; or the model is sharded, in half precision, complex, or
            wrapped in DistributedDataParallel.
        RuntimeError: the constraint needs a second derivative that torch does not have. The message names the
            operation, such as `hardsigmoid`, which can be written as `relu6(x + 3) / 6`.
    """
    check_types(model, batches)
    require(optimizer in get_args(Target), "optimizer", optimizer, "'sgd' or 'adam' (for AdamW too)")
    lr, tau = positive("lr", lr), positive("tau", tau)
    rule = "above 0, or None for η·γ² = 0.1 (SGD) or η·γ = 0.1 (Adam)"
    if gamma is not None:
        gamma = number("gamma", gamma, rule, lambda found: found > 0)
    rule = "a finite number above 0, or None"
    if relative_gamma is not None:
        relative_gamma = number("relative_gamma", relative_gamma, rule, lambda found: 0 < found < math.inf)
    if penalty is not None:
        penalty = number("penalty", penalty, rule, lambda found: 0 < found < math.inf)
    require(relative_gamma is None or gamma is None, "relative_gamma", relative_gamma, "None where gamma is given")
    rule = "None where gamma or relative_gamma is given"
    require(penalty is None or gamma is relative_gamma is None, "penalty", penalty, rule)
    if steps is not None:
        check_count("steps", steps)
    min_scale = number("min_scale", min_scale, "from 0 to 1, where scales start", lambda found: 0 <= found <= 1)
    overlap = number("overlap", overlap, "from 0 to 1", lambda found: 0 <= found <= 1)
    require(isinstance(normalize, bool), "normalize", normalize, "True or False")
    rule = "False with optimizer='adam', whose step is sign(g)"
    require(not normalize or optimizer == "sgd", "normalize", normalize, rule)
    check_choice("mode", mode, get_args(Mode))
    rule = "False with mode='paper' and no gamma, since its step is γ · g / ‖g‖"
    bounded = penalty is None and gamma != math.inf
    require(not (normalize and mode == "paper") or bounded, "normalize", normalize, rule)
    check_model(model, "gradinit_")
    if relative_gamma is not None:
        gamma = relative_gamma
    elif penalty is not None:
        gamma = math.inf
    elif gamma is None:
        gamma = math.sqrt(0.1 / lr) if optimizer == "sgd" else 0.1 / lr
    history: list[GradInitStep] = []
    with twice_differentiable(model):
        network = Network(model, loss_fn)
        learned = _learned(model, network, select)
        problem = _Problem(network, optimizer, lr, gamma, relative_gamma is not None, normalize and mode, penalty)
        names, official = network.weights, mode == "official"
        mover = RescaleAdam(tau, names, min_scale, lr) if official else Descent(tau, min_scale)
        stream = Minibatches(batches, overlap, steps)
        scales = np.ones(len(network.weights))
        with suppress(PassEndedError):
            for _ in with_progress(count() if steps is None else range(steps), steps, "GradInit", progress):
                step, derivatives = problem.step(network.scaled(scales.tolist()), stream)
                gradients = [gradient if on else None for gradient, on in zip(derivatives, learned, strict=True)]
                scales = mover.step(scales, gradients, step.branch)
                history.append(step)
    if not history:
        raise ValueError(f"batches ended before the first step, which takes up to {stream.needed}: give more")
    result = GradInitResult(dict(zip(network.weights, scales.tolist(), strict=True)), tuple(history))
    rescale_(model, result.scales)
    warn_of_one_branch(history, problem.gamma)
    return result


@dataclass
class _Problem:
    """Eq. 1: a step of the optimizer, the constraint on its gradient, and derivatives of both."""

    network: Network
    optimizer: Target
    lr: float
    gamma: float
    relative: bool
    """Whether γ is a multiple of the norm; the first step, which measures the norm, makes it absolute."""
    normalize: Mode | Literal[False]
    penalty: float | None
    taken: int = 0

    def step(self, params: Params, stream: Minibatches) -> tuple[GradInitStep, list[float | None]]:
        """Lines 4 to 11, and the derivative with respect to every scale."""
        self.taken += 1
        halves = stream.first()

        def inside(loss: Tensor) -> tuple[float, float, Params, list[float | None] | None]:
            gradients = _gradients(loss, params)
            norm = self.norm(gradients)
            before, size = torch.stack([loss.detach().to(norm.dtype), norm.detach()]).tolist()
            self.check_finite(before, size, gradients)
            if self.relative:
                self.gamma, self.relative = self.gamma * size, False
            if size > self.gamma:
                return before, size, {}, self.derivative(norm, params)
            direction = {name: self.direction(g.detach(), size) for name, g in gradients.items()}
            return before, size, direction, None if self.penalty is None else self.derivative(norm, params)

        before, norm, direction, of_norm = self.network.run(params, join(*halves), inside)
        if norm > self.gamma:
            assert of_norm is not None, "the constraint has a derivative"
            return GradInitStep(before, None, norm, "constraint"), of_norm
        with torch.no_grad():
            stepped = {name: p - self.lr * direction[name] if name in direction else p for name, p in params.items()}
        stepped = {name: p.detach().requires_grad_() for name, p in stepped.items()}

        def outside(loss: Tensor) -> tuple[float, list[float | None]]:
            after = loss.item()
            if not math.isfinite(after):
                raise self.problem(f"the loss after a step with lr={self.lr:g} is {after}: try a lower lr or gamma")
            return after, self.derivative(loss, stepped)

        after, objective = self.network.run(stepped, stream.second(*halves), outside)
        if of_norm is not None and self.penalty is not None:
            # a parameter may have a derivative of one of them
            objective = [
                one if other is None else (one or 0.0) + self.penalty * other
                for one, other in zip(objective, of_norm, strict=True)
            ]
        return GradInitStep(before, after, norm, "objective"), objective

    def norm(self, gradients: Params) -> Tensor:
        """ℓ2 over all elements for SGD, ℓ1 for Adam: of shape []."""
        if self.optimizer == "adam":
            return torch.stack([gradient.abs().sum() for gradient in gradients.values()]).sum()
        return torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()

    def direction(self, gradient: Tensor, norm: float) -> Tensor:
        """𝒜[g] of one parameter."""
        if self.optimizer == "adam":
            return gradient.sign()
        if not self.normalize or norm == 0:
            return gradient
        return gradient * ((self.gamma if self.normalize == "paper" else 1.0) / norm)

    def derivative(self, value: Tensor, params: Params) -> list[float | None]:
        """With respect to the scale of every parameter."""
        if not value.requires_grad:  # the norm, where gradients depend on no parameter
            return [None] * len(params)
        derivatives = self.network.towards_scales(torch.autograd.grad(value, list(params.values()), allow_unused=True))
        bad = [name for name, x in zip(params, derivatives, strict=True) if x is not None and not math.isfinite(x)]
        if bad:
            raise self.problem(
                f"the derivative by the scale of {_names(bad)} is not finite: check the loss and the data"
            )
        return derivatives

    def check_finite(self, loss: float, norm: float, gradients: Params) -> None:
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {norm}"
        if not math.isfinite(loss + norm):
            bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
            seen = f", and the gradient of {_names(bad)} not finite" if bad else ""
            raise self.problem(f"{what}{seen}: check the loss, the data and the initialization")

    def problem(self, what: str) -> ValueError:
        return ValueError(f"in step {self.taken} {what}")


def _learned(model: nn.Module, network: Network, select: Selector) -> list[bool]:
    """Returns, for each parameter, whether its scale is learned."""
    selection, params = Selection(select, everything), dict(model.named_parameters())
    found = [selection.selects(name, params[name]) for name in network.weights]
    if not any(found):
        raise ValueError(f"select={select!r} fits none of {len(found)} parameters that require a gradient")
    selection.check(network.weights, "parameter that requires a gradient")
    return found


def _gradients(loss: Tensor, params: Params) -> Params:
    """Gradients of all parameters that have one, differentiable again."""
    found = torch.autograd.grad(loss, list(params.values()), create_graph=True, allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(params, found, strict=True) if gradient is not None}
    sparse = [name for name, gradient in gradients.items() if gradient.layout != torch.strided]
    if sparse:
        raise ValueError(f"the gradient of {_names(sparse)} is sparse: build the layer with sparse=False")
    return gradients


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5]))
