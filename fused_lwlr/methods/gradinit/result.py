"""Results of GradInit and MetaInit: the scales of the weights, and a record of every step."""

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from fused_lwlr.methods.gradinit.rules import Branch


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


class GradInitResult(NamedTuple):
    """The result of `gradinit_`. It unpacks into its two attributes.

    Attributes:
        scales: parameter name -> scale, for every parameter that requires a gradient.
        history: one `GradInitStep` for each step.
    """

    scales: dict[str, float]
    history: tuple[GradInitStep, ...]

    def __repr__(self) -> str:
        after = [step.loss_after for step in self.history if step.loss_after is not None]
        seen = f", loss after a step {after[0]:.4g} at first, {after[-1]:.4g} at last" if after else ""
        constraint = sum(step.branch == "constraint" for step in self.history)
        return (
            f"GradInitResult({_summary(self.scales)}, {len(self.history)} steps, {constraint} on the constraint{seen})"
        )

    def __str__(self) -> str:
        return f"{_table(self.scales)}\n{self!r}"

    def to_json(self, path: str | Path) -> None:
        """Write scales and history to a JSON file.

        Args:
            path: the file to write.
        """
        _write(path, {"scales": self.scales, "history": [asdict(step) for step in self.history]})


class MetaInitResult(NamedTuple):
    """The result of `metainit_`. It unpacks into its two attributes.

    Attributes:
        scales: parameter name -> scale, for every parameter that requires a gradient.
        history: one `MetaInitStep` for each step, with the loss and the gradient quotient.
    """

    scales: dict[str, float]
    history: tuple[MetaInitStep, ...]

    def __repr__(self) -> str:
        first, last = self.history[0].quotient, self.history[-1].quotient
        quotient = f"gradient quotient {first:.4g} at first, {last:.4g} at last"
        return f"MetaInitResult({_summary(self.scales)}, {len(self.history)} steps, {quotient})"

    def __str__(self) -> str:
        return f"{_table(self.scales)}\n{self!r}"

    def to_json(self, path: str | Path) -> None:
        """Write scales and history to a JSON file.

        Args:
            path: the file to write.
        """
        _write(path, {"scales": self.scales, "history": [asdict(step) for step in self.history]})


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
    warnings.warn(f"gradinit_: {message}", UserWarning, stacklevel=3)


def _summary(scales: dict[str, float]) -> str:
    return f"{len(scales)} scales from {min(scales.values()):.3g} to {max(scales.values()):.3g}"


def _table(scales: dict[str, float]) -> str:
    width = max(map(len, scales))
    return "\n".join(
        [f"{'parameter':{width}}  scale", *(f"{name:{width}}  {value:.4f}" for name, value in scales.items())]
    )


def _write(path: str | Path, content: dict[str, object]) -> None:
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
