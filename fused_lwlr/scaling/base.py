"""What a scaling is: a formula over norms, the place of its factor, and the layers that it acts on.

A new one needs a new class and nothing else:

    @dataclass(frozen=True)
    class Fixed(Scaling):
        length: float
        places = ("gradient",)

        @staticmethod
        def formula(norm, weight_norm, lr, weight_decay, length):
            return where(norm > 0, length / where(norm > 0, norm, 1.0), 1.0)

The formula is written once, in operators and in `where`, `minimum` and `maximum` of `fused_lwlr.kernels.formula`:
the reference runs it, and Triton compiles the same source into the step.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal

from torch import Tensor

from fused_lwlr.kernels import Balance, Rule, Scale
from fused_lwlr.kernels.control import Place
from fused_lwlr.patterns import find, matches, split_patterns

Selector = Callable[[str, Tensor], bool] | str | Iterable[str]


def weights(name: str, param: Tensor) -> bool:
    """Weights of convolutions, linear layers and embeddings: whatever has two dimensions or more."""
    return param.dim() >= 2


def everything(name: str, param: Tensor) -> bool:
    """Every parameter."""
    return True


@dataclass(frozen=True)
class Scaling:
    """One factor for each layer.

    Attributes:
        select: the parameters it acts on: a predicate of name and parameter, or one or more names and patterns of
            names with `*` and `?`. Those that start with `!` leave out what they match: from what the others select,
            or, without others, from the default of the class.
        places: what the factor may multiply, in order of preference, see `place` and `fused_lwlr.kernels.Scale`.
        formula: (norm, weight_norm, lr, weight_decay, *numbers) -> factor. `norm` is ‖g‖ of the clipped gradient, or
            ‖d‖ of the direction, by the place; `weight_norm` is ‖w‖ before the step; lr includes the layer's
            multiplier; weight_decay is that of its group.
        bias_correction: whether the rule corrects its moments for their start at 0.
        uses_lr: whether the formula may depend on lr. SGD's `lr_in_momentum=True` refuses those that do.
        measures: whether a step measures the norms of the gradients; False if the factors come from the norms of the
            weights before the step alone.
        retract: "sphere" if each layer keeps its initial norm, see `Hyperball`. `weight_norm` is then this norm, and
            the factor acts on the direction.

    Raises:
        ValueError: `select` is neither a name, names and patterns, nor a predicate.
    """

    select: Selector = field(default=weights, kw_only=True)

    places: ClassVar[tuple[Place, ...]]
    formula: ClassVar[Callable[..., Tensor]]
    bias_correction: ClassVar[bool] = True
    uses_lr: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    retract: ClassVar[Literal["none", "sphere"]] = "none"

    @property
    def numbers(self) -> tuple[float, ...]:
        """What the formula takes last: the fields in order, save for the selector."""
        cls: Any = type(self)
        return tuple([float(getattr(self, name)) for name in _number_names(cls)])

    def place(self, rule: Rule) -> Place:
        """Returns where the factor acts with a rule: the first of `places` that the rule offers.

        With an adaptive rule, for which the length of the gradient does not matter, or with spheres, it is the
        direction if that is one of them.

        Args:
            rule: the update rule of an optimizer.

        Raises:
            ValueError: the rule offers none of them.
        """
        if (rule.adaptive or self.on_spheres) and "direction" in self.places:
            return "direction"
        for place in self.places:
            if place in rule.offers:
                return place
        raise ValueError(f"{type(self).__name__} acts at {self.places}, but {rule.name} offers {rule.offers}")

    def scale(self, rule: Rule) -> Scale | Balance:
        """Returns the formula, its place and its numbers, as a backend takes them.

        Args:
            rule: the update rule of an optimizer.

        Raises:
            ValueError: more than four numbers, or a rule that offers none of the places.
        """
        numbers = self.numbers
        if len(numbers) > 4:
            raise ValueError(f"{type(self).__name__} has {len(numbers)} numbers: a formula takes at most four")
        return Scale(type(self).formula, self.place(rule), numbers, self.on_spheres)

    @property
    def on_spheres(self) -> bool:
        """Whether each layer keeps the norm that it starts with."""
        return self.retract == "sphere"

    def selects(self, name: str | None, param: Tensor) -> bool:
        """Returns whether this acts on a parameter.

        Args:
            name: the name of the parameter or of the slice; None if it has no name.
            param: the parameter, of any shape and dtype.
        """
        if callable(self.select):
            return bool(self.select(name or "", param))
        if name is None:
            return False
        chosen, left_out = split_patterns(self._patterns)
        if matches(name, left_out):
            return False
        if left_out and not chosen:
            return Scaling(select=type(self).select).selects(name, param)
        return matches(name, chosen)

    def check(self, names: Iterable[str] | None) -> None:
        """Check that the selector fits the parameters of an optimizer.

        Args:
            names: the names of the parameters; None if they have none.

        Raises:
            ValueError: a selector by names without names, or a pattern that fits none of them.
        """
        if callable(self.select):
            return
        if names is None:
            raise ValueError(
                f"{type(self).__name__}(select=...) goes by names, but the parameters were given without: "
                "pass model.named_parameters(), or groups of named parameters"
            )
        chosen, left_out = split_patterns(self._patterns)
        argument = f"{type(self).__name__}(select=...)"
        known = set(names)
        for pattern in (*chosen, *left_out):
            find(pattern, known, argument, "parameter of this optimizer")

    @property
    def _patterns(self) -> list[str]:
        return [self.select] if isinstance(self.select, str) else list(self.select)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if not (callable(self.select) or isinstance(self.select, str)):
            # patterns may be an iterator, which can be read only once
            object.__setattr__(self, "select", tuple(self.select))
            if not all(isinstance(pattern, str) for pattern in self.select):
                raise ValueError(f"select={self.select!r} must be a predicate, a name, or names and patterns")


@cache
def _number_names(cls: Any) -> tuple[str, ...]:
    """The fields of a scaling that its formula takes."""
    return tuple(f.name for f in fields(cls) if f.name not in ("select", "retract"))


def require(scaling: Scaling, *, positive: Iterable[str] = (), not_negative: Iterable[str] = ()) -> None:
    """Raise ValueError unless these fields are finite numbers, above zero or at least zero."""
    for names, least in ((positive, "above 0"), (not_negative, "0 or above")):
        for name in names:
            value = getattr(scaling, name)
            if not (math.isfinite(value) and (value > 0 or (value == 0 and least[0] == "0"))):
                raise ValueError(f"{type(scaling).__name__}({name}={value}): it must be finite and {least}")
