"""Multipliers of the maximal update parametrization."""

from typing import Literal, get_args

from torch import Tensor, nn

from fused_lwlr.layers import fan_dims, is_conv1d

Rule = Literal["sgd", "adamw"]


def mup(model: nn.Module, base: nn.Module, rule: Rule) -> dict[str, float]:
    """Learning-rate multipliers that keep updates at one size whatever the width (μP).

        SGD:    η = (fan_out / base fan_out) / (fan_in / base fan_in)
        Adam:   η = 1 / (fan_in / base fan_in)

    (Tensor Programs V, Table 3: SGD's rate of input weights, biases and scales goes with the width, that of output
    weights against it; Adam's of hidden and output weights goes against it.) Everything but the weights of linear and
    convolution layers counts as a bias, with a fan_in of 1. These are the learning rates only: draw weights with
    variance 1 / fan_in, and those of the output layer with 1 / fan_in².

    Args:
        model: the model to train.
        base: the same model with the widths at which the learning rate was tuned.
        rule: "sgd" or "adamw".

    Returns:
        Parameter name -> η, for `multipliers=` of an optimizer; all 1 where `model` is as wide as `base`.

    Raises:
        ValueError: another rule, or a base with other parameters, or other numbers of dimensions.
    """
    if rule not in get_args(Rule):
        raise ValueError(f"rule={rule!r} is not one of {', '.join(map(repr, get_args(Rule)))}")
    params, based = dict(model.named_parameters()), dict(base.named_parameters())
    if params.keys() != based.keys():
        other = sorted(params.keys() ^ based.keys())[0]
        raise ValueError(f"base= must have the parameters of the model, but {other!r} is in only one of them")
    matrices = _matrices(model)
    found = {}
    for name, param in params.items():
        if param.dim() != based[name].dim():
            raise ValueError(
                f"base= has {name!r} of shape {tuple(based[name].shape)}, the model of {tuple(param.shape)}: only "
                "widths may differ"
            )
        fan_in, fan_out = _growth(param, based[name], matrices.get(name))
        found[name] = (fan_out if rule == "sgd" else 1.0) / fan_in
    return found


def _growth(param: Tensor, base: Tensor, matrix: tuple[int, int] | None) -> tuple[float, float]:
    """By how much the fans of a parameter are larger than in the base."""
    ratios = [size / small if small else 1.0 for size, small in zip(param.shape, base.shape, strict=True)]
    if matrix is not None:
        fan_in, fan_out = matrix
        return ratios[fan_in], ratios[fan_out]
    return 1.0, max(ratios, default=1.0, key=lambda ratio: abs(ratio - 1))


def _matrices(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Weights of linear and convolution layers, and which dimensions are their inputs and outputs."""
    found = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or is_conv1d(module):
            found[f"{dot}weight"] = fan_dims(module)
        elif isinstance(module, nn.MultiheadAttention):
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
            found |= {f"{dot}{name}": (1, 0) for name in names}
    return found
