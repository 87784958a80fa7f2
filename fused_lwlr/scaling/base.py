"""The base class of scalings: a formula over statistics of a layer, a target of its factor, and a selector of layers.

docs/adding-a-scaling.md shows how to write one.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from fused_lwlr.kernels import FactorFormula, Retraction, Rule
from fused_lwlr.kernels.formula_check import check_formula
from fused_lwlr.kernels.step_arguments import DIRECTION_STATISTICS, FORMULA_STATISTICS, FactorTarget
from fused_lwlr.patterns import Selection, Selector, weights

FLOAT32 = torch.finfo(torch.float32)
Bound = tuple[str, Callable[[Any], bool]]
"""The numbers that a field may have: in words, and as a predicate."""
POSITIVE: Bound = "a finite number above 0", lambda value: 0 < value < math.inf
NOT_NEGATIVE: Bound = "a finite number, at least 0", lambda value: 0 <= value < math.inf
POSITIVE_OR_INFINITE: Bound = "a number above 0", lambda value: value > 0


@dataclass(frozen=True)
class Scaling:
    """One factor for each layer.

    Attributes:
        select: the parameters it acts on: a predicate of name and parameter, or one or more names and patterns of
            names with `*` and `?`. Patterns that start with `!` exclude their matches from the selection of the other
            patterns, or, without others, from the default of the class.
        targets: the quantities that the factor may multiply, in order of preference, see `target` and
            `fused_lwlr.kernels.FactorFormula`.
        formula: computes the factor from statistics of a layer and fields of the class. It takes the ones that its
            signature names, see `fused_lwlr.kernels.FactorFormula`.
        bias_correction: whether the rule corrects its moments for their start at 0.

    Raises:
        ValueError: `select` is neither a name, names and patterns, nor a predicate.
    """

    select: Selector = field(default=weights, kw_only=True)

    targets: ClassVar[tuple[FactorTarget, ...]] = ()
    formula: ClassVar[Callable[..., Tensor] | None] = None
    _bounds: ClassVar[tuple[tuple[str, Bound], ...]] = ()
    """The names of the fields that are checked, with their bounds."""
    # not annotated: as a field of this class, it would come before the fields of subclasses
    bias_correction = True

    def __init_subclass__(cls) -> None:
        for name in ("factor_formula", "retraction", "selection", "selects", "target"):
            if name in cls.__annotations__:
                raise ValueError(f"{cls.__name__} has a field {name!r}, the name of a method: give it another name")
        if "__repr__" not in vars(cls):
            # `dataclass` keeps it
            cls.__repr__ = Scaling.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Returns the call that makes it, with the fields that differ from their defaults."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        given = (f"{each.name}={value!r}" for each, value in values if each.default is MISSING or value != each.default)
        return f"{type(self).__name__}({', '.join(given)})"

    def target(self, rule: Rule) -> FactorTarget:
        """Returns the target of the factor with a rule: the first of `targets` that the rule has.

        With an adaptive rule, for which the length of the gradient does not matter, or with a retraction, it is the
        direction if the scaling allows it.

        Args:
            rule: the update rule of an optimizer.

        Raises:
            ValueError: the rule has none of them, or a retraction needs another one.
        """
        known = get_args(FactorTarget)
        if not (isinstance(self.targets, tuple) and self.targets and all(each in known for each in self.targets)):
            raise ValueError(
                f"{type(self).__name__}.targets={self.targets!r:.80} must be a tuple of {', '.join(map(repr, known))}"
            )
        if self.retraction is not None and "direction" not in self.targets:
            raise ValueError(
                f"{type(self).__name__} has a retraction, which needs the norm of the direction: set targets = "
                "('direction',)"
            )
        if (rule.adaptive or self.retraction is not None) and "direction" in self.targets:
            return "direction"
        for target in self.targets:
            if target in rule.factor_targets:
                return target
        raise ValueError(f"{type(self).__name__} acts on {self.targets}, but {rule.name} has {rule.factor_targets}")

    def factor_formula(self, rule: Rule) -> FactorFormula | None:
        """Returns the formula, its target and its constants, as a backend takes them; None if there is no formula.

        Args:
            rule: the update rule of an optimizer.

        Raises:
            ValueError: the rule has none of the targets, or the formula cannot be compiled or evaluated.
        """
        cls: Any = type(self)
        formula, target, name = cls.formula, self.target(rule), cls.__name__
        if not callable(formula):
            raise ValueError(f"{name}.formula={formula!r:.80} must be a function: define it as a static method")
        check_formula(formula, f"{name}.formula")
        arguments = FactorFormula(formula, target).arguments
        own_fields = [each.name for each in fields(cls) if each.name not in ("select", "bias_correction")]
        for own_field in own_fields:
            if own_field in FORMULA_STATISTICS:
                raise ValueError(f"{name} has a field {own_field!r}, the name of a statistic: give it another name")
        for argument in arguments:
            if argument in DIRECTION_STATISTICS and target != "direction":
                raise ValueError(
                    f"{name}.formula takes {argument!r}, but with {rule.name} its factor acts on the {target}: "
                    "set targets = ('direction',)"
                )
            if argument not in (*FORMULA_STATISTICS, *own_fields):
                raise ValueError(
                    f"{name}.formula takes {argument!r}, but its arguments must be fields of the class or among "
                    f"{', '.join(FORMULA_STATISTICS)}"
                )
        if not isinstance(self.bias_correction, bool):
            raise ValueError(
                f"{name}(bias_correction={self.bias_correction!r}) must be True or False: it says whether the rule "
                "corrects its moments; give a number of the formula another name"
            )
        constants = {own_field: self._number(own_field) for own_field in own_fields if own_field in arguments}
        return FactorFormula(formula, target, constants, self.retraction)

    def _number(self, name: str) -> float:
        value = getattr(self, name)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{type(self).__name__}({name}={value!r:.80}) must be a number: its formula takes it"
            ) from None
        least, most = FLOAT32.smallest_normal * FLOAT32.eps, FLOAT32.max
        if number and math.isfinite(number) and not least <= abs(number) <= most:
            raise ValueError(
                f"{type(self).__name__}({name}={value!r:.80}) is out of the range of float32, in which kernels compute"
            )
        return number

    @property
    def retraction(self) -> Retraction | None:
        """The control of norms after the step, or None.

        With one that is `fixed` each layer keeps its initial norm, see `Hyperball`. `weight_norm` is then this norm.
        """
        return None

    def selects(self, name: str | None, param: Tensor) -> bool:
        """Returns whether this acts on a parameter.

        Args:
            name: the name of the parameter or of the slice; None if it has no name.
            param: the parameter, of any shape and dtype.
        """
        return self.selection.selects(name, param)

    @cached_property
    def selection(self) -> Selection:
        """The parameters that `select` selects."""
        return Selection(self.select, type(self).select, type(self).__name__)

    def __post_init__(self) -> None:
        for name, (must_be, allows) in self._bounds:
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.numel() == 1:
                # steps would not see an edit of the tensor
                value = value.item()
                object.__setattr__(self, name, value)
            if not (isinstance(value, Real) and not isinstance(value, bool) and allows(value)):
                raise ValueError(f"{type(self).__name__}({name}={value!r}): it must be {must_be}")
        # a list could be edited, and an iterator be read only once
        if self.selection.patterns is not None and not isinstance(self.select, str):
            object.__setattr__(self, "select", self.selection.patterns)
