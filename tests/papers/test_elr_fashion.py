"""The studies of deep networks on Fashion-MNIST and digits: their arms, and a smoke test on small files."""

import pytest
from idx_files import arrays, save
from test_lwlr_studies import quick, spread

from fused_lwlr.papers import elr_fashion
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

    def untrained(recipe, *, optimizer, tuned):
        assert tuned
        key = job.parameters["setup"], job.parameters["warmup"]
        recipes.setdefault(key, []).append((recipe, job.parameters["lr"]))
        return Trained(problem="diverged")

    monkeypatch.setattr(elr_fashion, "train", untrained)
    for job in study.jobs(study.settings()):
        assert set(job.function(**job.parameters).values()) == {None}
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
    save(tmp_path / "small", arrays(train=100))
    (table, spreads, grid), jobs = quick("elr-fashion", tmp_path / "out", "--data", f"idx:{tmp_path / 'small'}")
    assert [(row["warm-up"], row["SGD with"]) for row in table] == [(w, s) for w in ("0", "0.1") for s in SETUPS]
    assert len(jobs) == 2 * len(grid) == 2 * len(table) == 2 * len(spreads)
    for row, other in zip(table, spreads, strict=True):
        of = [
            job["values"] for job in jobs
            if (f"{job['parameters']['warmup']:g}", job["parameters"]["setup"]) == (row["warm-up"], row["SGD with"])
        ]  # fmt: skip
        assert row["test accuracy %"] == spread([values["test_accuracy"] for values in of], 2)
        assert all(values["elr_spread"] > 0 for values in of)
        assert ("difference" in row and bool(row["difference"].strip())) is (row["SGD with"] != "momentum, decay")
        assert ("difference" in other and bool(other["difference"].strip())) is (other["warm-up"] != "0")
