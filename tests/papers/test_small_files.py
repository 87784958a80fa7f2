"""Smoke tests of studies of images through the command, on small files."""

import pytest
from quick import check, quick_on_files

from fused_lwlr.papers import large_batch
from fused_lwlr.papers.lwlr_fashion import ARMS, CONTROL

OVER_CONTROL = {arm: CONTROL for arm in ARMS if arm != CONTROL}
SGD, ADAMW = ("SGD", "SGD-LW", "SGD-NG", "LARC"), ("AdamW", "AdamW-LW", "Adam-NG", "LAMB")
# name -> columns of the first table that tell arms apart, with parameters of jobs; all arms; whom each is compared with
STUDIES = {
    "lwlr-fashion": ({"arm": "arm"}, [(arm,) for arm in ARMS], OVER_CONTROL),
    "lwlr-networks": (
        {"optimizer": "optimizer", "arm": "arm"}, [(of, arm) for of in ("sgd", "adamw") for arm in ARMS], OVER_CONTROL,
    ),
    "lwlr-methods": (
        {"method": "arm"}, [(arm,) for arm in SGD + ADAMW],
        dict.fromkeys(SGD[1:], "SGD") | dict.fromkeys(ADAMW[1:], "AdamW"),
    ),
    "large-batch": (
        {"batch": "batch_size", "optimizer": "arm"}, [("32", arm) for arm in large_batch.ARMS], large_batch.PLAIN,
    ),
}  # fmt: skip
OPTIONS = {"large-batch": ("--model", "resnet8x2", "--set", "calibration_steps=2")}


@pytest.mark.parametrize("name", STUDIES)
def test_arms_at_their_best_rates(name, tmp_path):
    columns, arms, rivals = STUDIES[name]
    (table, grid), jobs = quick_on_files(name, tmp_path, *OPTIONS.get(name, ()))
    found = check(table, jobs, columns, rivals)
    assert list(found) == arms
    # two rates, two seeds
    assert len(jobs) == 2 * len(grid) == 2 * 2 * len(arms)
