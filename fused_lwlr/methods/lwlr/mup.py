"""Multipliers of the maximal update parametrization."""

from typing import Any, Literal, get_args

from torch import Tensor, nn

from fused_lwlr.layers import fan_dims, is_conv1d

Rule = Literal["sgd", "adamw"]


def mup(
    model: nn.Module, base: nn.Module, rule: Rule, *, decay: bool = False, eps: float | None = None
) -> dict[str, Any]:
    """Learning-rate multipliers that keep the size of updates independent of the width (μP).

        SGD:    η = (fan_out / base fan_out) / (fan_in / base fan_in)
        Adam:   η = 1 / (fan_in / base fan_in)

    (Tensor Programs V, Table 3: SGD's rates of input weights, biases and scales grow with the width, its rates of
    output weights fall; Adam's rates of hidden and output weights fall.) Everything but the weights of linear and
    convolution layers counts as a bias, with a fan_in of 1. These are only the learning rates: draw weights with
    variance 1 / fan_in, and weights of the output layer with 1 / fan_in².

    With Adam the gradient of a weight shrinks with the width while ε does not, and η · λ of hidden weights shrinks.
    These options keep both constant:

        λ · fan_in / base fan_in        ε / (fan_out / base fan_out)

    (CompleteP, arXiv 2505.01618, Table 1, at equal depth.)

    Args:
        model: the model to train.
        base: the same model with the widths at which the learning rate was tuned.
        rule: "sgd" or "adamw".
        decay: whether weight decay is multiplied too, for AdamW.
        eps: ε of the base, if it should follow the width, for AdamW.

    Returns:
        Parameter name -> η, or options with `decay` or `eps`, for `layers=` of an optimizer; all 1 if `model` has the
        width of `base`.

    Raises:
        ValueError: `rule` is unknown, `decay` or `eps` is given for SGD, or the base has other parameters or
            numbers of dimensions.
    """
    if rule not in get_args(Rule):
        raise ValueError(f"rule={rule!r} is not one of {', '.join(map(repr, get_args(Rule)))}")
    if rule == "sgd" and (decay or eps is not None):
        raise ValueError("decay= and eps= are for AdamW: leave them out for rule='sgd'")
    params, based = dict(model.named_parameters()), dict(base.named_parameters())
    if params.keys() != based.keys():
        other = sorted(params.keys() ^ based.keys())[0]
        raise ValueError(f"base= must have the parameters of the model, but {other!r} is in only one of them")
    matrices = matrices_of(model)
    found: dict[str, Any] = {}
    for name, param in params.items():
        fan_in, fan_out = growth(name, param, based[name], matrices.get(name))
        eta = (fan_out if rule == "sgd" else 1.0) / fan_in
        options = {"lr": eta}
        if decay:
            options["weight_decay"] = fan_in
        if eps is not None:
            options["eps"] = eps / fan_out
        found[name] = options if len(options) > 1 else eta
    return found


def growth(name: str, param: Tensor, base: Tensor, matrix: tuple[int, int] | None) -> tuple[float, float]:
    """Returns the ratios of a parameter's fans to the base's.

    Args:
        matrix: which dimensions are inputs and outputs, for the weight of a linear or convolution layer.

    Raises:
        ValueError: the base has another number of dimensions.
    """
    if param.dim() != base.dim():
        raise ValueError(
            f"base= has {name!r} of shape {tuple(base.shape)}, the model of {tuple(param.shape)}: only widths may "
            "differ"
        )
    ratios = [size / small if small else 1.0 for size, small in zip(param.shape, base.shape, strict=True)]
    if matrix is not None:
        fan_in, fan_out = matrix
        return ratios[fan_in], ratios[fan_out]
    return 1.0, max(ratios, default=1.0, key=lambda ratio: abs(ratio - 1))


def matrices_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Returns the weights of linear and convolution layers, and which dimensions are their inputs and outputs."""
    found = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or is_conv1d(module):
            found[f"{dot}weight"] = fan_dims(module)
        elif isinstance(module, nn.MultiheadAttention):
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
            found |= {f"{dot}{name}": (1, 0) for name in names}
    return found
