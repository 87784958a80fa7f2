"""Small Transformers on Python's documentation, trained by usual methods and by ours. Post-LN models have GradInit or
one effective learning rate instead of warm-up. Pre-LN models have layer-wise rates.

Learning rates are the best of the studies `gradinit-language`, `elr-language` and `lwlr-language`, whose grids are
recorded in `bench/results/studies/NAME/results.json`.
"""

from dataclasses import dataclass
from math import isfinite
from statistics import mean
from typing import Any

import pandas
from matplotlib.figure import Figure

from fused_lwlr.papers import elr_language, gradinit_language, lwlr_language
from fused_lwlr.papers.comparison import compare, p_text
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.language import Arm, train_from
from fused_lwlr.papers.tables import Table, cell

EVERY = 20
"""Steps between two points of a curve."""
COLORS = {"plain": "0.5", "usual": "#0072b2", "longer": "#56b4e9", "ours": "#d1495b"}


@dataclass(frozen=True)
class Entry:
    """An arm of a study in the demo.

    Args:
        task: arms of one task are compared.
        needs: requirements in addition to a training.
        arm: the arm of the study.
        lr: its best rate.
    """

    task: str
    name: str
    needs: str
    arm: Arm
    lr: float

    def own(self, results: Any) -> Any:
        """The results of the entry, in the order of seeds."""
        return results[[labels == self.arm.labels for labels in results.labels]].sort_values("seed")


ADAMW, SGD, LAYERS = "Post-LN, AdamW", "Post-LN, SGD", "Pre-LN, SGD"
FIFTH = "lower rates in a fifth of it"
LONGER = ("longer warm-up", "longer")
"""Controls that take as long as the methods, see `gradinit_language.STARTS` and `lwlr_language.RATES`."""
ENTRIES = [
    Entry(ADAMW, "plain", "", gradinit_language.arm("plain", 0.98), 0.0045),
    Entry(ADAMW, "warm-up", FIFTH, gradinit_language.arm("warm-up", 0.98), 0.009),
    Entry(ADAMW, LONGER[0], "15 % more steps", gradinit_language.arm("warm-up, 1.15 × the steps", 0.98), 0.009),
    Entry(ADAMW, "GradInit", "15 steps on weights' scales", gradinit_language.arm("GradInit", 0.98), 0.009),
    Entry(SGD, "plain", "", elr_language.arm("neither", warmup=False), 0.15),
    Entry(SGD, "warm-up", FIFTH, elr_language.arm("neither", warmup=True), 0.15),
    Entry(SGD, "constrained ELR", "‖g‖ / ‖w‖ of every layer", elr_language.arm("constrained", warmup=False), 0.03),
    Entry(LAYERS, "single rate", "", lwlr_language.arm("sgd", "model", "single"), 0.3),
    Entry(LAYERS, LONGER[1], "15 % more steps", lwlr_language.arm("sgd", "model", "longer"), 0.6),
    Entry(LAYERS, "LWLR", "gradients of 30 minibatches", lwlr_language.arm("sgd", "model", "layerwise"), 1.2),
]


def jobs(settings: Settings) -> list[Job]:
    """A training for each entry and seed."""
    return [job for entry in ENTRIES for job in entry.arm.jobs(settings, measure, [entry.lr])]


def measure(labels: dict[str, str], **fields: Any) -> dict[str, Any]:
    """The held-out loss at the end, and at some steps before; None if it diverged."""
    found = train_from(eval_every=EVERY, **fields)
    return {"loss": found.test_loss, "curve": found.curve}


