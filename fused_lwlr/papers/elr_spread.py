"""The spread of effective learning rates over a training, by learning rate, net and momentum.

Spreads in Effective Learning Rates, Figures 3 and 5: ResNet-56 on CIFAR-10, with and without shortcuts. Here also with
batch normalization that has no parameters, and with biases instead.
"""

import math
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import spearmanr

from fused_lwlr import ELRRecorder
from fused_lwlr.models.deep import NAME
from fused_lwlr.papers.figures import band, panels, shared_legend
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.from_he import from_he
from fused_lwlr.papers.tables import Report, Table, cell, summary
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.trainer import Trainer

MODEL = "resnet32x8"
LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MOMENTA = (0.5, 0.9)
"""In addition to 0; only with shortcuts, as in Figure 5."""
LOW = 0.1
"""Below it, approximately, the spread starts to increase (Section 4.2)."""
AVERAGES = ("elr_mean", "elr_spread", "rate_spread")
"""Averages of an `ELRHistory`."""
RECORDS = 2000
"""Most recorded steps of a training; about 24 of them are kept separately."""


def nets(model: str | None) -> list[str]:
    """Nets with and without shortcuts, with all kinds of normalization; or one model outside this family."""
    found = NAME.fullmatch(model or MODEL)
    if found is None:
        return [str(model)]
    size = found[2] + (f"x{found[3]}" if found[3] else "")
    return [f"{kind}{size}{norm}" for norm in ("", "-noaffine", "-nobn") for kind in ("resnet", "noshort")]


def jobs(settings: Settings) -> list[Job]:
    """Every net at every rate without momentum, and the first with momentum."""
    models = nets(settings.model)
    lrs = (LRS[1], LRS[-1]) if settings.quick else LRS
    cells = [(model, 0.0) for model in models[: 2 if settings.quick else None]]
    cells += [(models[0], momentum) for momentum in MOMENTA[-1 if settings.quick else 0 :]]
    of = ({"model": model, "momentum": momentum, "lr": lr} for model, momentum in cells for lr in lrs)
    return settings.jobs(measure, "{model}-momentum{momentum:g}-lr{lr:g}-seed{seed}", of)


def measure(**fields: Any) -> dict[str, Any]:
    """Mean(E), Std(E) and Std(λE) over layers, averaged over a training from He's initialization; its test accuracy.

    With momentum E comes from the buffer (Eq. 11), and `base_spread` from the gradient. Divergence gives no values.
    Without decay and warm-up, unless `fields` have them.
    """
    recorders: list[ELRRecorder] = []

    def watched(trainer: Trainer) -> Any:
        optimizer = from_he(trainer)
        every = math.ceil(trainer.total / RECORDS)
        convolutions = [name for name, param in trainer.model.named_parameters() if param.dim() == 4]
        # all weights of a net without convolutions: a ViT has only one
        select: dict[str, Any] = {"select": convolutions} if len(convolutions) > 1 else {}
        for momentum in (False, True):
            recorders.append(
                ELRRecorder(trainer.model, every=every, momentum=momentum, **select).watch(optimizer)
            )  # fmt: skip
        return optimizer

    found = train(recipe_of(**{"init": "model", "weight_decay": 0.0, "warmup": 0.0, **fields}), optimizer=watched)
    if found.problem is not None:
        return dict.fromkeys((*found.last, *AVERAGES, "base_spread", "steps", "spread"))
    base, history = (recorder.history for recorder in recorders)
    kept = slice(None, None, math.ceil(len(history.steps) / 24))
    return {
        **found.last,
        **{name: history.summary()[name] for name in AVERAGES},
        "base_spread": base.summary()["elr_spread"],
        "steps": list(history.steps[kept]),
        "spread": history.elr_spread[kept].tolist(),
    }


def report(settings: Settings, results: Any) -> Report:
    """Figure 3, Figure 5, and the paper's statements about them with our numbers."""
    plain = results[results.momentum == 0.0]
    averages = {"Mean(E)": ("elr_mean", "{:.3g}"), "Std(E)": ("elr_spread", "{:.3g}")}
    accuracy = {"test accuracy %": ("test_accuracy", "{:.1f}")}
    about = "E = ‖∇W‖ / ‖W‖ of convolutions, averaged over the training; Std: population, over layers"
    first = summary(
        "without momentum (Figure 3, of curves without numbers)",
        plain,
        {"net": "model", "lr": "lr"},
        averages | accuracy,
        [f"{settings.over}; no decay", about],
    )
    model = results.model.iloc[0]
    spreads = {"Std(E) of the buffer": ("elr_spread", "{:.3g}"), "of the gradient": ("base_spread", "{:.3g}")}
    second = summary(
        f"{model} with momentum (Figure 5, of colours without numbers)",
        results[results.model == model].sort_values("momentum", kind="stable"),
        {"momentum": "momentum", "lr": "lr"},
        spreads | accuracy,
    )
    return Report([first, second, _statements(results, plain)], _draw(results, plain))


