"""Each arm of a comparison at its own best learning rate."""

from collections.abc import Sequence
from math import inf
from typing import Any


def mean_scores(results: Any, by: Sequence[str], score: str = "val_loss", outcome: str = "train_loss") -> Any:
    """The mean score over seeds, by arm and rate: infinite where one seed diverged.

    Args:
        results: a data frame of pandas, with a row for each training.
        by: columns that tell arms and rates apart.
        score: column that is not of the test data; NaN where nothing was held out, which does not count.
        outcome: column that is NaN where a training diverged.
    """
    scores = results[score].astype(float).mask(results[outcome].isna(), inf)
    return results.assign(**{score: scores}).groupby(list(by), sort=False)[score].mean()


def best(
    results: Any,
    by: Sequence[str],
    score: str = "val_loss",
    outcome: str = "train_loss",
    rate: str = "lr",
    choosing: int | None = None,
) -> Any:
    """Returns the results at the learning rate of each arm whose mean score over seeds is the lowest.

    A rate at which a seed diverges is chosen only if a seed diverges at every rate.

    Args:
        results, score, outcome: as of `mean_scores`.
        by: columns that tell arms apart.
        rate: column with the learning rate.
        choosing: the number of seeds that choose. More seeds at the chosen rate do not change the choice. None for all.
    """
    of_choice = results if choosing is None else results[results.seed < choosing]
    mean = mean_scores(of_choice, [*by, rate], score, outcome).fillna(inf)
    chosen = set(mean.groupby(level=list(range(len(by))), sort=False).idxmin())
    rows = results[[*by, rate]].itertuples(index=False, name=None)
    return results[[row in chosen for row in rows]]