def tables(settings: Settings, results: Any) -> list[Table]:
    """One table, with a sentence on each comparison below; `quick` has no comparisons."""
    rows = [[e.task, e.name, e.needs, f"{e.lr:g}", cell(e.own(results).loss)] for e in ENTRIES]
    smoke = f"--quick is a smoke test: {settings.steps} steps say nothing about the methods"
    notes = [
        f"{settings.over}; loss in nats a character; each at its own best learning rate, found beforehand",
        f"{ADAMW}: 8 blocks, PyTorch's initialization; {SGD}: 6 blocks with LayerNorm after every layer, Xavier's "
        f"initialization; {LAYERS}: 6 blocks; longer: 1.15 times the steps, as long as the method",
        *([smoke] if settings.quick else [sentence(results, entry) for entry in ENTRIES if entry.needs]),
    ]
    columns = ["task", "training", "needs", "lr", "held-out loss"]
    return [Table("small Transformers on text", columns, rows, notes, labels=3)]


def sentence(results: Any, entry: Entry) -> str:
    """A comparison of an entry with the best earlier entry of its task, seed by seed."""
    before = [other for other in ENTRIES[: ENTRIES.index(entry)] if other.task == entry.task]
    losses = {other.name: other.own(results).loss.tolist() for other in before}
    trained = {name: values for name, values in losses.items() if all(map(isfinite, values))}
    ours = entry.own(results).loss.tolist()
    if not all(map(isfinite, ours)) or not trained:
        return f"{entry.task}: {entry.name} {'diverges' if trained else 'trains where the others diverge'}."
    best = min(trained, key=lambda name: mean(trained[name]))
    gains = [one - other for one, other in zip(ours, trained[best], strict=True)]
    n, p, verdict = compare(gains, lower_is_better=True)
    test = f"p = {p_text(p)}, ".replace("= <", "<") if isfinite(p) else ""
    place = f"{abs(mean(gains)):.3f} {'below' if mean(gains) < 0 else 'above'} {best}"
    return f"{entry.task}: {entry.name} ends at {mean(ours):.3f}, {place}: {verdict} ({test}n = {n})."


def draw(results: Any) -> Figure:
    """A panel for each task: mean and range of the seeds, with the name and the last loss at the end of each curve."""
    tasks = list(dict.fromkeys(entry.task for entry in ENTRIES))
    figure = Figure(figsize=(12, 5), layout="constrained")
    last = results.loss.astype(float)
    # the first steps of all curves are cut off
    low, high = last.min() - 0.1, last.max() + 0.5
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True), tasks, strict=True):
        of_task = [entry for entry in ENTRIES if entry.task == task]
        kinds = ["plain", *["usual"] * (len(of_task) - 2), "ours"]
        ends = []
        for entry, kind in zip(of_task, kinds, strict=True):
            curves = pandas.DataFrame([dict(curve) for curve in entry.own(results).curve]).dropna(axis=1)
            if curves.size:  # it may have diverged before the first test
                color = COLORS["longer" if entry.name in LONGER else kind]
                axes.plot(curves.columns, curves.mean(), color=color, linewidth=4)
                axes.fill_between(curves.columns, curves.min(), curves.max(), color=color, alpha=0.2, linewidth=0)
                ends.append((curves.mean().iloc[-1], entry.name, color))
        # names at the ends of lines, moved apart vertically
        places: list[float] = []
        for loss, _, _ in sorted(ends):
            places.append(max(loss, places[-1] + 0.15 * (high - low) if places else low))
        down = min(mean(places) - mean(loss for loss, _, _ in ends), places[0] - low)
        for (loss, name, color), at in zip(sorted(ends), places, strict=True):
            place = {"xy": (1.03, at - down), "xycoords": ("axes fraction", "data"), "va": "center"}
            axes.annotate(f"{name}\n{loss:.2f}", color=color, fontsize=20, linespacing=0.95, **place)
        axes.set(ylim=(low, high), xlim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=16)
        axes.locator_params(nbins=3)
        axes.set_title(task, fontsize=24, fontweight="bold", loc="left")
    figure.supxlabel("steps", fontsize=20)
    figure.supylabel("held-out loss", fontsize=20)
    return figure


STUDY = Study("demo", __doc__, jobs, tables, draw, steps=200, data="python-docs", least_seeds=1, options="steps seeds")
