"""Multipliers of the maximal update parametrization."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from torch import nn

from fused_lwlr.measure.layers import fan_dims, is_conv1d
from fused_lwlr.methods.checks import check_choice, check_types, positive

Rule = Literal["sgd", "adamw"]
Decay = bool | Literal["sqrt"]
Matrix = tuple[int, int, int]


def mup(
    model: nn.Module, base: nn.Module, rule: Rule, *, decay: Decay = False, eps: float | None = None
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

    (CompleteP, arXiv 2505.01618, Table 1, at equal depth.) `decay="sqrt"` multiplies weight decay by

        √(fan_in / base fan_in) of matrices        0 of vectors

    which keeps the largest singular value of a matrix independent of the width late in the training, when AdamW has
    brought it near √(η / λ) · width^0.75 (Robust Layerwise Scaling Rules by Proper Weight Decay Tuning, arXiv
    2510.15262). As in Tensor Programs V, a matrix is a weight whose fan_in and fan_out both differ from the base's; all
    else is a vector: embeddings, scales, biases, input and output weights.

    Args:
        model: the model to train.
        base: the same model with the widths at which the learning rate was tuned. With `decay="sqrt"` it must have
            other widths than the models that are tuned and trained, which both get the same base.
        rule: "sgd" or "adamw".
        decay: whether weight decay is multiplied too, by fan_in / base fan_in or by "sqrt", for AdamW.
        eps: ε of the base, if it should follow the width, for AdamW.

    Returns:
        Parameter name -> η, or options with `decay` or `eps`, for `layers=` of an optimizer; all 1 if `model` has the
        width of `base`.

    Raises:
        ValueError: `rule` or `decay` is unknown, `decay` or `eps` is given for SGD, ε is not above 0, the base has
            other parameters or numbers of dimensions, a weight is parametrized, or `decay="sqrt"` finds no matrix, as
            with a base of the same width.
        TypeError: the model or the base is no module.
    """
    check_types(model)
    check_types(base, name="base")
    check_choice("rule", rule, get_args(Rule))
    check_choice("decay", decay, (False, True, "sqrt"))
    if rule == "sgd" and (decay or eps is not None):
        raise ValueError("decay= and eps= are for AdamW: leave them out for rule='sgd'")
    eps = None if eps is None else positive("eps", eps)
    names, based = ({name: name for name, _ in each.named_parameters()} for each in (model, base))
    if other := sorted(names.keys() ^ based.keys()):
        raise ValueError(f"base= must have the parameters of the model, but {other[0]!r} is in only one of them")
    found: dict[str, Any] = {}
    for name, fan_in, fan_out in growth(model, base, names):
        eta = (fan_out if rule == "sgd" else 1.0) / fan_in
        options = {"lr": eta}
        if decay == "sqrt":
            options["weight_decay"] = fan_in**0.5 if fan_in != 1 and fan_out != 1 else 0.0
        elif decay:
            options["weight_decay"] = fan_in
        if eps is not None:
            options["eps"] = eps / fan_out
        found[name] = options if len(options) > 1 else eta
    if decay == "sqrt" and not any(options["weight_decay"] for options in found.values()):
        raise ValueError(
            "decay='sqrt' finds no matrix, a weight whose fan_in and fan_out both differ from the base's: give a base= "
            "of another width, the same one for tuning and training"
        )
    return found


def growth(model: nn.Module, base: nn.Module, twins: Mapping[str, str]) -> Iterator[tuple[str, float, float]]:
    """Yields the names of parameters with the ratios of their fan_in and fan_out to the base's.

    Args:
        twins: name of each parameter -> name of the parameter of the base that it is compared with.
    """
    params, based = dict(model.named_parameters()), dict(base.named_parameters())
    matrices, small = _matrices_of(model), _matrices_of(base)
    for name, twin in twins.items():
        shape, based_shape = tuple(params[name].shape), tuple(based[twin].shape)
        if len(shape) != len(based_shape):
            raise ValueError(f"base= has {name!r} of shape {based_shape}, the model of {shape}: only widths may differ")
        ratios = [size / divisor if divisor else 1.0 for size, divisor in zip(shape, based_shape, strict=True)]
        if name in matrices:
            fan_in, fan_out, groups = matrices[name]
            more = groups / (small[twin][2] if twin in small else 1)
            yield name, ratios[fan_in] / more, ratios[fan_out] * more
        else:
            yield name, 1.0, max(ratios, default=1.0, key=lambda ratio: abs(ratio - 1))


def _matrices_of(model: nn.Module) -> dict[str, Matrix]:
    """Returns the weights of linear and convolution layers, which dimensions are their inputs and outputs, and groups.

    Groups count for transposed convolutions alone: a weight has all inputs and the outputs of one group there, and the
    inputs of one group and all outputs in other convolutions.
    """
    found: dict[str, Matrix] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        names: tuple[str, ...] = ()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or is_conv1d(module):
            groups = module.groups if isinstance(module, nn.modules.conv._ConvTransposeNd) else 1
            names, matrix = ("weight",), (*fan_dims(module), groups)
        elif isinstance(module, nn.MultiheadAttention):
            names, matrix = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), (1, 0, 1)
        for name in names:
            if name not in module._parameters:
                raise ValueError(
                    f"{dot}{name} is computed from other parameters (by a parametrization?), whose rates do not follow "
                    "from their widths: give models with plain weights"
                )
            found[f"{dot}{name}"] = matrix
    return found
