"""The demo, in minutes: layer-wise rates against a single one, and constrained effective rates, on handwritten digits.

The trainings of two studies: `lwlr_vs_single`, and fewer arms of `elr_constrained`, a deep net without shortcuts.
"""

from itertools import product
from typing import Any

from fused_lwlr.papers import elr_constrained, lwlr_vs_single
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell

PLAIN = elr_constrained.SETUPS["neither"]
ARMS = (
    ("momentum, decay", elr_constrained.SETUPS["momentum, decay"][0]),
    *(("neither", of) for of in (PLAIN[0], PLAIN[2])),
    ("constrained", elr_constrained.SETUPS["constrained"][0]),
)
"""SGD at its best rates without shortcuts, at that of constrained ELR, and constrained ELR."""


def jobs(settings: Settings) -> list[Job]:
    """Those of both studies; the order is that in which they are shown."""
    arms = product(ARMS[-1:] if settings.quick else ARMS, range(settings.seeds))
    return [
        *lwlr_vs_single.jobs(settings),
        *(elr_constrained.job(settings, "noshort", setup, of, 0.0, seed) for (setup, of), seed in arms),
    ]


def report(settings: Settings, results: Any) -> Report:
    """A table of each study, and curves of the first."""
    layerwise, deep = lwlr_vs_single.report(settings, results.dropna(subset="kind")), results.dropna(subset="setup")
    return Report([layerwise.tables[0], _deep(settings, deep)], layerwise.figure)


def _deep(settings: Settings, results: Any) -> Table:
    rows = []
    for (setup, lr, goal), of in results.groupby(["setup", "lr", "goal"], sort=False, dropna=False):
        rates = [setup, f"{lr:g}", f"{goal:g}" if goal == goal else ""]
        rows.append([*rates, cell(of.test_accuracy, "{:.1f}"), cell(of.train_loss, "{:.2f}")])
    notes = [f"{settings.over}; no warm-up", "constrained: every layer's gradient scaled to ‖g‖ = goal · ‖w‖"]
    columns = ["SGD with", "lr", "goal", "test accuracy %", "training loss"]
    return Table("32 convolutions without shortcuts", columns, rows, notes, labels=3)


STUDY = Study(
    name="demo",
    doc="Layer-wise rates against a single one, for a small ResNet and a small ViT, and a deep net without shortcuts "
    "whose layers are held at one effective learning rate: 1797 handwritten digits, a few minutes.",
    jobs=jobs,
    report=report,
    seeds=1,
    least_seeds=1,
    options=frozenset({"epochs", "seeds"}),
)
