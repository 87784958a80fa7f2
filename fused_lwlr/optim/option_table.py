"""The table of options: which values each may have, and where it belongs.

The constructors, `add_param_group`, `load_state_dict`, `layers=` and the documentation read it.
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fused_lwlr.backends import Backend
from fused_lwlr.kernels.tensors import HALF
from fused_lwlr.rescaling import ScaleInvariant
from fused_lwlr.scaling import Scaling

Nonfinite = Literal["propagate", "skip", "raise"]


class Option(NamedTuple):
    """A row of the table.

    Attributes:
        scope: "group" for an option of param groups; "shared" for an option of the constructor that is the same for all
            param groups; "flag" for a flag of torch; "layer" for an option of layers alone.
        must_be: the allowed values, for messages.
        allows: whether a value is allowed.
    """

    scope: Literal["group", "shared", "flag", "layer"]
    must_be: str
    allows: Callable[[Any], bool]


def number_of(value: Any) -> float | None:
    """Returns a real number or a tensor of one element as a float; None for anything else."""
    if type(value) is float:
        # the common case, in every step whose lr changed
        return value
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def shown(value: Any) -> str:
    """Returns a value as messages show it."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of {tuple(value.shape)}"
    # one line, also of a model or a list of tensors
    return f"{' '.join(repr(value).split()):.80}"


def _number(least: float, below: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: (number := number_of(value)) is not None and least <= number < below


def _betas(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_number(0, 1), value))


def _switch(value: Any) -> bool:
    return isinstance(value, bool)


def _torch_switch(value: Any) -> bool:
    # torch takes 0 and 1 too
    return isinstance(value, int) and value in (0, 1)


def _one_of(*values: Any) -> tuple[str, Callable[[Any], bool]]:
    text = f"one of {', '.join(map(repr, values))}"
    return text, lambda value: isinstance(value, str) and value in values


NOT_NEGATIVE = "a finite number, at least 0"
TRUE_OR_FALSE = "True or False"

OPTIONS: dict[str, Option] = {
    # schedulers that end at 0 miss it by rounding: LinearLR leaves -1e-17
    "lr": Option("group", NOT_NEGATIVE, _number(-1e-12)),
    "momentum": Option("group", NOT_NEGATIVE, _number(0)),
    "dampening": Option("group", "a finite number", _number(-math.inf)),
    "weight_decay": Option("group", NOT_NEGATIVE, _number(0)),
    "eps": Option("group", NOT_NEGATIVE, _number(0)),
    "betas": Option("group", "two numbers, at least 0 and below 1", _betas),
    "nesterov": Option("group", TRUE_OR_FALSE, _torch_switch),
    "maximize": Option("group", TRUE_OR_FALSE, _torch_switch),
    "amsgrad": Option("group", TRUE_OR_FALSE, _torch_switch),
    "ema": Option(
        "group", "a number, at least 0 and below 1, such as 0.999, or None for no average of the weights",
        lambda value: value is None or (not isinstance(value, Tensor) and _number(0, 1)(value)),
    ),
    "layers": Option("group", "a mapping from names or patterns to options, or a list of mappings", lambda _: True),
    "corrected_decay": Option("layer", TRUE_OR_FALSE, _switch),
    "scaling": Option(
        "shared", "a scaling such as fused_lwlr.ELR(goal=0.01), or None",
        lambda value: value is None or isinstance(value, Scaling),
    ),
    "clip_global_norm": Option(
        "shared", "a finite number above 0, or None",
        lambda value: value is None or (_number(0)(value) and not isinstance(value, Tensor) and value > 0),
    ),
    "nonfinite": Option("shared", *_one_of(*get_args(Nonfinite))),
    "cautious_decay": Option("shared", TRUE_OR_FALSE, _switch),
    "master_weights": Option("shared", TRUE_OR_FALSE, _switch),
    "stochastic_rounding": Option("shared", TRUE_OR_FALSE, _switch),
    "rounding_seed": Option(
        "shared", "an int from 0 to 2³¹ − 1", lambda value: type(value) is int and 0 <= value < 1 << 31
    ),
    "state_dtype": Option(
        "shared", "torch.float32, torch.bfloat16, torch.float16, or None for the dtype of each parameter",
        lambda value: value in (None, torch.float32, *HALF),
    ),
    "rescale_weights": Option(
        "shared",
        "False or the result of fused_lwlr.scale_invariant(model, batch, loss_fn), which measures which layers are "
        "scale-invariant",
        lambda value: value is False or isinstance(value, ScaleInvariant),
    ),
    "lr_in_momentum": Option("shared", TRUE_OR_FALSE, _switch),
    "backend": Option("shared", *_one_of(*get_args(Backend))),
    "foreach": Option("flag", "None: the step is one launch for all tensors already", lambda value: not value),
    "differentiable": Option(
        "flag", "False: the step is not differentiable; use torch.optim for that", lambda value: not value
    ),
    "decoupled_weight_decay": Option(
        "flag", "True: AdamW decays weights apart from the gradient", lambda value: value is not False
    ),
    "fused": Option("flag", "True, False or None", lambda value: value is None or _torch_switch(value)),
    "capturable": Option("flag", TRUE_OR_FALSE, _torch_switch),
}  # fmt: skip


def names_of(scope: str) -> tuple[str, ...]:
    """Returns the names of the options with a scope."""
    return tuple(name for name, option in OPTIONS.items() if option.scope == scope)


def check_option(name: str, value: Any, where: str = "") -> None:
    """Raises ValueError unless an option has a value that the table allows.

    For the message, `where` is the param group, state dict or layer that has it; "" for an argument.
    """
    if not OPTIONS[name].allows(value):
        what = f"{name!r} of {where} must be" if where else f"{name}={shown(value)} must be"
        hint = f": write {value.__name__}(...)" if isinstance(value, type) else ""
        raise ValueError(f"{what} {OPTIONS[name].must_be}" + (f", not {shown(value)}" if where else "") + hint)
