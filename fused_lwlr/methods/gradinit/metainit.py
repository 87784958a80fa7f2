"""MetaInit: scale weights so that the gradient changes little along itself, also without labels or data.

Initializing Learning by Learning to Initialize (Dauphin and Schoenholz, 2019), Eq. 1 and the code that it prints.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fused_lwlr.methods.checks import Array, check_choice, check_count, check_types, number, positive, require
from fused_lwlr.methods.gradinit.batches import endless
from fused_lwlr.methods.gradinit.network import Network, check_model, rescale_, twice_differentiable
from fused_lwlr.methods.gradinit.norms import DifferentiableNorms
from fused_lwlr.methods.gradinit.result import MetaInitResult, MetaInitStep
from fused_lwlr.methods.gradinit.rules import Branch, RescaleAdam
from fused_lwlr.methods.progress import with_progress
from fused_lwlr.optim.option_table import shown

Rule = Literal["signsgd", "adam"]
LR: dict[Rule, float] = {"signsgd": 0.1, "adam": 0.01}
"""Default learning rates: of MetaInit, and of the scales in GradInit."""


@torch.enable_grad()
def gradient_quotient(loss: Tensor, params: Iterable[Tensor], eps: float = 1e-5) -> Tensor:
    """Returns the gradient quotient: the mean over all elements of |(g - Hg) / (g ± ε) - 1|.

    Here g = ∇L and H is the Hessian; ε has the sign of g, and is positive where g is 0 (MetaInit, Eq. 1). The quotient
    measures how much the gradient changes along its own direction. For a linear loss, each element counts as
    ε / (|g| + ε), which is near 0. An element that the loss does not depend on counts as 1.

    Args:
        loss: a scalar with its graph. The graph is kept.
        params: the parameters to differentiate by. A parameter that the loss does not depend on has g = 0.
        eps: ε.

    Returns:
        A differentiable scalar. Its gradient needs third derivatives of the loss. These are right for batch, instance,
        layer and weight normalization only if the loss was computed within `DifferentiableNorms`. So is the value for
        weight normalization.

    Raises:
        ValueError: `params` is empty, or has a complex tensor or one that requires no gradient; the loss is not a
            scalar or depends on no parameter; or ε is not above 0.
        TypeError: the loss is no tensor, or `params` has something other than tensors.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss={shown(loss)} must be a scalar tensor with its graph")
    # a tensor would be a list of its rows
    params = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else [params]
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(f"params must be tensors, such as model.parameters(), not {shown(param)}")
        if param.is_complex():
            raise ValueError(f"params has {shown(param)} of {param.dtype}: give real ones, as of torch.view_as_real")
        if not param.requires_grad:
            raise ValueError(
                f"params has {shown(param)} that requires no gradient: leave it out, such as by "
                "[param for param in model.parameters() if param.requires_grad]"
            )
    if not sum(param.numel() for param in params):
        raise ValueError("params is empty: give the parameters that the loss depends on")
    if loss.dim() != 0:
        raise ValueError(f"loss is a tensor of shape {tuple(loss.shape)}: it must be a scalar")
    if not loss.requires_grad:
        raise ValueError("loss depends on no parameter that requires a gradient: compute it from the output of model")
    eps = positive("eps", eps)
    gradient = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
    if any(g.layout != torch.strided for g in gradient):
        raise ValueError("a gradient is sparse: build the layer with sparse=False")
    half_square = torch.stack([g.square().sum() for g in gradient]).sum() / 2
    if half_square.requires_grad:
        product: Sequence[Tensor] = torch.autograd.grad(half_square, params, create_graph=True, materialize_grads=True)
    else:  # linear in every parameter
        product = [torch.zeros_like(g) for g in gradient]
    quotients = [
        ((g - hg) / torch.where(g >= 0, g + eps, g - eps) - 1).abs().sum()
        for g, hg in zip(gradient, product, strict=True)
    ]
    return torch.stack(quotients).sum() / sum(param.numel() for param in params)


