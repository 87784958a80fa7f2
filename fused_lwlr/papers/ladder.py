"""A search for the best learning rate of each arm: few rates first, and further ones where the best is at an edge."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fused_lwlr.papers import comparison
from fused_lwlr.papers.framework import Job, Settings
from fused_lwlr.papers.tables import Table, cell
from fused_lwlr.papers.tuning import best

LADDER = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""All learning rates that a search can reach."""
CHOOSING = 2
"""Seeds that choose a rate."""


def choosing(settings: Settings) -> int:
    """The number of seeds that choose a rate."""
    return min(CHOOSING, settings.seeds)


def next_jobs(settings: Settings, results: Any, by: Sequence[str], make: Callable[..., Job]) -> list[Job]:
    """For each arm the next rate of `LADDER`, if its best one is at an edge; otherwise the other seeds at its best.

    Args:
        settings: of the study. With `quick`, no rate follows.
        results: a data frame of pandas, with a row for each training.
        by: columns that tell arms apart.
        make: the job of an arm, called with the values of `by`, a rate and a seed.
    """
    chosen = dict(list(best(results, by=by, choosing=choosing(settings)).groupby(list(by)).lr))
    jobs = []
    for arm, of in results.groupby(list(by), sort=False):
        lr = float(chosen[arm].iloc[0])
        edge = None if settings.quick else _beyond(sorted(set(of.lr)), lr)
        seeds = range(choosing(settings)) if edge is not None else range(choosing(settings), settings.seeds)
        jobs += [make(*arm, lr if edge is None else edge, seed) for seed in seeds]
    return jobs


def _beyond(lrs: Sequence[float], lr: float) -> float | None:
    """The rate of `LADDER` next to the lowest or highest of `lrs`, if `lr` is this one."""
    at = LADDER.index(lr)
    beyond = at - 1 if lr == lrs[0] else at + 1 if lr == lrs[-1] else -1
    return LADDER[beyond] if 0 <= beyond < len(LADDER) else None


def tables(
    settings: Settings, results: Any, *, title: str, by: Sequence[str], columns: Sequence[str],
    rivals: Mapping[str, str], notes: Sequence[str],
) -> list[Table]:  # fmt: skip
    """Test accuracy at the best rate of each arm, with differences from another arm; and all rates.

    Args:
        settings, results, by: as of `next_jobs`. The last of `by` is the name of the arm.
        columns: of the tables, a name for each of `by`.
        rivals: the arm that an arm is compared with.
    """
    seeds = choosing(settings)
    found = dict(list(best(results, by=by, choosing=seeds).groupby(list(by))))
    # in the order of the jobs
    chosen = {arm: found[arm] for arm, _ in results.groupby(list(by), sort=False) if arm in found}
    accuracy = {arm: of.set_index("seed").test_accuracy.astype(float) for arm, of in chosen.items()}
    rows = []
    for arm, of in chosen.items():
        rival = (*arm[:-1], rivals.get(arm[-1]))
        over = [""] * len(comparison.COLUMNS)
        if rival in chosen:
            over = comparison.cells(accuracy[arm] - accuracy[rival], "{:+.2f}")
        rows.append([*_labels(*arm), f"{of.lr.iloc[0]:g}", cell(of.test_accuracy, "{:.2f}"), *over])
    choice = f"best lr: by the loss on held-out images, mean over {seeds} seeds; the other seeds run at it alone"
    names = [*columns, "best lr", "test accuracy %", *comparison.COLUMNS]
    compared = Table(title, names, rows, [*notes, choice, comparison.NOTE], labels=len(by))
    rates = [
        [*_labels(*arm), f"{lr:g}", cell(at.val_loss), cell(at.test_accuracy, "{:.1f}")]
        for arm, of in results[results.seed < seeds].groupby(list(by), sort=False)
        for lr, at in of.groupby("lr")
    ]
    names = [*columns, "lr", "held-out loss", "test accuracy %"]
    return [compared, Table(f"all learning rates, {seeds} seeds", names, rates, labels=len(by) + 1)]


def _labels(*arm: Any) -> list[str]:
    return [value if isinstance(value, str) else f"{value:,}" for value in arm]
