"""Effective learning rates over a training run, which can be plotted, saved and compared with a model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fused_lwlr.methods.checks import Array
from fused_lwlr.methods.plots import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class ELRHistory:
    """The effective learning rate E = ‖∇W‖ / ‖W‖ of every layer in every recorded step.

    Attributes:
        names: the names of the layers, in the order of the model.
        steps: the recorded steps, counted from 0: int [records].
        grad_norm: ‖∇W‖ before the step, float64 [records, layers], or the norm of the momentum buffer. NaN for a layer
            without a gradient.
        weight_norm: ‖W‖ before the step, float64 [records, layers].
        lr: the learning rate of each layer including its multiplier, float64 [records, layers]. NaN if the slices of a
            layer have different rates.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    grad_norm: Array
    weight_norm: Array
    lr: Array

    @property
    def elr(self) -> Array:
        """E, float64 [records, layers]. NaN for a layer that has no gradient or whose weight is zero."""
        norm = self.weight_norm
        return np.where(norm > 0, self.grad_norm / np.where(norm > 0, norm, 1.0), np.nan)

    @property
    def elr_mean(self) -> Array:
        """The mean of E over layers, [records]."""
        return np.asarray(np.nanmean(self.elr, axis=1))

    @property
    def elr_spread(self) -> Array:
        """Std(E), the population standard deviation over layers, [records]."""
        return np.asarray(np.nanstd(self.elr, axis=1))

    @property
    def rate_spread(self) -> Array:
        """Std(λE), the measure that the paper compares schedules by, [records]."""
        return np.asarray(np.nanstd(self.lr * self.elr, axis=1))

    def summary(self) -> dict[str, float]:
        """Returns the averages of Mean(E), Std(E) and Std(λE) over the run, as in the paper's figures.

        Raises:
            ValueError: no step was recorded.
        """
        if not self.steps:
            raise ValueError("no step was recorded yet: take a step of the optimizer first")
        found = {"elr_mean": self.elr_mean, "elr_spread": self.elr_spread, "rate_spread": self.rate_spread}
        return {name: float(np.nanmean(values)) for name, values in found.items()}

    def to_json(self, path: str | Path) -> None:
        """Writes the history to a JSON file. Numbers that are not finite become null.

        Args:
            path: the file to write.
        """
        content: dict[str, Any] = {"names": self.names, "steps": self.steps}
        for name in ("grad_norm", "weight_norm", "lr"):
            content[name] = [[x if np.isfinite(x) else None for x in row] for row in getattr(self, name).tolist()]
        Path(path).write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> "ELRHistory":
        """Reads a history that `to_json` wrote.

        Args:
            path: the file to read.

        Raises:
            ValueError: the file was not written by `to_json`.
        """
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            names, steps = tuple(content["names"]), tuple(content["steps"])
            shape = len(steps), len(names)
            arrays = [
                np.array(content[name], dtype=np.float64).reshape(shape) for name in ("grad_norm", "weight_norm", "lr")
            ]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold effective learning rates: {error!r}") from error
        return cls(names, steps, *arrays)

    def plot(self, path: str | Path | None = None, title: str | None = None) -> "Figure":
        """Plots E of every layer over time, coloured by depth, and, on the right, their mean and spread.

        Needs matplotlib.

        Args:
            path: the file to save the figure to; its suffix gives the format. None saves nothing.
            title: the title of the figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_layers(left, self.steps, self.elr)
        left.set_ylabel("E = ‖∇W‖ / ‖W‖")
        right.plot(self.steps, self.elr_mean, color="#00798c", label="mean over layers")
        right.plot(self.steps, self.elr_spread, color="#d1495b", label="spread over layers")
        right.legend(frameon=False, fontsize="small")
        for axes in (left, right):
            axes.set_yscale("log")
            axes.set_xlabel("step")
        return finish(figure, path, title)


def draw_layers(axes: Any, x: Sequence[int] | Array, values: Array, **style: Any) -> None:
    """Draws a line for each layer of `values` [times, layers], dark for the first layer and bright for the last."""
    import matplotlib

    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, values.shape[1]))
    for of_layer, color in zip(values.T, colors, strict=True):
        axes.plot(x, of_layer, color=color, linewidth=1, **style)
