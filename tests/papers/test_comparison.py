"""The paired t test of studies against SciPy's, and against a printed table of Student's distribution."""

import math
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy.stats import ttest_rel

from bench import studies
from fused_lwlr.papers.comparison import against, compare, p_text
from fused_lwlr.papers.store import load_recorded
from fused_lwlr.papers.studies import find


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_p_is_that_of_scipy(n):
    one, other = np.random.default_rng(n).normal([[0.4], [0.0]], size=(2, n))
    assert compare(one - other)[:2] == (n, pytest.approx(ttest_rel(one, other).pvalue))


@pytest.mark.parametrize(("n", "critical"), [(3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262)])
@pytest.mark.parametrize("lower_is_better", [False, True])
def test_a_difference_is_decided_from_the_printed_critical_value_on(n, critical, lower_is_better):
    """Critical values of Student's t at 5 %, two-sided, with n − 1 degrees of freedom, have three decimals."""
    noise = np.linspace(-1, 1, n)
    error = noise.std(ddof=1) / math.sqrt(n)
    for factor, verdicts in ((0.999, ("undecided", "undecided")), (1.001, ("helps", "hurts"))):
        sign = -1 if lower_is_better else 1
        for way, verdict in zip((sign, -sign), verdicts, strict=True):
            differences = noise + way * factor * critical * error
            assert compare(differences, lower_is_better=lower_is_better)[2] == verdict


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([3.0, -1.0, 0.0], ["+0.7 ± 2.1", "0.63", "3", "undecided"]),
        ([1.0, 1.1, float("nan"), 0.9], ["+1.0 ± 0.1 (1 of 4 diverged)", "0.0033", "3", "helps"]),
        ([-0.5, -0.5], ["-0.5 ± 0.0", "< 0.001", "2", "hurts"]),
        ([0.0, 0.0], ["+0.0 ± 0.0", "-", "2", "undecided"]),
        ([1.0, float("nan")], ["+1.0 (1 of 2 diverged)", "-", "1", "undecided"]),
    ],
)
def test_cells(differences, expected):
    ours, rival = (
        pandas.DataFrame({"seed": range(len(of)), "loss": of}) for of in (differences, [0.0] * len(differences))
    )
    assert against(ours, rival, "loss", "{:+.1f}") == expected
    assert against(ours, None, "loss", "{:+.1f}") == [""] * 4


def test_p_has_two_digits():
    assert [p_text(p) for p in (0.0999, 0.04951, 0.00123, 0.0009, math.nan)] == [
        "0.1",
        "0.05",
        "0.0012",
        "< 0.001",
        "-",
    ]


@pytest.mark.parametrize("folder", sorted(Path(studies.RECORDED).iterdir()), ids=lambda folder: folder.name)
def test_recorded_tables_follow_from_recorded_results(folder):
    """They are what `python -m bench.studies` writes."""
    study = find(folder.name)
    tables = study.tables(*load_recorded(folder / "results.json", study))
    assert (folder / "table.md").read_text() == "\n".join(table.markdown() for table in tables)
