"""Algorithm 1: measure every layer's mean gradient magnitude, and turn it into learning-rate multipliers."""

from collections.abc import Callable, Iterable, Sized
from contextlib import nullcontext
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fused_lwlr.backends import Backend
from fused_lwlr.measure.layers import layers_of
from fused_lwlr.measure.statistics import StatisticsPass
from fused_lwlr.methods.checks import check_count, check_types, listed, require
from fused_lwlr.methods.lwlr.init import kinds_of, lwlr_init_
from fused_lwlr.methods.lwlr.rates import LayerRates
from fused_lwlr.methods.minibatches import loss_of
from fused_lwlr.methods.progress import with_progress
from fused_lwlr.methods.restoring import as_it_was
from fused_lwlr.patterns import find, with_parameters


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    steps: int | None = None,
    accumulate: int = 1,
    init: bool = True,
    exclude: Iterable[str] = (),
    progress: bool = False,
    backend: Backend = "auto",
) -> LayerRates:
    """Returns layer-wise learning-rate multipliers from gradient magnitudes at initialization.

        G_i = Σ_t (1/m_i) Σ |∂L(X_t)/∂W_i|        η̃_i = 1/√G_i        η_i = η̃_i · Σm / Σ(m_j η̃_j)

    Layer i has m_i parameters; the first sum runs over minibatches t (Initializing the Layer-wise Learning Rate,
    Algorithm 1). Every parameter is a layer. Query, key and value of a fused projection are three layers.

    The model is in training mode while gradients are computed, and without autocast around this call if its parameters
    are in single or double precision. `torch.no_grad()` and `torch.inference_mode()` around it do not count.
    Afterwards, also if it raises, weights, buffers, `.grad`, training modes and random number generators are restored.

    Args:
        model: the model to measure. It runs on the device of its parameters.
        batches: minibatches, which are moved to the model's device. A pair (inputs, targets) has the loss
            `loss_fn(model(inputs), targets)`. A mapping has the loss `loss_fn(model(**batch), batch)`; its entries
            "label", "labels", "target" and "targets" go to the model only if its `forward` accepts them. An integer
            tensor of token ids, alone or in a list, has the loss `loss_fn(model(ids), ids)`.
        loss_fn: returns the mean loss over the minibatch, a scalar.
        steps: T, the number of minibatches. If None, all of them are used. The rates from one minibatch differ from
            the rates from an epoch by some percent.
        accumulate: the number of `batches` whose mean gradient counts as the gradient of one minibatch. Use it if a
            minibatch does not fit in memory.
        init: whether to initialize the weights with `lwlr_init_` first, as the paper does. If False, the weights
            do not change.
        exclude: names of layers or parameters, or patterns of names with `*` and `?`, that get η = 1 and do not count
            in the normalization, see `LayerRates.exclude`. By default none, as in Algorithm 1. Exclude class token and
            position embedding of a ViT where these start at zero: `exclude=("cls_token", "pos_embed")`.
        progress: show a progress bar (needs rich).
        backend: the backend of the reduction: "auto", "triton" or "torch".

    Returns:
        The multiplier of each layer, float64, with a mean of 1 over all parameters that are measured.

    Raises:
        ValueError: a pattern of `exclude` matches no layer, or the patterns match all; there are too few minibatches,
            the loss is not a scalar, a gradient is not finite, or `lwlr_init_` cannot initialize the model.
        TypeError: `model` is no module, `batches` cannot be iterated over, or `loss_fn` is no function.
    """
    check_types(model, batches)
    require(isinstance(init, bool), "init", init, "True or False")
    if steps is not None:
        check_count("steps", steps)
    check_count("accumulate", accumulate)
    layers = layers_of(model)
    if not any(layer.param.requires_grad for layer in layers):
        raise ValueError("model has no parameter that requires a gradient: set requires_grad of its parameters")
    patterns = listed("exclude", exclude)
    names = with_parameters(layer.name for layer in layers)
    for pattern in patterns:
        find(pattern, names, "exclude=", "layer of the model")  # before minutes are spent
    device = layers[0].param.device
    reduction = StatisticsPass(layers, backend)
    taken = 0
    # rounding noise of half precision cannot be told from a gradient
    exact = all(layer.param.dtype in (torch.float32, torch.float64) for layer in layers)
    with (
        as_it_was(model),
        as_it_was(loss_fn),
        torch.autocast(device.type, enabled=False) if exact else nullcontext(),
    ):
        # optimizers step a complex number as two real ones
        sizes = [layer.numel * (2 if layer.param.is_complex() else 1) for layer in layers]
        numel = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        # G and the non-finite elements of each layer, and how many minibatches gave it a gradient
        totals = torch.zeros(3, len(layers), dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        weight = 1 / numel.to(totals.device).clamp(min=1)
        if init:
            lwlr_init_(model)
        model.train()
        total = steps if steps is not None or not isinstance(batches, Sized) else len(batches) // accumulate
        source = iter(batches)
        for _ in with_progress(islice(repeat(None), steps), total, "calibrating", progress):
            model.zero_grad(set_to_none=True)
            parts = 0
            # one at a time: all of them may not fit in memory
            for batch in islice(source, accumulate):
                (loss_of(model, batch, loss_fn, device) / accumulate).backward()
                parts += 1
            if parts < accumulate:
                # the batches have ended
                break
            statistics = reduction()
            index = reduction.index.to(totals.device)
            totals[0, index] += statistics.abs_sum.to(totals) * weight[index]
            totals[1, index] += statistics.nonfinite.to(totals)
            totals[2, index] += 1
            taken += 1
    if taken == 0 or (steps is not None and taken < steps):
        wanted = "one at least is needed" if steps is None else f"steps={steps} were asked for"
        raise ValueError(f"batches ended after {taken} minibatches, but {wanted}: pass more minibatches")
    gradient, nonfinite, seen = totals.cpu().numpy()
    bad = [layer.name for layer, count in zip(layers, nonfinite, strict=True) if count]
    if bad:
        raise ValueError(f"the gradient of {', '.join(map(repr, bad[:5]))} is not finite: check the loss and the data")
    kinds, name_of = kinds_of(model), {id(param): name for name, param in model.named_parameters()}
    rates = LayerRates.from_gradients(
        [layer.name for layer in layers],
        sizes,
        np.where(seen > 0, gradient, np.nan).tolist(),
        [kinds[name_of[id(layer.param)]] or "other" for layer in layers],
        taken,
    )
    return rates.exclude(*patterns) if patterns else rates
