"""A search for the best learning rate of each arm: few rates first, and further ones where the best is at an edge."""

from collections.abc import Callable, Sequence
from typing import Any

from fused_lwlr.papers.framework import Job, Settings
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
    chosen = best(results, by=by, choosing=choosing(settings)).groupby(list(by)).lr.first()
    jobs = []
    for arm, of in results.groupby(list(by), sort=False):
        lr = float(chosen[arm])
        edge = None if settings.quick else _beyond(sorted(set(of.lr)), lr)
        seeds = range(choosing(settings)) if edge is not None else range(choosing(settings), settings.seeds)
        jobs += [make(*arm, lr if edge is None else edge, seed) for seed in seeds]
    return jobs


def _beyond(lrs: Sequence[float], lr: float) -> float | None:
    """The rate of `LADDER` next to the lowest or highest of `lrs`, if `lr` is this one."""
    at = LADDER.index(lr)
    beyond = at - 1 if lr == lrs[0] else at + 1 if lr == lrs[-1] else -1
    return LADDER[beyond] if 0 <= beyond < len(LADDER) else None