def metainit_(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    rule: Rule = "signsgd",
    lr: float | None = None,
    momentum: float = 0.9,
    min_scale: float = 0.01,
    steps: int | None = 500,
    eps: float = 1e-5,
    progress: bool = False,
) -> MetaInitResult:
    """Scale the weights of a model, in place, so that its gradient quotient is low.

    With `rule="signsgd"`, each step moves the norm of every parameter with two or more dimensions by signed gradient
    descent with momentum on the gradient quotient, which is taken over all parameters that require a gradient. The
    algorithm and the defaults are MetaInit's. With `rule="adam"`, Adam moves the scales of all parameters, with
    gradients clipped to ±1, as in GradInit's comparison with MetaInit (GradInit, Appendix D and Table 9, "real +
    Adam"; `metainit` in the authors' code).

    The code printed in MetaInit's paper, and the code of GradInit's authors, run normalization layers in evaluation
    mode; here they use the statistics of the minibatch, as in `gradinit_`.

    MetaInit needs third derivatives, see `DifferentiableNorms`, and about twice the memory of `gradinit_`. It restores
    the same things as `gradinit_`, also when it raises or is interrupted.

    Args:
        model: an initialized model in float32 or float64. It runs on the device of its parameters.
        batches: minibatches as for `gradinit_`, one for each step. `fused_lwlr.methods.gradinit.gaussian_batches` makes
            the paper's random ones.
        loss_fn: returns the mean loss over a minibatch, a scalar.
        rule: "signsgd" or "adam".
        lr: with "signsgd", the change of a norm in one step without momentum; with "adam", the learning rate of the
            scales. None for 0.1 and 0.01.
        momentum: the momentum of the changes of norms, with "signsgd".
        min_scale: the lowest scale of a weight, with "adam"; the scale of a bias may become 0.
        steps: the number of steps. None takes one pass over `batches`.
        eps: ε of the quotient.
        progress: show a progress bar (needs rich).

    Returns:
        The scale of each parameter, and for each step the loss and the gradient quotient. A scale is negative if the
        norm passed through 0, which turns the weight around.

    Raises:
        ValueError: as `gradinit_`.
    """
    check_types(model, batches)
    check_choice("rule", rule, get_args(Rule))
    lr, eps = positive("lr", LR[rule] if lr is None else lr), positive("eps", eps)
    momentum = number("momentum", momentum, "at least 0 and below 1", lambda found: 0 <= found < 1)
    min_scale = number("min_scale", min_scale, "from 0 to 1, where scales start", lambda found: 0 <= found <= 1)
    if rule == "adam":
        require(momentum == 0.9, "momentum", momentum, "left out with rule='adam': it is for 'signsgd'")
    else:
        require(min_scale == 0.01, "min_scale", min_scale, "left out with rule='signsgd': it is for 'adam'")
    if steps is not None:
        check_count("steps", steps)
    check_model(model, "metainit_")
    history = []
    # a layer that is computed once more in a backward pass needs the same normalizations, so the same thread
    with twice_differentiable(model), DifferentiableNorms(), torch.autograd.set_multithreading_enabled(False):
        network = Network(model, loss_fn)
        mover = (
            RescaleAdam(lr, network.weights, min_scale, 1.0)
            if rule == "adam"
            else SignDescent(list(network.weights.values()), lr, momentum)
        )
        scales = np.ones(len(network.weights))
        source = iter(batches) if steps is None else islice(endless(batches, steps, 1, 1), steps)
        for i, batch in enumerate(with_progress(source, steps, "MetaInit", progress)):
            params = network.scaled(scales.tolist())
            step, gradients = network.run(params, batch, partial(_derivative, list(params.values()), eps))
            derivatives = network.towards_scales(gradients)
            if not math.isfinite(step.loss + step.quotient) or not all(math.isfinite(x or 0.0) for x in derivatives):
                raise ValueError(
                    f"in step {i + 1} the loss is {step.loss} and the gradient quotient {step.quotient}, or a "
                    "derivative is not finite: check the loss, the data and the initialization"
                )
            scales = mover.step(scales, derivatives, "objective")
            history.append(step)
    if not history:
        raise ValueError("batches is empty: give a minibatch for each step")
    result = MetaInitResult(dict(zip(network.weights, scales.tolist(), strict=True)), tuple(history))
    rescale_(model, result.scales)
    return result


class SignDescent:
    """MetaInit's rule: the norms of weights change by signed gradient descent with momentum."""

    def __init__(self, weights: Sequence[Tensor], lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.norms = np.array([weight.norm().item() for weight in weights])
        # vectors keep their norms, and zero has no direction
        self.moving = np.array([weight.dim() >= 2 for weight in weights]) & (self.norms > 0)
        self.velocity = np.zeros(len(weights))

    def step(self, scales: Array, gradients: Sequence[float | None], branch: Branch) -> Array:
        found = np.array([x or 0.0 for x in gradients])
        self.velocity = self.momentum * self.velocity - self.lr * np.sign(scales * found)
        on = self.moving & (scales != 0)
        moved: Array = scales.copy()
        moved[on] += np.sign(scales[on]) * self.velocity[on] / self.norms[on]
        return moved


def _derivative(params: list[Tensor], eps: float, loss: Tensor) -> tuple[MetaInitStep, Sequence[Tensor | None]]:
    quotient = gradient_quotient(loss, params, eps)
    step = MetaInitStep(loss.item(), quotient.item())
    if not quotient.requires_grad:
        return step, [None] * len(params)
    return step, torch.autograd.grad(quotient, params, allow_unused=True)


def gaussian_batches(shape: Sequence[int], classes: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the paper's random minibatches without end: inputs from N(0, 1) in float32, classes drawn uniformly.

    Args:
        shape: the shape of the inputs, samples first.
        classes: the number of classes.
        seed: the seed of the random numbers.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    while True:
        inputs = torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
        yield inputs, torch.randint(0, classes, tuple(shape[:1]), generator=generator, device="cpu")
