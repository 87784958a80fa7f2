"""Tables and the picture of the study gradinit."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fused_lwlr.papers.framework import Results, Settings
from fused_lwlr.papers.tables import Report, Table, cell

LABELS = {
    "kaiming": "He",
    "metainit": "MetaInit",
    "gradinit": "GradInit",
    "gradinit-normalized": "GradInit, g / ‖g‖",
}
COLORS = {"kaiming": "0.45", "metainit": "#edae49", "gradinit": "#00798c", "gradinit-normalized": "#d1495b"}

PAPER: dict[bool, tuple[str, dict[str, tuple[str, str]]]] = {
    True: (
        "ResNet-110 with BN",
        {
            "kaiming": ("23.2 ± 0.9", "95.0 ± 0.2"),
            "metainit": ("29.0 ± 1.5", "94.8 ± 0.1"),
            "gradinit-normalized": ("38.2 ± 0.9", "95.4 ± 0.1"),
        },
    ),
    False: (
        "VGG-19 without BN",
        {
            "kaiming": ("29.1 ± 1.5", "94.5 ± 0.1"),
            "metainit": ("30.5 ± 0.9", "94.6 ± 0.1"),
            "gradinit-normalized": ("29.3 ± 0.6", "94.7 ± 0.1"),
        },
    ),
}
"""Table 3, CIFAR-10: by whether a net has batch normalization, accuracy in % after the first epoch and the best, mean ±
standard error of 4 seeds. The authors' scripts normalize the gradient."""


def report(settings: Settings, results: Results) -> Report:
    """Accuracy, what it is over He's initialization, and σ(g)."""
    return Report([_accuracy(settings, results), _differences(results), _variance(results)], _draw(results))


def _normalized(results: Results, model: str) -> bool:
    known = [value for value in results.where(model=model).of("normalized") if value is not None]
    return not known or known[0]


def _accuracy(settings: Settings, results: Results) -> Table:
    rows = []
    for model in results.distinct("model"):
        name, paper = PAPER[_normalized(results, model)]
        for init in results.distinct("init"):
            of = results.where(model=model, init=init)
            values = [cell(of.of(value), "{:.1f}") for value in ("first", "best", "last")]
            rows.append([model, LABELS[init], *values, name, *paper.get(init, ("", ""))])
    columns = ["net", "initialization", "first epoch %", "best %", "last %"]
    notes = [
        f"{settings.data}, {settings.epochs} epochs of SGD at 0.1 with a cosine, test accuracy, mean ± standard "
        f"deviation over {settings.seeds} seeds; nets without batch normalization (BN) are clipped at a norm of 1",
        "paper: Table 3, CIFAR-10, 200 epochs, mean ± standard error of 4 seeds; its GradInit is in the row of the "
        "authors' scripts, which divide the gradient by its norm",
    ]
    columns += ["paper: net", "paper: first epoch %", "paper: best %"]
    return Table("accuracy from different initializations", columns, rows, notes, labels=2)


def _differences(results: Results) -> Table:
    rows = []
    for model in results.distinct("model"):
        _, paper = PAPER[_normalized(results, model)]
        base = results.where(model=model, init="kaiming").of("first")
        for init in [init for init in results.distinct("init") if init != "kaiming"]:
            pairs = zip(results.where(model=model, init=init).of("first"), base, strict=True)
            found = [a - b if a is not None and b is not None else None for a, b in pairs]
            said = [float(paper[of][0].split()[0]) for of in (init, "kaiming") if of in paper]
            text = f"{said[0] - said[1]:+.1f}" if len(said) == 2 else ""
            rows.append([model, LABELS[init], cell(found, "{:+.1f}"), text])
    title = "accuracy after the first epoch over that from He's initialization, in points"
    return Table(title, ["net", "initialization", "here", "paper"], rows, [], labels=2)


def factors(results: Results) -> list[list[float]]:
    """σ(g) after the initialization over before it, of every weight, for each seed that has them."""
    found = [
        np.array(after) / np.array(before)
        for before, after in zip(results.of("before"), results.of("after"), strict=True)
        if before is not None and min(before) > 0
    ]
    return [factor.tolist() for factor in found]


def _variance(results: Results) -> Table:
    rows = []
    for model in results.distinct("model"):
        for init in [init for init in results.distinct("init") if init != "kaiming"]:
            of_seeds = factors(results.where(model=model, init=init))
            if of_seeds:
                geometric = cell([float(np.exp(np.log(factor).mean())) for factor in of_seeds], "{:.3g}")
                lower = cell([100 * float((np.array(factor) < 1).mean()) for factor in of_seeds], "{:.0f}")
                head = cell([factor[-1] for factor in of_seeds], "{:.3g}")
                said = "lower for all" if init == "gradinit-normalized" else ""
                rows.append([model, LABELS[init], geometric, lower, head, said])
    columns = ["net", "initialization", "σ(g) after / before", "% of weights with less", "of the head", "paper"]
    notes = [
        "σ(g): standard deviation of a gradient over minibatches of 64, averaged over a weight's elements; its factor "
        "is the geometric mean over weights, mean ± standard deviation over seeds",
        "paper: Figures 5 and 6, in words; Figure 1, of the variance relative to the gradient, leaves out the head",
    ]
    return Table("variance of gradients, layer by layer", columns, rows, notes, labels=2)


def _draw(results: Results) -> Figure:
    models = results.distinct("model")
    figure = Figure(figsize=(11, 3.4 * len(models)), layout="constrained")
    for (left, right), model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        for init in results.distinct("init"):
            of = results.where(model=model, init=init)
            style: dict[str, Any] = {"color": COLORS[init], "label": LABELS[init], "marker": "o", "markersize": 3}
            _band(left, [values for values in of.of("accuracies") if values is not None], 1, style)
            _band(right, [values for values in of.of("after") if values is not None], 0, style)
        left.set_ylabel("test accuracy in %")
        left.set_xlabel("epoch")
        right.set_yscale("log")
        right.set_ylabel("σ(g) at initialization")
        right.set_xlabel("weight, in order of the model")
        for axes in (left, right):
            axes.set_title(model, fontsize="medium")
            axes.spines[["top", "right"]].set_visible(False)
        left.legend(frameon=False, fontsize="x-small")
    return figure


def _band(axes: Any, curves: list[list[float]], first: int, style: dict[str, Any]) -> None:
    """The mean over seeds, from the lowest to the highest."""
    if curves:
        values = np.array(curves)
        x = np.arange(values.shape[1]) + first
        axes.plot(x, values.mean(0), linewidth=1, **style)
        axes.fill_between(x, values.min(0), values.max(0), color=style["color"], alpha=0.15, linewidth=0)
