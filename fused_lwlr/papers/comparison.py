"""Whether one way to train is better than another, by a paired t test over seeds."""

from collections.abc import Iterable
from math import inf, isfinite, nan, sqrt
from statistics import mean, stdev
from typing import Any

from scipy.stats import t

from fused_lwlr.papers.tables import cell

LEVEL = 0.05
"""A difference is decided where p is below it."""
COLUMNS = ("difference", "p", "n", "verdict")
NOTE = (
    f"difference: mean ± standard deviation over pairs of the same seed; p: two-sided paired t test over n pairs, not "
    f"corrected for the number of comparisons; undecided: p ≥ {LEVEL:g}"
)


def compare(differences: Iterable[float], *, lower_is_better: bool = False) -> tuple[int, float, str]:
    """A paired t test of differences, a method minus its rival for each seed; without diverged trainings.

    Returns:
        the number of pairs; the two-sided p, NaN for fewer than two pairs and where all differences are 0; and "helps",
        "hurts" or "undecided".
    """
    finite = [value for value in differences if isfinite(value)]
    n, p = len(finite), nan
    if n > 1 and any(finite):
        error = stdev(finite) / sqrt(n)
        p = 2 * float(t.sf(abs(mean(finite)) / error if error else inf, n - 1))
    if not p < LEVEL:
        return n, p, "undecided"
    return n, p, "helps" if (mean(finite) < 0) == lower_is_better else "hurts"


def p_text(p: float) -> str:
    """p to two digits."""
    return "-" if not isfinite(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"


def against(ours: Any, rival: Any | None, value: str, form: str, *, lower_is_better: bool = False) -> list[str]:
    """The cells of a table in `COLUMNS`, of results with a row for each seed; empty without a rival."""
    if rival is None:
        return [""] * len(COLUMNS)
    one, other = (of.set_index("seed")[value].astype(float) for of in (ours, rival))
    n, p, verdict = compare(one - other, lower_is_better=lower_is_better)
    return [cell(one - other, form), p_text(p), str(n), verdict]
