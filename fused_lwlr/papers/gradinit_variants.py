"""Test accuracy after GradInit with other arguments: overlap of minibatches, a penalty in place of the bound, no bound,
scales of a part of the parameters; after learning scales in the training; and with AdamW (GradInit, Tables 1, 2, 4, 5
and 8, and "Generalizing to Adam").
"""

from collections.abc import Iterable
from math import inf
from typing import Any

import seaborn
from matplotlib.figure import Figure
from torch import Tensor

from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import panels
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.gradinit import CHOICE, MODELS, TAUS, TRIED, taus
from fused_lwlr.papers.grid import CHOOSING, Grid
from fused_lwlr.papers.starts import start_, train_after
from fused_lwlr.papers.tables import Table, summary


def is_scale(name: str, param: Tensor) -> bool:
    """Whether a parameter is the scale of a normalization."""
    return param.dim() == 1 and name.endswith("weight")


SAME = "as in the authors' scripts"
ARGUMENTS: dict[str, dict[str, Any] | str] = {
    SAME: {},
    "no overlap": {"overlap": 0.0},
    "the same minibatch": {"overlap": 1.0},
    "penalty 0.0001": {"penalty": 1e-4},
    "penalty 0.01": {"penalty": 1e-2},
    "penalty 1": {"penalty": 1.0},
    "no bound": {"gamma": inf},
    "no bound, the same minibatch": {"gamma": inf, "overlap": 1.0},
    "fixed scales of BN": {"select": lambda name, param: not is_scale(name, param)},
    "only scales of BN": {"select": is_scale},
    "learned scalars": "scalars",
    "AdamW, He": "kaiming",
    "AdamW, GradInit": {"gamma": 25.0},
    "AdamW, He, +1 epoch": "constant",
}
"""Variant -> arguments of `gradinit_` or a start of `start_`. All variants of GradInit with SGD have `normalize=True`,
as the authors' scripts."""
ADAMW = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.2}
"""Fields of the variants with AdamW (Section 4.1, "Generalizing to Adam")."""
RIVALS = dict.fromkeys(list(ARGUMENTS)[1:-3], SAME) | {
    "AdamW, GradInit": "AdamW, He", "AdamW, He, +1 epoch": "AdamW, GradInit",
}  # fmt: skip
"""Variant -> the variant to compare it with."""
GRID = Grid({"net": "model", "variant": "init"}, rate="tau", outcome="last", rivals=RIVALS, choosing=CHOOSING)
WITH_BN = {
    SAME: "38.2 ± 0.9", "penalty 0.0001": "32.4", "penalty 0.01": "32.6", "penalty 1": "36.5",
    "no bound": "38.4 ± 1.5", "no bound, the same minibatch": "13.8 ± 2.5", "fixed scales of BN": "24.7 ± 3.1",
    "only scales of BN": "25.4 ± 3.1", "learned scalars": "21.5 ± 6.9", "AdamW, He": "36.6 ± 4.7",
    "AdamW, GradInit": "40.2 ± 0.2", "AdamW, He, +1 epoch": "",
}  # fmt: skip
WITHOUT_BN = {
    SAME: "29.3 ± 0.6", "no overlap": "21.9 ± 4.4", "the same minibatch": "28.7 ± 1.0", "penalty 0.0001": "32.3",
    "penalty 0.01": "30.4", "penalty 1": "18.2",
}  # fmt: skip
"""Accuracy in % after the first epoch of CIFAR-10, with the standard error of 4 seeds where the paper has it:
ResNet-110 with BN (Tables 2, 4 and 5; without a bound VGG-19 with BN, Table 8), and VGG-19 without BN (Tables 1, 2)."""

NETS: dict[str, Iterable[str]] = {
    **dict(zip(MODELS[:2], (WITH_BN, WITHOUT_BN), strict=True)),
    "resnet110x4": [init for init in WITH_BN if init.startswith("AdamW")],
}
"""Net -> its variants."""


def jobs(settings: Settings) -> list[Job]:
    """Every net with the variants of the paper, or a model with all that it has; at all rates of the scales."""
    nets = NETS
    if settings.model is not None:
        has_scales = not settings.model.endswith(("-nobn", "-noaffine"))
        nets = {settings.model: [init for init in ARGUMENTS if has_scales or not init.endswith("scales of BN")]}
    cells = [
        {"model": model, "init": init, "tau": tau}
        for model, variants in nets.items() for init in settings.few(list(variants), 2)
        for tau in taus(settings, (0.0,) if isinstance(ARGUMENTS[init], str) else TAUS)
    ]  # fmt: skip
    return settings.jobs(train_variant, "{model}-{init}-tau{tau:g}-seed{seed}", cells, seeds=CHOOSING)


def train_variant(init: str, tau: float, **common: Any) -> dict[str, Any]:
    """The results of `train_after` a variant."""
    arguments = ARGUMENTS[init]
    start = arguments if isinstance(arguments, str) else {"normalize": True, **arguments}
    fields: dict[str, Any] = ADAMW if init.startswith("AdamW") else {}
    return train_after(lambda trainer: start_(trainer, start, tau), **fields, **common)


def tables(settings: Settings, results: Any) -> list[Table]:
    """Accuracy after the first epoch, and the difference from GradInit as in the authors' scripts."""
    best = GRID.best(results)
    values = {
        "best τ": GRID.rate_of,
        "first epoch %": ("first", "{:.1f}"),
        "best %": ("best", "{:.1f}"),
        **GRID.differences(best, "first", "{:+.1f}"),
        "paper: first epoch %": lambda of: (WITH_BN if of.normalized.iloc[0] else WITHOUT_BN).get(of.init.iloc[0], ""),
    }
    notes = [
        f"{settings.data}, {settings.epochs} epochs of SGD at 0.1 with a cosine after one pass of GradInit, test "
        f"accuracy, mean ± standard deviation over {settings.seeds} seeds",
        f'difference: after the first epoch, in points minus "{SAME}": overlap 0.5, a bound with η·γ² = 0.1, g / ‖g‖, '
        "all parameters",
        "AdamW: at 0.003 with a decay of 0.2, and GradInit with γ = 25; differences: GradInit minus He's "
        "initialization, and an epoch more after the latter, on the same images, minus GradInit",
        comparison.NOTE,
        CHOICE,
        "paper: CIFAR-10, mean of 4 seeds, with ± standard error where the paper has it: ResNet-110 with BN (Tables 2, "
        "4, 5; without a bound VGG-19 with BN, Table 8; AdamW in Section 4.1), VGG-19 without BN (Tables 1, 2)",
    ]
    compared = summary("GradInit with other arguments", best, GRID.by, values, notes)
    return [compared, GRID.rates(results, "all τ", "τ", TRIED)]


def draw(results: Any) -> Figure:
    """Accuracy after the first epoch at the best rates, with the standard deviation over seeds."""
    best = GRID.best(results).astype({"first": float})
    models = list(best.model.unique())
    figure, axes_of = panels(len(models))
    for axes, model in zip(axes_of, models, strict=True):
        seaborn.barplot(best[best.model == model], x="first", y="init", errorbar="sd", color="#00798c", ax=axes)
        axes.set(xlabel="test accuracy in %", ylabel="", title=model, xlim=(0, 100))
        axes.spines[["top", "right"]].set_visible(False)
    return figure


STUDY = Study("gradinit-variants", __doc__, jobs, tables, draw, grid=GRID, epochs=6)
