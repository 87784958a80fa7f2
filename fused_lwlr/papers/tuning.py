"""Each arm of a comparison at its own best learning rate."""

from collections.abc import Sequence
from math import inf
from typing import Any


def best(results: Any, by: Sequence[str], score: str = "val_loss") -> Any:
    """The results at the learning rate of each arm whose mean score over seeds is the lowest.

    Args:
        results: a data frame of pandas, with a row for each training and its rate in the column "lr".
        by: columns that tell arms apart.
        score: column that is not of the test images; NaN where a training diverged, which is the worst.
    """
    mean = results.astype({score: float}).fillna({score: inf}).groupby([*by, "lr"], sort=False)[score].mean()
    chosen = set(mean.groupby(level=list(range(len(by))), sort=False).idxmin())
    rows = results[[*by, "lr"]].itertuples(index=False, name=None)
    return results[[row in chosen for row in rows]]
