"""Tables and the picture of the study elr-constrained."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fused_lwlr.papers.framework import Results, Settings
from fused_lwlr.papers.tables import Report, Table, cell

PAPER: dict[tuple[str, bool], tuple[str, str, str]] = {
    ("momentum, decay", False): ("34.0 at most", "77.3", "diverged"),
    ("momentum, decay", True): ("", "78.1", "1.310"),
    ("neither", False): ("34.0 at most", "73.1", "1.385"),
    ("neither", True): ("", "74.5", "1.383"),
    ("constrained", False): ("73.9", "75.2", "1.285"),
    ("constrained", True): ("", "76.9", ""),
}
"""Setup, warm-up -> Figure 8 (ResNet-110 NoShort, CIFAR-10, test accuracy in %; of "conventional training" the best
only), Figure 9 (ImageNet, top-1 in %, without warm-up the better of two goals), Figure 12 (Transformer, perplexity)."""
COLORS = {"momentum, decay": "#edae49", "neither": "#00798c", "constrained": "#d1495b"}


def report(settings: Settings, results: Results) -> Report:
    """The best rate of each setup, what warm-up and constraining bring, and all rates in the picture."""
    return Report([_best(settings, results), _differences(results), _rates(results)], _draw(results))


def top(results: Results) -> Results:
    """The seeds of the rate at which accuracy is highest on average; a training that diverged has 0."""
    found = [
        results.where(lr=lr, goal=goal)
        for lr in results.distinct("lr")
        for goal in results.distinct("goal")
        if len(results.where(lr=lr, goal=goal))
    ]
    return max(found, key=lambda of: np.mean([accuracy or 0.0 for accuracy in of.of("test_accuracy")]))


def _cells(results: Results) -> list[tuple[str, str, float, Results]]:
    """Net, setup, warm-up, and the results of its best rate."""
    found = []
    for model in results.distinct("model"):
        for setup in results.distinct("setup"):
            for warmup in results.distinct("warmup"):
                of = results.where(model=model, setup=setup, warmup=warmup)
                if len(of):
                    found.append((model, setup, warmup, top(of)))
    return found


def _rate(results: Results) -> str:
    goal = results.distinct("goal")[0]
    return f"{results.distinct('lr')[0]:g}" + (f", goal {goal:g}" if goal is not None else "")


def _best(settings: Settings, results: Results) -> Table:
    rows = []
    noshort = results.distinct("model")[0]
    for model, setup, warmup, of in _cells(results):
        paper = PAPER[setup, warmup > 0] if model == noshort else ("", "", "")
        accuracy, loss = cell(of.of("test_accuracy"), "{:.1f}"), cell(of.of("train_loss"), "{:.2f}")
        rows.append([model, setup, "yes" if warmup else "no", _rate(of), accuracy, loss, *paper])
    columns = ["net", "SGD with", "warm-up", "best lr", "test accuracy %", "training loss"]
    notes = [
        f"{settings.data}, {settings.epochs} epochs, mean ± standard deviation over {settings.seeds} seeds; the best "
        "of some rates by test accuracy, as in the paper",
        "paper: Figure 8, ResNet-110 without shortcuts on CIFAR-10, accuracy in %; Figure 9, ImageNet, accuracy in %; "
        "Figure 12, Transformer, perplexity",
    ]
    return Table(
        "one effective learning rate", [*columns, "paper: Figure 8", "Figure 9", "Figure 12"], rows, notes, labels=4
    )


def _differences(results: Results) -> Table:
    """Seed by seed, between the best rates."""
    best = {(model, setup, warmup > 0): of for model, setup, warmup, of in _cells(results)}
    rows = []
    for model in results.distinct("model"):
        plain = [of for (m, setup, warm), of in best.items() if m == model and setup != "constrained" and not warm]
        ours = best.get((model, "constrained", False))
        if ours is not None and plain:
            strongest = max(plain, key=lambda of: np.mean([x or 0.0 for x in of.of("test_accuracy")]))
            found = cell(minus(ours, strongest), "{:+.1f}")
            said = "+39.9" if model == results.distinct("model")[0] else "slightly above 0"
            rows.append([f"{model}: constrained, over the best of the others, no warm-up", found, said])
    for (model, setup, warm), of in best.items():
        without = best.get((model, setup, False))
        if warm and without is not None:
            said = "no gain" if setup == "constrained" else "above 0"
            rows.append([f"{model}, {setup}: warm-up, over none", cell(minus(of, without), "{:+.1f}"), said])
    notes = ["paper: Figure 8 and Sections 4.4 and 4.6; its own Figure 9 has +2.8 for warm-up with a constraint"]
    return Table("differences of test accuracy in points", ["difference", "here", "paper"], rows, notes)


def minus(one: Results, other: Results) -> list[float | None]:
    """Differences of test accuracy, seed by seed; None where one diverged."""
    pairs = zip(one.of("test_accuracy"), other.of("test_accuracy"), strict=True)
    return [a - b if a is not None and b is not None else None for a, b in pairs]


def _rates(results: Results) -> Table:
    rows = []
    for model in results.distinct("model"):
        for setup in results.distinct("setup"):
            of_setup = results.where(model=model, setup=setup)
            for lr, goal in sorted({(r.parameters["lr"], r.parameters["goal"] or 0.0) for r in of_setup}):
                of = of_setup.where(lr=lr, goal=goal or None)
                both = [cell(of.where(warmup=w).of("test_accuracy"), "{:.1f}") for w in of.distinct("warmup")]
                rows.append([model, setup, _rate(of), *both, *[""] * (len(results.distinct("warmup")) - len(both))])
    columns = ["net", "SGD with", "lr", *(f"warm-up {w:g}" for w in results.distinct("warmup"))]
    return Table("test accuracy in % at all rates", columns, rows, labels=3)


def _draw(results: Results) -> Figure:
    models = results.distinct("model")
    figure = Figure(figsize=(4.6 * (1 + len(models)), 3.6), layout="constrained")
    *ranges, epochs = figure.subplots(1, 1 + len(models))
    for axes, model in zip(ranges, models, strict=True):
        for setup, color in COLORS.items():
            for warmup in results.distinct("warmup"):
                of = results.where(model=model, setup=setup, warmup=warmup)
                found = sorted(
                    (r.parameters["lr"] * (r.parameters["goal"] or 1.0), r.values["test_accuracy"])
                    for r in of
                    if r.values["test_accuracy"] is not None
                )
                if not found:
                    continue
                rates = sorted({rate for rate, _ in found})
                means = [np.mean([value for rate, value in found if rate == wanted]) for wanted in rates]
                label = f"{setup}{', warm-up' * (warmup > 0)}"
                axes.plot(rates, means, ("--" if warmup else "-") + "o", color=color, markersize=3, label=label)
                axes.plot(*zip(*found, strict=True), "o", color=color, markersize=2, alpha=0.5)
        axes.set_xscale("log")
        axes.set_xlabel("learning rate, times the goal if there is one")
        axes.set_ylabel("test accuracy in %")
        axes.set_title(model, fontsize="medium")
    _over_epochs(epochs, results.where(model=models[0]))
    epochs.set_title(f"{models[0]}, best rates, mean", fontsize="medium")
    for axes in (*ranges, epochs):
        axes.spines[["top", "right"]].set_visible(False)
    ranges[0].legend(frameon=False, fontsize="x-small")
    return figure


def _over_epochs(axes: Any, results: Results) -> None:
    for _, setup, warmup, of in _cells(results):
        curves = [curve for curve in of.of("accuracies") if curve is not None]
        if curves:
            mean = np.mean(curves, axis=0)
            axes.plot(range(1, len(mean) + 1), mean, "--" if warmup else "-", color=COLORS[setup])
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy in %")