def _statements(results: Any, plain: Any) -> Table:
    """One number for each sentence of the paper."""
    models, lrs = list(results.model.unique()), sorted(plain.lr.unique())
    lowest, low = lrs[0], min(lrs[1:], key=lambda lr: abs(lr - LOW))
    most = results.momentum.max()

    def spread(model: str, lr: float, momentum: float = 0.0, value: str = "elr_spread") -> Any:
        of = results[(results.model == model) & (results.lr == lr) & (results.momentum == momentum)]
        return of.set_index("seed")[value]

    rows = []
    for model in models:
        text = f"{model}: Std(E) at lr {lowest:g} is a multiple of that at {low:g}"
        rows.append([text, cell(ratios(spread(model, lowest), spread(model, low)), "{:.2f}"), _said(model, "above 1")])
    for short, noshort in zip(models[::2], models[1::2], strict=False):
        text = f"Std(E) of {noshort} is a multiple of that of {short}, lr {lowest:g}"
        found = ratios(spread(noshort, lowest), spread(short, lowest))
        rows.append([text, cell(found, "{:.2g}"), _said(short, "above 1")])
    for lr in lrs:
        for value, whose in (("elr_spread", "of the buffer"), ("base_spread", "of the gradient")):
            text = f"Std(E) {whose} with momentum {most:g}, of that without, lr {lr:g}"
            found = ratios(spread(models[0], lr, most, value), spread(models[0], lr))
            rows.append([text, cell(found, "{:.2f}"), "below 1" if lr <= LOW else "not said"])
    for model in models:
        kept = plain[plain.model == model].dropna(subset=["elr_spread", "test_accuracy"])
        ranks = spearmanr(kept.elr_spread, kept.test_accuracy).statistic if len(kept) > 2 else math.nan
        text = f"{model}: rank correlation of Std(E) and accuracy over rates and seeds"
        rows.append([text, f"{ranks:.2f}" if len(kept) > 2 else "too few", _said(model, "negative")])
    notes = ["paper: Sections 4.2 and 4.3, in words; ResNet-56 on CIFAR-10, 200 epochs, with batch normalization"]
    return Table("what the paper says of them", ["statement", "here", "paper"], rows, notes)


def _said(model: str, what: str) -> str:
    return "not said" if model.endswith("-nobn") else what


def ratios(above: Any, below: Any) -> Any:
    """Quotients seed by seed; NaN where one is missing or below is 0."""
    return above.astype(float) / below.astype(float).replace(0.0, math.nan)


def _draw(results: Any, plain: Any) -> Figure:
    figure, (spread, accuracy, momentum, time) = panels(4, height=3.2)
    models, lrs = list(results.model.unique()), sorted(plain.lr.unique())
    first = results[results.model == models[0]]
    rate, above = "learning rate", "Std(E) over layers"
    marked: dict[str, Any] = {"x": "lr", "marker": "o"}
    band(spread, plain, y="elr_spread", labels=(rate, above), title="no momentum", log="xy", hue="model", **marked)
    tested = (rate, "test accuracy in %")
    band(accuracy, plain, y="test_accuracy", labels=tested, title="no momentum", hue="model", legend=False, **marked)
    title = f"{models[0]}, of the buffer"
    of = first.astype({"momentum": str})
    band(momentum, of, y="elr_spread", labels=(rate, above), title=title, log="xy", hue="momentum", **marked)
    curves = plain[plain.model.isin(models[:2]) & plain.lr.isin([lrs[0], lrs[-1]]) & plain.spread.notna()]
    curves = curves.explode(["steps", "spread"]).astype({"steps": int, "spread": float})
    band(
        time, curves, x="steps", y="spread", labels=("step", above), title="over training, every seed", log="y",
        hue="model", style="lr", units="name", estimator=None, errorbar=None,
    )  # fmt: skip
    # colours as in the legend below
    handles, labels = time.get_legend_handles_labels()
    of_lr = labels.index("lr") + 1
    time.legend(handles[of_lr:], [f"lr {lr}" for lr in labels[of_lr:]], frameon=False, fontsize="small", loc="best")
    shared_legend(spread)
    return figure


STUDY = Study(
    name="elr-spread",
    doc="The spread of effective learning rates over layers and test accuracy, by learning rate, with and without "
    "shortcuts, normalization and momentum (Spreads in Effective Learning Rates, Figures 3 and 5).",
    jobs=jobs,
    report=report,
    epochs=4,
)
