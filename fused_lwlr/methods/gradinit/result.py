"""Results of GradInit and MetaInit: the scales of the weights, and a record of every step."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fused_lwlr.methods.gradinit.rules import Branch
from fused_lwlr.warn import warn_user


@dataclass(frozen=True)
class GradInitStep:
    """One step of GradInit.

    Attributes:
        loss: L(S) before the step of the optimizer.
        loss_after: L(S̃) after the step of the optimizer. None on the constraint, which takes no such step.
        norm: the norm of the gradient on S: ℓ2 for SGD, ℓ1 for Adam.
        branch: "constraint" if the norm was above γ, else "objective".
    """

    loss: float
    loss_after: float | None
    norm: float
    branch: Branch


@dataclass(frozen=True)
class MetaInitStep:
    """One step of MetaInit: the loss, and the gradient quotient."""

    loss: float
    quotient: float


@dataclass(frozen=True)
class _Result:
    """Scales and a history. It unpacks into these two, as a tuple does."""

    scales: dict[str, float]
    history: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.scales, self.history))

    def __repr__(self) -> str:
        low, high = min(self.scales.values()), max(self.scales.values())
        scales, steps = f"{len(self.scales)} scales from {low:.3g} to {high:.3g}", f"{len(self.history)} steps"
        return f"{type(self).__name__}({scales}, {steps}, {self._course()})"

    def __str__(self) -> str:
        width = max(map(len, self.scales))
        rows = (f"{name:{width}}  {value:.4f}" for name, value in self.scales.items())
        return "\n".join([f"{'parameter':{width}}  scale", *rows, repr(self)])

    def _course(self) -> str:
        """How the steps went, for `repr`."""
        raise NotImplementedError

    def to_json(self, path: str | Path) -> None:
        """Write scales and history to a JSON file.

        Args:
            path: the file to write.
        """
        Path(path).write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, repr=False)
class GradInitResult(_Result):
    """The result of `gradinit_`. It unpacks into its two attributes.

    Attributes:
        scales: parameter name -> scale, for every parameter that requires a gradient.
        history: one `GradInitStep` for each step.
    """

    history: tuple[GradInitStep, ...]

    def _course(self) -> str:
        after = [step.loss_after for step in self.history if step.loss_after is not None]
        seen = f", loss after a step {after[0]:.4g} at first, {after[-1]:.4g} at last" if after else ""
        return f"{sum(step.branch == 'constraint' for step in self.history)} on the constraint{seen}"


@dataclass(frozen=True, repr=False)
class MetaInitResult(_Result):
    """The result of `metainit_`. It unpacks into its two attributes.

    Attributes:
        scales: parameter name -> scale, for every parameter that requires a gradient.
        history: one `MetaInitStep` for each step, with the loss and the gradient quotient.
    """

    history: tuple[MetaInitStep, ...]

    def _course(self) -> str:
        first, last = self.history[0].quotient, self.history[-1].quotient
        return f"gradient quotient {first:.4g} at first, {last:.4g} at last"


def warn_of_one_branch(history: Sequence[GradInitStep], gamma: float) -> None:
    """Warn if at least nine in ten steps, or none, were on the constraint, unless γ is infinite or steps are few."""
    norms, count = [step.norm for step in history], len(history)
    constrained = sum(step.branch == "constraint" for step in history)
    if count < 10 or 0 < constrained < 0.9 * count or (constrained == 0 and gamma == math.inf):
        return
    advice = "relative_gamma=0.8 gives one that is a little below the norm at initialization"
    if constrained:
        message = (
            f"{constrained} of {count} steps were on the constraint: the norm went from {norms[0]:.4g} to "
            f"{norms[-1]:.4g} and gamma is {gamma:.4g}, so the scales hardly followed the loss. Give a higher gamma "
            f"({advice}), or more steps"
        )
    else:
        message = (
            f"no step was on the constraint: the norm was {max(norms):.4g} at most and gamma is {gamma:.4g}, so "
            f"nothing kept the gradient small. Give a lower gamma ({advice}), or gamma=math.inf to go without"
        )
    warn_user(f"gradinit_: {message}")
