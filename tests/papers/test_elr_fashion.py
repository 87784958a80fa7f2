"""The studies of deep networks on Fashion-MNIST and digits: their arms, and a smoke test on small files."""

import pytest
from quick import asked, check, quick_on_files

from fused_lwlr.papers import elr_spread
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.training import Trained

# momentum, weight decay, scaling, and the lowest rate
SETUPS = {
    "momentum, decay": (0.9, 1e-4, "none", 0.01), "neither": (0.0, 0.0, "none", 0.1),
    "constrained": (0.0, 0.0, "elr", 0.1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "common"),
    [
        ("elr-fashion", {"data": "fashion-mnist", "model": "noshort20x8", "image_size": 14, "steps": 300}),
        ("elr-deep", {"data": "digits", "model": "noshort56x8", "epochs": 60}),
    ],
)
def test_what_each_arm_trains(name, common, monkeypatch):
    study, recipes = find(name), {}
    # with any data
    assert {job.parameters["model"] for job in study.jobs(study.settings(data="glyphs"))} == {common["model"]}

    for of, recipe, values in asked(study, elr_spread, monkeypatch, result=Trained(problem="diverged")):
        assert set(values.values()) == {None}
        recipes.setdefault((of["setup"], of["warmup"]), []).append((recipe, of["lr"]))
    assert list(recipes) == [(setup, warmup) for warmup in (0.0, 0.1) for setup in SETUPS]
    for (setup, warmup), of in recipes.items():
        momentum, decay, scaling, lowest = SETUPS[setup]
        assert len({(recipe.lr, recipe.seed) for recipe, _ in of}) == len(of) == 3 * 2
        assert {(r.momentum, r.weight_decay, r.scaling, r.warmup_epochs / r.epochs) for r, _ in of} == {
            (momentum, decay, scaling, warmup)
        }
        assert min(recipe.lr for recipe, _ in of) == pytest.approx(lowest)
        assert all(rate == pytest.approx(recipe.lr * (recipe.goal if scaling == "elr" else 1)) for recipe, rate in of)
        for recipe, _ in of:
            assert (recipe.batch_size, recipe.init, recipe.augmentation) == (64, "model", "none")
            assert {option: getattr(recipe, option) for option in common} == common


def test_a_smoke_test(tmp_path):
    (table, spreads, grid), jobs = quick_on_files("elr-fashion", tmp_path)
    rivals = {"neither": "momentum, decay", "constrained": ("momentum, decay", "neither")}
    values = check(table, jobs, {"warm-up": "warmup", "SGD with": "setup"}, rivals)
    assert list(values) == [(warmup, setup) for warmup in ("0", "0.1") for setup in SETUPS]
    assert len(jobs) == 2 * len(grid) == 2 * len(table) == 2 * len(spreads)
    assert all(job["values"]["elr_spread"] > 0 for job in jobs)
    for row in spreads:
        assert ("difference" in row and bool(row["difference"].strip())) is (row["warm-up"] != "0")
