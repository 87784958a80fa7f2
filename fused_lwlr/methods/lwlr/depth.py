"""Multipliers by depth alone: baselines for LWLR, and rates for fine-tuning."""

import math
from collections.abc import Iterable, Sequence

from torch import nn

from fused_lwlr.methods.checks import check_types, listed, number
from fused_lwlr.optim.option_table import number_of, shown
from fused_lwlr.patterns import find

Blocks = str | Sequence[str] | None
"""The name of a list of blocks, or the names of blocks; None for the list that holds nearly all parameters."""
TRUNK = 0.8
"""The part of all parameters that a list of blocks must hold to be found."""


def depth_increasing(model: nn.Module, low: float = 0.1, high: float = 1.0) -> dict[str, float]:
    """Rates that rise linearly with depth, scaled to a mean of 1 over parameters.

        η̃_i = low + (high − low) · i / (n − 1)        η_i = η̃_i · Σm / Σ(m η̃)

    for the n tensors of m_i elements each, in the order of the model (Initializing the Layer-wise Learning Rate,
    Figure 1, left).

    Args:
        model: its trainable parameters are counted; frozen ones get 1.
        low, high: the rates of the first and the last tensor, before they are scaled.

    Returns:
        Parameter name -> η, for `layers=` of an optimizer.

    Raises:
        ValueError: a bound that is negative, both 0, or a model without trainable parameters.
        TypeError: the model is no module.
    """
    return _linear(model, low, high)


def depth_decreasing(model: nn.Module, high: float = 2.0, low: float = 1.0) -> dict[str, float]:
    """Rates that fall linearly with depth, from 2 to 1 by default, scaled to a mean of 1 over parameters.

    Args:
        model, high, low: as in `depth_increasing`; `high` is the rate of the first tensor.

    Returns:
        As `depth_increasing`.

    Raises:
        ValueError: as in `depth_increasing`.
    """
    return _linear(model, high, low)


def layer_decay(
    model: nn.Module, decay: float, *, blocks: Blocks = None, frozen: Iterable[str] = ()
) -> dict[str, float]:
    """Rates for fine-tuning that fall by a factor from each block to the one before it.

        η = decay^(n + 1 − k)

    with k = 0 for parameters before the n blocks, k = 1 ... n in the blocks and n + 1 after them, such as in the
    head (as in BEiT: BERT Pre-Training of Image Transformers).

    Args:
        model: its parameters are in the order of depth.
        decay: the factor, above 0 and at most 1; 1 for no decay.
        blocks: the name of a `Sequential` or `ModuleList` of blocks, or the names of the blocks themselves in order
            ("layer1", "layer2", ... of a ResNet). When None, it is the list that holds nearly all parameters.
        frozen: names of parameters, or patterns with `*` and `?`, that get 0. Their weights do not change in a
            single bit, although gradients are computed, as long as these are finite.

    Returns:
        Parameter name -> η, for `layers=` of an optimizer.

    Raises:
        ValueError: a decay out of range, blocks that are not in the model or that cannot be found, or a pattern that
            matches no parameter.
        TypeError: the model is no module.
    """
    check_types(model)
    decay = number("decay", decay, "above 0 and at most 1", lambda found: 0 < found <= 1)
    names = blocks_of(model, blocks)
    found, depth = {}, 0
    for name, _ in model.named_parameters():
        inside = [k for k, block in enumerate(names, 1) if name.startswith(f"{block}.")]
        # after a block comes the next one, or the head
        depth = inside[0] if inside else len(names) + 1 if depth else 0
        found[name] = decay ** (len(names) + 1 - depth)
    for pattern in listed("frozen", frozen):
        found |= dict.fromkeys(find(pattern, found, "frozen=", "parameter of the model"), 0.0)
    return found


def _linear(model: nn.Module, first: float, last: float) -> dict[str, float]:
    check_types(model)
    ends = [number_of(first), number_of(last)]
    if not (all(end is not None and end >= 0 for end in ends) and 0 < first + last < math.inf):
        raise ValueError(f"{shown(first)} and {shown(last)}: bounds must be finite and not negative, nor both 0")
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not trained:
        raise ValueError("the model has no trainable parameters: set their requires_grad")
    steps = max(len(trained) - 1, 1)
    raw = {name: first + (last - first) * i / steps for i, (name, _) in enumerate(trained)}
    total = sum(raw[name] * param.numel() for name, param in trained)
    if not total:
        raise ValueError(f"{first} and {last}: every trainable tensor would have a rate of 0")
    scale = sum(param.numel() for _, param in trained) / total
    return {name: raw[name] * scale if name in raw else 1.0 for name, _ in model.named_parameters()}


def blocks_of(model: nn.Module, wanted: Blocks) -> list[str]:
    """Returns the names of the blocks, in order."""
    modules = dict(model.named_modules())
    if wanted is None:
        wanted = _trunk(model)
    if not isinstance(wanted, str):
        names = listed("blocks", wanted)
        if not names:
            raise ValueError(f"blocks={wanted!r} must have the name of a block, or be None")
    elif isinstance(modules.get(wanted), (nn.Sequential, nn.ModuleList)):
        names = [f"{wanted}.{child}" if wanted else child for child, _ in modules[wanted].named_children()]
    else:
        raise ValueError(f"blocks={wanted!r} is not a Sequential or ModuleList of the model")
    for name in names:
        if name not in modules:
            raise ValueError(
                f"blocks= has {name!r}, but the model has no such module: use names of model.named_modules()"
            )
    return names


def _trunk(model: nn.Module) -> str:
    """The innermost list of blocks that holds nearly all parameters."""
    total = sum(param.numel() for param in model.parameters())
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Sequential, nn.ModuleList))
        and len(module) >= 2
        and sum(param.numel() for param in module.parameters()) >= TRUNK * total
    ]
    if not found:
        raise ValueError(
            f"no Sequential or ModuleList holds {TRUNK:.0%} of the model: give the names of blocks, "
            'blocks=("layer1", "layer2", "layer3", "layer4")'
        )
    return found[-1]
