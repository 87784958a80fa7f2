"""The type of an update rule. A new rule is one file with one `Rule`; `lion.py` is the shortest example.

A rule has a PyTorch reference, which defines it, and two functions for Triton, `update` and `coefficients`. These are
plain Python functions, so that importing a rule does not import Triton. They are written in operators and the names of
`fused_lwlr.kernels.formula`, and Triton compiles their source at the first step. A rule whose reference needs no
particular rounding can call `update` from its reference, and is then written once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fused_lwlr.kernels.control import Place
from fused_lwlr.kernels.formula import where

Number = float | Tensor
"""A number, or a tensor of one element, float32 or float64, that is read when the step runs."""


def decay_of(hyper: Any) -> Any:
    """Returns the weight decay of a hyper row, a number or a tensor."""
    factor = hyper.decay_factor
    return hyper.weight_decay * (factor if factor >= 0 else -factor * hyper.lr)


def _constant(hyper: Any, taken: Any) -> tuple[Any, Any]:
    return 0.0, 0.0


def _constant_coefficients(options, taken):  # type: ignore[no-untyped-def]
    return taken * 0, taken * 0


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule.

    Attributes:
        name: the name in `LEAST_RESIDENT`.
        hyper: the type of a hyper row, a NamedTuple of `lr`, and then at least `weight_decay`, `maximize`, `ema` and
            `decay_factor`.
        hyper_of: (options, bias_correction) -> hyper row of a param group with these options, without the average.
        states: the names of the state columns, at most three.
        offers: the places at which a `Scale` can act.
        adaptive: whether the length of the gradient does not change the length of the step.
        applies_decay: whether `update` applies weight decay; if not, it is taken from the weight.
        cautious: the same rule with cautious decay, if there is one.
        is_cautious: whether this is one of those.
        counts_steps: whether every parameter has a step count, on the host too.
        corrects_bias: whether `hyper` has a `bias_correction`.
        idle: a hyper row that changes neither the weight nor the state, if weights can be rescaled with this rule.
        numbers: (hyper) -> the rule's own numbers, which `option` reads.
        scheduled: (hyper, taken) -> c1 and c2, the numbers that depend on the number of steps taken, if there are any.
            `taken` is a number or a NumPy array; 0 or 1 if the rule does not count steps.
        reference: (control, hyper, w, g, states, taken) -> new w and states. `w` and `states` may be changed in
            place. `g` is the gradient, negated if `hyper.maximize`; `taken` is a tensor where the device counts steps.
            It passes g through `control.decayed`, and multiplies the direction by `control.direction`.
        update: (w, g, x, y, z, has_x, has_z, scale, c1, c2, weight_decay, options) -> direction and new x, y and z, for
            Triton. `weight_decay` is 0 unless the rule applies it.
        coefficients: (options, taken) -> c1 and c2 in single precision, for Triton.
    """

    name: str
    hyper: Any
    hyper_of: Callable[[Mapping[str, Any], bool], Any]
    states: tuple[str, ...]
    offers: tuple[Place, ...]
    numbers: Callable[[Any], tuple[float, ...]]
    reference: Callable[..., tuple[Tensor, Sequence[Tensor | None]]]
    update: Callable[..., Any]
    scheduled: Callable[[Any, Any], tuple[Any, Any]] = _constant
    coefficients: Callable[..., Any] = _constant_coefficients
    adaptive: bool = False
    applies_decay: bool = False
    counts_steps: bool = False
    corrects_bias: bool = False
    idle: Any = None
    cautious: "Rule | None" = None
    is_cautious: bool = False


def with_cautious(
    rule: Rule, reference: Callable[..., tuple[Tensor, Sequence[Tensor | None]]], update: Callable[..., Any]
) -> Rule:
    """Returns a rule that has a cautious one, with a reference and an update of its own."""
    return replace(
        rule, cautious=replace(rule, reference=reference, update=update, applies_decay=True, is_cautious=True)
    )


def cautious(d, w, weight_decay):  # type: ignore[no-untyped-def]
    """A direction with weight decay, save for elements that the decay would move against it."""
    return where((d * w < 0) | (weight_decay == 0), d, d + weight_decay * w)
