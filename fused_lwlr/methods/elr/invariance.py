"""Finds the scale-invariant weights of a network, and the tensors that must be rescaled with them."""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr.backends import Backend
from fused_lwlr.measure.layers import Layer, layers_of
from fused_lwlr.measure.statistics import StatisticsPass
from fused_lwlr.methods.checks import check_types, number
from fused_lwlr.methods.elr.doubling import NO_POWER, Doubling, Exponents, Trial, may_be_invariant
from fused_lwlr.methods.minibatches import check_batch, loss_of, part_of, samples
from fused_lwlr.methods.restoring import as_it_was
from fused_lwlr.patterns import split_name
from fused_lwlr.rescaling import ScaleInvariant
from fused_lwlr.shards import is_distributed, reshard

_NO_GRADIENT = 1e-10  # ‖g‖·‖w‖ relative to the largest: a branch may start with a scale as small as 1e-6


def scale_invariant(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    tolerance: float = 1e-2,
    backend: Backend = "auto",
) -> ScaleInvariant:
    """Measures which weights are scale-invariant: their scale does not change the output in training mode.

    The function examines all parameters of two or more dimensions that require a gradient, in three steps:

    1. A scale-invariant weight is perpendicular to its gradient, ⟨∂L/∂W, W⟩ = 0 (Spreads in Effective Learning Rates,
       Eq. 2). This must hold up to `tolerance` in both halves of the minibatch.
    2. Each of these weights is doubled by itself. The outputs must stay the same, its gradient must halve, and no
       gradient of another weight may change by a power of two.
    3. All of these weights are doubled together. This shows the power of two by which biases and running statistics
       change. A weight is rejected if one of them changes by no power of two, or if the outputs in evaluation mode
       change when everything is rescaled.

    If a bias before a LayerNorm or GroupNorm is not zero, the weight alone is not perpendicular to its gradient.
    Examine such a model at initialization, where biases are zero.

    If a fused query, key and value projection is not scale-invariant as a whole, each third is examined with its third
    of the bias. The value is scale-invariant if a normalization layer follows the attention before anything is added;
    query and key are if they are normalized before their product. `slices` lists these thirds. SGD does not rescale
    them.

    The cost is one forward and backward pass over half of the minibatch for each weight that passes step 1, and a copy
    of the inputs of every normalization layer with running statistics and of the outputs of every module with a bias.
    A BatchNorm in evaluation mode counts as frozen if the model is in training mode; a model in evaluation mode is put
    in training mode. Afterwards, also if this raises, weights, buffers, `.grad`, training modes, hooks, eps and the
    random number generators are restored.

    Args:
        model: the model to examine. It runs on the device of its parameters.
        batch: a minibatch of the kinds that `calibrate` accepts. Tensors with the most frequent first size, which must
            be at least 4, are split in halves. Both halves get all other values.
        loss_fn: returns the mean loss over the minibatch, a scalar.
        tolerance: the largest |cosine| between weight and gradient. The cosine is about eps / variance and not 0 if
            the eps of the normalization layer matters.
        backend: the backend of the reduction: "auto", "triton" or "torch".

    Returns:
        The scale-invariant weights, and the reason for each weight that is not.

    Raises:
        ValueError: the model is sharded or has no parameter to examine; the batch is too small or not a minibatch; the
            loss is not a scalar; the outputs contain no tensor; or a gradient or an output is not finite.
    """
    tolerance = number("tolerance", tolerance, "at least 0: it is the largest |cosine|", lambda found: found >= 0)
    check_types(model)
    reshard(model)
    if any(map(is_distributed, model.parameters())):
        raise ValueError(
            "model is sharded over processes: call scale_invariant before sharding; the result also holds for the "
            "sharded model"
        )
    layers = [Layer(name, param) for name, param in model.named_parameters() if may_be_invariant(param)]
    if not layers:
        raise ValueError("model has no parameter of two or more dimensions that requires a gradient")
    parts = {layer.name: layer for layer in layers_of(model) if layer.stop is not None}
    every = [*layers, *(layer for layer in parts.values() if may_be_invariant(layer.param))]
    check_batch(batch)
    size = samples(batch)
    if size < 4:
        raise ValueError(f"batch has {size} samples: at least 4 are needed for two halves")
    halves = part_of(batch, slice(size // 2)), part_of(batch, slice(size // 2, None))
    # a compiled model ignores new hooks, unless it runs without its compiled code
    compiled = "torch._dynamo" in sys.modules
    with (
        torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
        as_it_was(model),
        as_it_was(loss_fn),
    ):
        if not model.training:
            model.train()
        statistics = [_statistics(model, half, loss_fn, every, backend) for half in halves]
        norms, dots = torch.stack(statistics).unbind(2)  # [half, layer]
        reasons = _not_perpendicular(every, norms, dots / norms, tolerance)
        candidates = {layer.name: layer for layer in layers if layer.name not in reasons}
        exponents: Exponents = {}
        if any(layer.name not in reasons for layer in every):
            with Doubling(model, halves[0], loss_fn) as doubling:
                exponents = _select(doubling, candidates, reasons)
                for layer in every[len(layers) :]:
                    if layer.name not in reasons and split_name(layer.name)[0] in reasons:
                        bias = parts.get(layer.name.replace("weight[", "bias["))
                        if problem := doubling.together([layer], bias).problem:
                            reasons[layer.name] = problem
    names = tuple(name for name in candidates if name not in reasons)
    first, second = (dots / norms).tolist()
    cosines = {layer.name: (a, b) for layer, a, b in zip(every, first, second, strict=True)}
    shown = [layer.name for layer in layers]
    # slices of weights that are not invariant as a whole
    shown += [layer.name for layer in every[len(layers) :] if split_name(layer.name)[0] in reasons]
    owners: dict[Tensor, tuple[nn.Module, str]] = {
        param: (module, name)
        for module in reversed(list(model.modules()))
        for name, param in module.named_parameters(recurse=False)
    }
    return ScaleInvariant(
        names,
        tuple(owners[candidates[name].param] for name in names),
        tuple((*owners[param], power) for param in model.parameters() if (power := exponents.get(param))),
        tuple((module, power) for module in model.modules() if (power := exponents.get(module))),
        {name: cosines[name] for name in shown},
        {name: reasons[name] for name in shown if name in reasons},
        tuple(name for name in shown[len(layers) :] if name not in reasons),
    )


def _statistics(
    model: nn.Module, half: Any, loss_fn: Callable[[Any, Any], Tensor], layers: list[Layer], backend: Backend
) -> Tensor:
    """‖g‖·‖w‖ and ⟨g, w⟩ of each layer, of shape [layers, 2]; NaN without a gradient."""
    reduction = StatisticsPass(layers, backend)
    # the same random numbers for every pass, so that all passes drop the same random parts
    with as_it_was(model):
        loss_of(model, half, loss_fn, layers[0].param.device).backward()
        statistics = reduction()
    bad = [repr(name) for name, count in zip(statistics.names, statistics.nonfinite.tolist(), strict=True) if count]
    if bad:
        raise ValueError(f"the gradient of {', '.join(bad[:5])} is not finite: check the loss and the data")
    result = torch.full((len(layers), 2), math.nan, dtype=torch.float64, device="cpu")
    values = torch.stack([statistics.grad_norm * statistics.weight_norm, statistics.dot], dim=1)
    result[reduction.index.cpu()] = values.cpu()
    return result


def _not_perpendicular(layers: list[Layer], norms: Tensor, cosines: Tensor, tolerance: float) -> dict[str, str]:
    reasons = {}
    floor = _NO_GRADIENT * norms.nan_to_num().max().item()
    for layer, norm, cosine in zip(layers, norms.T.tolist(), cosines.T.tolist(), strict=True):
        if math.isnan(sum(norm)):
            reasons[layer.name] = "it has no gradient"
        elif min(norm) <= floor:
            zero = "its gradient is zero but for rounding, which tells nothing"
            reasons[layer.name] = zero if layer.param.detach().any() else "it is zero"
        elif max(map(abs, cosine)) > tolerance:
            reasons[layer.name] = "it is not perpendicular to its gradient"
    return reasons


def _select(doubling: Doubling, candidates: dict[str, Layer], reasons: dict[str, str]) -> Exponents:
    """Add rejected candidates to `reasons`; return the powers for all others at once."""
    trials = {name: doubling.alone([layer]) for name, layer in candidates.items()}
    reasons.update((name, trial.problem) for name, trial in trials.items() if trial.problem)
    chosen = [name for name in candidates if name not in reasons]
    result = Trial("", {})
    while chosen:
        result = doubling.together([candidates[name] for name in chosen])
        # first reject all candidates that reach a tensor without a power; other powers may change then
        lost = {key for key, power in result.exponents.items() if power is None}
        out = [name for name in chosen if any(trials[name].exponents.get(key, 0) != 0 for key in lost)]
        if not out:
            break
        reasons.update(dict.fromkeys(out, NO_POWER))
        chosen = [name for name in chosen if name not in out]
    if not result.problem:
        return result.exponents
    # the remaining cause is unknown state: keep as many as work together, in order
    kept: list[str] = []
    exponents: Exponents = {}
    for name in chosen:
        result = doubling.together([candidates[other] for other in (*kept, name)])
        if result.problem:
            reasons[name] = result.problem
        else:
            kept.append(name)
            exponents = result.exponents
    return exponents
