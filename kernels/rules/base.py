"""The type of an update rule. A new rule is one file with one `Rule`; `lion.py` is the shortest example.

A rule is two formulas, `update` and `coefficients`: plain Python functions in operators and the names of
`fused_lwlr.kernels.formula`. PyTorch runs them, and Triton compiles their source at the first step, so that importing a
rule does not import Triton.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fused_lwlr.kernels.formula import where
from fused_lwlr.kernels.step_arguments import FactorTarget

Number = float | Tensor
"""A number, or a tensor of one element, float32 or float64, that is read when the step runs."""
DecayMode = Literal["coupled", "decoupled", "cautious"]
States = Sequence[Tensor | None]


class Hyper(NamedTuple):
    """The hyper-parameters of some rows of a table, for every rule.

        g ← ± clip · s · g / grad_scale              (− with maximize)
        g ← s · (g + λ · w)                          coupled decay
        d ← the direction of the rule
        d ← d + λ · w, where d · w ≥ 0               cautious decay
        w ← (w · (1 − lr · η · s · λ) − lr · η · s · d) / Ŵᵖ      decoupled decay; otherwise λ = 0 in this line

    with λ = `applied_decay`. s is the factor of the scaling in the line of its target, and 1 in the other two lines.

    Attributes:
        lr: the learning rate.
        weight_decay: the weight decay, before its factor.
        maximize: whether the gradient is negated.
        ema: the decay of the moving average of the weight; unused without an average.
        decay_factor, decay_per_lr: λ = weight_decay · (decay_factor + decay_per_lr · lr).
        hyperparameters: the rule's own, see `Rule.hyperparameters`.
    """

    lr: Number
    weight_decay: Number = 0.0
    maximize: bool = False
    ema: float = 0.0
    decay_factor: float = 1.0
    decay_per_lr: float = 0.0
    hyperparameters: tuple[float, ...] = ()

    @property
    def applied_decay(self) -> Number:
        """The weight decay λ that the step applies."""
        factor = self.decay_factor + self.decay_per_lr * self.lr if self.decay_per_lr else self.decay_factor
        return self.weight_decay * factor


class Quotient(NamedTuple):
    """A direction numerator / correction / denominator, in parts: `torch.optim.Adam` applies them in one operation."""

    numerator: Tensor
    correction: float | Tensor
    denominator: Tensor


def _no_coefficients(hyperparameters, steps):  # type: ignore[no-untyped-def]
    # 0 in the type and shape of the steps
    return steps * 0, steps * 0


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule.

    Attributes:
        name: for messages.
        states: the names of the state columns.
        last_state_option: the option of a param group that switches the last state column on; None if all columns
            always exist.
        hyperparameters: (options) -> numbers for the formulas, always equally many. `options` are the options of a
            param group and a layer, and `bias_correction` of the scaling.
        update: (w, g, states, present, coefficients, hyperparameters) -> direction and new states. `states` and
            `present` have an element for each state column: its values (0 if a parameter has no such state), and
            whether it exists.
        coefficients: (hyperparameters, steps) -> two numbers that depend on the number of steps taken. Also runs on
            the host, where `steps` is a number or a NumPy array; 0 or 1 if the rule does not count steps.
        reference: (hyperparameters, w, g, states, steps) -> direction and new states in PyTorch, for rules whose
            `update` differs from `torch.optim` in bits. It may change states in place. None means missing state.
        adaptive: whether the length of the step does not depend on the length of the gradient.
        decay_mode: "coupled" adds weight decay to the gradient, "decoupled" to the step, and "cautious" to the step
            where it does not act against it.
        counts_steps: whether every parameter has a step count, on the host too.
        corrects_bias: whether the hyperparameters depend on `bias_correction`.
        rescale_only: the hyper row of a tensor that is only divided by Ŵᵖ; None if the rule does not rescale weights.
        least_resident: for the kernel without norms, the programs that must fit on a multiprocessor; None for the
            number of `fused_lwlr.kernels.constants.least_resident`.
    """

    name: str
    states: tuple[str, ...]
    hyperparameters: Callable[[Mapping[str, Any]], tuple[float, ...]]
    update: Callable[..., Any]
    last_state_option: str | None = None
    coefficients: Callable[..., Any] = _no_coefficients
    reference: Callable[..., tuple[Tensor | Quotient, States]] | None = None
    adaptive: bool = False
    decay_mode: DecayMode = "decoupled"
    counts_steps: bool = False
    corrects_bias: bool = False
    rescale_only: Hyper | None = None
    least_resident: int | None = None

    @property
    def factor_targets(self) -> tuple[FactorTarget, ...]:
        """The targets at which a `FactorFormula` can act."""
        return ("gradient", "decayed", "direction") if self.decay_mode == "coupled" else ("gradient", "direction")

    def state_columns(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the state columns that parameters have with these options of a param group."""
        if self.last_state_option is None or options.get(self.last_state_option):
            return self.states
        return self.states[:-1]


def cautious(d, w, weight_decay):  # type: ignore[no-untyped-def]
    """A direction with weight decay, except in elements where the decay would act against the direction."""
    return where((d * w < 0) | (weight_decay == 0), d, d + weight_decay * w)
