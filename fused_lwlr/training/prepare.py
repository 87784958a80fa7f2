"""Layer-wise rates of a new model: a file of rates, and the layers that rates leave out."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from fused_lwlr import LayerRates
from fused_lwlr.layers import layers_of, split_name
from fused_lwlr.methods.lwlr.init import zero_tokens
from fused_lwlr.patterns import find
from fused_lwlr.training.recipe import Recipe


def rates_of_file(recipe: Recipe, model: nn.Module) -> LayerRates | None:
    """The layer-wise rates of the file that a recipe names, which must be for this model, or None."""
    path = recipe.rates
    if path in ("single", "layerwise"):
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--rates {path}: there is no such file; give one that calibrate wrote, single or layerwise"
        )
    try:
        found = LayerRates.from_json(path)
    except ValueError as error:
        raise ValueError(f"--rates {error}") from error
    names, own = {split_name(name)[0] for name in found}, {name for name, _ in model.named_parameters()}
    if names != own:
        lacks = f"that has no {min(names - own)}" if names - own else f"of whose layers it lacks {min(own - names)}"
        raise ValueError(f"--rates {path} is not for --model {recipe.model}, {lacks}: calibrate this model")
    return found


def excluded(patterns: Sequence[str] | None, model: nn.Module, name: str) -> tuple[str, ...]:
    """The layers that layer-wise rates leave out: layers that a pattern fits, or by default tokens that start at zero.

    Args:
        patterns: of `--rates-exclude`; None for class tokens and position embeddings that are zero.
        model: with the weights that training starts from, not sharded.
    """
    if patterns is None:
        return zero_tokens(model)
    layers = [layer.name for layer in layers_of(model)]
    known = dict.fromkeys([*layers, *(split_name(layer)[0] for layer in layers)])
    for pattern in patterns:
        find(pattern, known, "--rates-exclude", f"layer of {name}")
    return tuple(patterns)
