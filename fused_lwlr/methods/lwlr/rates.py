"""Layer-wise learning rates: the result of a calibration, which can be printed, plotted, saved and passed on."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fused_lwlr.methods.plots import finish
from fused_lwlr.optim.option_table import number_of, shown
from fused_lwlr.patterns import find, matches, split_name, with_parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDING = "gradient zero but for rounding"
NEGLIGIBLE = 1e-6
"""Layers whose G is below this fraction of the largest G have a gradient that is only rounding noise."""


@dataclass(frozen=True)
class LayerRate:
    """The multiplier of one layer, and the measurement behind it.

    Attributes:
        name: the name of the parameter, or of a slice of it, such as `attn.qkv.weight[0:64]`.
        eta: the learning-rate multiplier η.
        numel: the number of elements; a complex one counts as two.
        gradient: G, the mean of |gradient| over the elements, summed over minibatches.
        kind: "weight", "scale", "bias" or "other".
        note: why η was not measured, or empty.
    """

    name: str
    eta: float
    numel: int
    gradient: float
    kind: str
    note: str = ""


class LayerRates(Mapping[str, float]):
    """Layer name -> learning-rate multiplier η, in the order of the model's parameters.

    A mapping that optimizers accept as `layers=`.

    Attributes:
        layers: a `LayerRate` for each layer.
        steps: the number of minibatches that were measured.
    """

    def __init__(self, layers: Sequence[LayerRate], steps: int):
        self.layers = tuple(layers)
        self.steps = steps
        self._eta = {layer.name: layer.eta for layer in self.layers}

    @classmethod
    def from_gradients(
        cls, names: Sequence[str], numel: Sequence[int], gradients: Sequence[float], kinds: Sequence[str], steps: int
    ) -> "LayerRates":
        """Algorithm 1, lines 9 to 13: η̃ = 1/√G, η = η̃ · Σm / Σ(m η̃), so that Σ(m η) / Σm = 1.

        A layer gets η = 1 and a note, and does not count in the normalization, if it has no gradient or if its
        gradient is zero up to rounding.

        Args:
            names: the names of the layers.
            numel: the number of elements of each layer.
            gradients: G of each layer, summed over `steps` minibatches. NaN for a layer without a gradient.
            kinds: the kind of each layer, see `LayerRate`.
            steps: the number of minibatches.

        Raises:
            ValueError: the gradients of all layers are zero, one is negative or infinite, or the arguments have
                different lengths.
        """
        m, g = np.asarray(numel, dtype=np.float64), np.asarray(gradients, dtype=np.float64)
        lengths = [len(names), len(m), len(g), len(kinds)]
        if len(set(lengths)) > 1:
            raise ValueError(f"names, numel, gradients and kinds must have one length, not {lengths}")
        if (g < 0).any() or np.isinf(g).any():
            raise ValueError(f"gradients={shown(gradients)} must be finite numbers, at least 0, or NaN")
        measured = np.isfinite(g) & (g > 0) & (g >= NEGLIGIBLE * np.nanmax(np.append(g, 0.0)))
        if not measured.any():
            raise ValueError("the gradient of every layer is zero: there is nothing to calibrate from")
        inverse = 1 / np.sqrt(np.where(measured, g, 1.0))
        scale = m[measured].sum() / (m * inverse)[measured].sum()
        eta = np.where(measured, inverse * scale, 1.0)
        notes = np.where(measured, "", np.where(np.isnan(g), "no gradient", ROUNDING))
        rows = zip(names, eta.tolist(), map(int, numel), np.nan_to_num(g).tolist(), kinds, notes.tolist(), strict=True)
        return cls([LayerRate(*row) for row in rows], steps)

    def __getitem__(self, name: str) -> float:
        return self._eta[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._eta)

    def __len__(self) -> int:
        return len(self._eta)

    @property
    def unmeasured(self) -> tuple[LayerRate, ...]:
        """The layers whose η was not measured: they have no gradient, or they were excluded or set."""
        return tuple(layer for layer in self.layers if layer.note)

    def exclude(self, *patterns: str) -> "LayerRates":
        """Returns rates in which some layers have η = 1 and do not count in the normalization.

        The other measured layers are rescaled so that Σ(m η) / Σm = 1 holds for them. The result is the same as if the
        calibration had left the excluded layers out. (`rates | {name: 1.0}` does not rescale the others.)

        Args:
            patterns: names of layers or parameters, or patterns of names with `*` and `?`, such as "*.wpe.weight".

        Raises:
            ValueError: a pattern matches no layer, or no measured layer is left.
        """
        for pattern in patterns:
            find(pattern, with_parameters(self), "exclude", "layer of these rates")
        # without a large gradient, smaller ones may not count as rounding
        left = [layer for layer in self.layers if layer.note in ("", ROUNDING) and not matches(layer.name, patterns)]
        if not any(layer.gradient for layer in left):
            raise ValueError(
                f"exclude has {', '.join(map(repr, patterns))}, so no measured layer is left: exclude fewer layers"
            )
        names, numel, gradients, kinds = zip(*((x.name, x.numel, x.gradient, x.kind) for x in left), strict=True)
        again = LayerRates.from_gradients(names, numel, gradients, kinds, self.steps)
        found = {layer.name: layer for layer in again.layers}
        for layer in self.layers:
            if layer.name not in found:
                excluded = matches(layer.name, patterns)
                found[layer.name] = replace(layer, eta=1.0, note="excluded") if excluded else layer
        return LayerRates([found[layer.name] for layer in self.layers], self.steps)

    def __or__(self, other: Mapping[str, float]) -> "LayerRates":
        """Returns these rates, updated by the rates of `other` like `dict`. No other η changes.

        The mean over parameters may then differ from 1, see `exclude`. A parameter in `other` replaces its slices in
        these rates, such as query, key and value. Other `LayerRates` may add layers.

        Args:
            other: layer or parameter -> η.

        Raises:
            ValueError: a plain mapping has a name that is neither a layer nor a parameter of these rates.
        """
        if not isinstance(other, Mapping):
            return NotImplemented
        rows = other.layers if isinstance(other, LayerRates) else [self._row(*item) for item in other.items()]
        theirs = {row.name: row for row in rows}
        merged: dict[str, LayerRate] = {}
        for layer in self.layers:
            row = theirs.get(split_name(layer.name)[0]) or theirs.get(layer.name, layer)
            merged[row.name] = row
        return LayerRates(list((merged | theirs).values()), self.steps)

    def _row(self, name: str, eta: float) -> LayerRate:
        """The row of a layer, or of all slices of a parameter, with another η."""
        parts = [layer for layer in self.layers if name in (layer.name, split_name(layer.name)[0])]
        if not parts:
            raise ValueError(
                f"the mapping right of | has {shown(name)}, but these rates have no such layer or parameter"
            )
        rate = number_of(eta)
        if rate is None or not 0 <= rate < math.inf:
            raise ValueError(
                f"the mapping right of | has {shown(eta)} for {name!r}, but rates are finite numbers, at least 0: give "
                "options in another mapping, layers=[rates, options]"
            )
        numel = sum(layer.numel for layer in parts)
        gradient = sum(layer.numel * layer.gradient for layer in parts) / max(1, numel)
        return LayerRate(name, rate, numel, gradient, parts[0].kind, "set")

    def __repr__(self) -> str:
        if not self:
            return "LayerRates(0 layers)"
        return f"LayerRates({len(self)} layers, η from {min(self.values()):.3g} to {max(self.values()):.3g})"

    def __str__(self) -> str:
        width = max(map(len, self._eta), default=5)
        lines = [f"{'layer':{width}}  {'kind':6}  {'numel':>12}  {'G':>9}  {'η':>8}"]
        for layer in self.layers:
            line = f"{layer.name:{width}}  {layer.kind:6}  {layer.numel:12,d}  {layer.gradient:9.2e}  {layer.eta:8.4f}"
            lines.append(f"{line}  {layer.note}".rstrip())
        return "\n".join(lines)

    def to_json(self, path: str | Path) -> None:
        """Writes the rates to a JSON file.

        Args:
            path: the file to write.
        """
        content = {"steps": self.steps, "layers": [asdict(layer) for layer in self.layers]}
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> "LayerRates":
        """Reads rates that `to_json` wrote. The numbers are the same, bit for bit.

        Args:
            path: the file to read.

        Raises:
            ValueError: the file was not written by `to_json`.
        """
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            layers = [LayerRate(**layer) for layer in content["layers"]]
            for row in layers:
                if not (isinstance(row.name, str) and isinstance(row.eta, (int, float)) and 0 <= row.eta < math.inf):
                    raise TypeError(f"these are no name and multiplier: {row.name!r}, {row.eta!r}")
                if not (isinstance(row.numel, int) and isinstance(row.gradient, (int, float))):
                    raise TypeError(f"these are no numel and gradient: {row.numel!r}, {row.gradient!r}")
            return cls(layers, content["steps"])
        except (ValueError, KeyError, TypeError) as error:
            lacks = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} does not hold layer rates, as calibrate writes them: {lacks}") from error

    def plot(self, path: str | Path | None = None, title: str | None = None) -> "Figure":
        """Plots η against depth: all layers on the left, only convolution and linear layers on the right.

        The plots correspond to the paper's Figures 4 and 5. Needs matplotlib.

        Args:
            path: the file to save the figure to; its suffix gives the format. None saves nothing.
            title: the title of the figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        weights = [(i, layer) for i, layer in enumerate(self.layers) if layer.kind == "weight"]
        share = sum(layer.numel for _, layer in weights) / max(1, sum(layer.numel for layer in self.layers))
        left.plot([layer.eta for layer in self.layers], color="0.75", linewidth=1, label="scales, biases, embeddings")
        marks = {"linestyle": "none", "marker": "o", "markersize": 3, "color": "C0"}
        left.plot([i for i, _ in weights], [layer.eta for _, layer in weights], label="convolution, linear", **marks)
        left.set_xlabel("layer, in order of depth")
        left.legend(frameon=False, fontsize="small")
        right.plot([layer.eta for _, layer in weights], color="C0", marker="o", markersize=3, linewidth=1)
        right.set_xlabel(f"conv., linear ({share:.1%} of parameters)")
        for axes in (left, right):
            axes.axhline(1, color="0.5", linewidth=0.8, linestyle=":")
            axes.set_ylabel("learning-rate multiplier η")
        return finish(figure, path, title)
