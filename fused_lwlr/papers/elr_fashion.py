"""A deep network without shortcuts on Fashion-MNIST, by SGD with momentum and decay, with neither, and with every layer
held at one effective learning rate: test accuracy and the spread over layers, with warm-up and without (Spreads in
Effective Learning Rates, Figures 8 and 9). `DEEP` is the same on digits, with a deeper network and for longer.
"""

from functools import partial
from typing import Any

from fused_lwlr.papers import images
from fused_lwlr.papers.elr_constrained import BOTH, COLORS, NEITHER, OTHERS, WARMUP
from fused_lwlr.papers.elr_spread import train_recorded
from fused_lwlr.papers.framework import Settings
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table, summary
from fused_lwlr.papers.training import recipe_of

GOAL = 0.1
"""‖g‖ / ‖w‖ that constrained layers are held at; the rates of the study are lr · goal."""
SETUPS: images.Arms = {
    "momentum, decay": (BOTH, (0.01, 0.03, 0.1)),
    "neither": (NEITHER, (0.1, 0.3, 1.0)),
    "constrained": ({**NEITHER, "scaling": "elr", "goal": GOAL}, (0.01, 0.03, 0.1)),
}
GAIN = Grid({"SGD with": "setup", "warm-up": "warmup"}, rivals={WARMUP: 0.0})
"""Each setup with warm-up against the same without it."""
NETWORKS = {"elr-fashion": "noshort20x8", "elr-deep": "noshort56x8"}
EVERY = 10
"""Steps from each record of E to the next."""


def nets(settings: Settings) -> list[tuple[dict[str, Any], images.Arms]]:
    """A network without warm-up and with it, and every setup; at one rate in a quick study."""
    model = settings.model or ("noshort8x4" if settings.quick else NETWORKS[settings.study])
    setups = {setup: (of, settings.few(lrs, 1)) for setup, (of, lrs) in SETUPS.items()}
    return [({"model": model, "warmup": warmup}, setups) for warmup in (0.0, WARMUP)]


def measure(setup: str, lr: float, **common: Any) -> dict[str, Any]:
    """As `images.train_arm`, and Std(E) over convolutions, averaged over the training.

    With momentum E comes from the buffer (Eq. 11).
    """
    fields = SETUPS[setup][0]
    lr = lr / fields.get("goal", 1.0)
    recipe = recipe_of(**{"init": "model", **images.FIELDS, "lr": lr, **fields, **common})
    found, recorders = train_recorded(recipe, EVERY, tuned=True)
    return {**found.last, "elr_spread": None if found.problem else recorders[1].history.summary()["elr_spread"]}


def tables(grid: Grid, settings: Settings, results: Any) -> list[Table]:
    """Accuracy and spread at the best rate of each setup, their differences, and all rates."""
    notes = [
        f"{results.model.iloc[0]}, {settings.over}; batches of {images.BATCH} images; He's initialization",
        f"warm-up: {WARMUP:.0%} of the training, then a cosine; none: a cosine alone",
        f"constrained: every scale-invariant layer at ‖g‖ = {GOAL:g} ‖w‖, all weights divided by the largest norm; its "
        "rates are lr · goal",
        "difference: test accuracy in points; neither minus momentum and decay, constrained minus the better of both",
        "paper: Figure 8, ResNet-110 without shortcuts on CIFAR-10: constrained 73.9 %, and 34.0 % at most without the "
        "constraint, both without warm-up",
    ]
    title = "one effective learning rate in a deep network without shortcuts, each setup at its best rate"
    compared, rates = grid.tables(results, title, notes)
    best = grid.best(results)
    notes = [
        "Std(E): over convolutions, averaged over the training; for constrained layers before they are held",
        "difference: test accuracy with warm-up minus without",
    ]
    values = {"Std(E)": ("elr_spread", "{:.3g}"), **GAIN.differences(best, "test_accuracy", "{:+.2f}")}
    spread = summary("spread at the best rates, and the gain of warm-up", best, grid.by, values, notes)
    return [compared, spread, rates]


study = partial(
    images.study, train=measure, by={"warm-up": "warmup", "SGD with": "setup"}, nets=nets, tables=tables,
    rivals={"neither": "momentum, decay", "constrained": OTHERS},
    form="{setup}-lr{lr:g}-warmup{warmup:g}-seed{seed}",
    lines={"of_rate": "learning rate (× goal)", "hue": "setup", "palette": COLORS, "panel": ("warm",)},
    columns={"warm": lambda of: of.warmup.map({0.0: "no warm-up", WARMUP: "warm-up"})},
)  # fmt: skip
STUDY = study("elr-fashion", __doc__, steps=300)
DEEP = study(
    "elr-deep",
    "A network of 56 layers without shortcuts on digits: SGD with momentum and decay, with neither, and with every "
    "layer held at one effective learning rate, with warm-up and without (Spreads in Effective Learning Rates, Figure "
    "8).",
    epochs=60, data="digits",
)  # fmt: skip
