"""The study of Table 2 on Fashion-MNIST: its arms, and a smoke test on small files."""

import pytest
from idx_files import arrays, save
from test_lwlr_studies import quick, spread

from fused_lwlr.papers import lwlr_methods
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.training import Trained

STUDY = find("lwlr-methods")
SGD, ADAMW = ("sgd", 1e-4), ("adamw", 0.1)
# method -> optimizer and weight decay, rates of layers, scaling, trust coefficient, lowest rate
ARMS = {
    "SGD": (*SGD, "single", "none", 0.03), "SGD-LW": (*SGD, "layerwise", "none", 0.03),
    "SGD-NG": (*SGD, "single", "ng", 0.03), "LARC": (*SGD, "single", "larc", 0.1),
    "AdamW": (*ADAMW, "single", "none", 0.003), "AdamW-LW": (*ADAMW, "layerwise", "none", 0.003),
    "Adam-NG": (*ADAMW, "single", "ng", 0.003), "LAMB": (*ADAMW, "single", "lamb", 0.003),
}  # fmt: skip


@pytest.mark.parametrize("model", [None, "resnet14x4"])
def test_what_each_arm_trains(model, monkeypatch):
    recipes = {}

    def untrained(recipe, *, tuned):
        assert tuned
        recipes.setdefault(job.parameters["arm"], []).append(recipe)
        return Trained(losses=[1.0], accuracies=[50.0], val_loss=1.0)

    monkeypatch.setattr(lwlr_methods, "train", untrained)
    for job in STUDY.jobs(STUDY.settings(model=model)):
        assert job.function(**job.parameters)["test_accuracy"] == 50.0
    assert list(recipes) == list(ARMS)
    for arm, of in recipes.items():
        optimizer, decay, rates, scaling, lowest = ARMS[arm]
        assert len({(recipe.lr, recipe.seed) for recipe in of}) == len(of) == 3 * 2
        assert {(recipe.optimizer, recipe.weight_decay, recipe.rates, recipe.scaling) for recipe in of} == {
            (optimizer, decay, rates, scaling)
        }
        assert min(recipe.lr for recipe in of) == lowest
        assert {(recipe.init, recipe.model, recipe.image_size, recipe.batch_size, recipe.steps) for recipe in of} == {
            ("lwlr", model or "resnet8x8", 14, 64, 300)
        }
        assert arm != "LARC" or {recipe.trust_coefficient for recipe in of} == {0.001}


def test_a_smoke_test(tmp_path):
    save(tmp_path / "small", arrays(train=100))
    (table, grid), jobs = quick("lwlr-methods", tmp_path / "out", "--data", f"idx:{tmp_path / 'small'}")
    assert [row["method"] for row in table] == list(ARMS)
    assert len(jobs) == 2 * len(grid) == 2 * 2 * len(ARMS)
    for row in table:
        found = [
            job["values"]["test_accuracy"] for job in jobs
            if job["parameters"]["arm"] == row["method"] and job["parameters"]["lr"] == float(row["best lr"])
        ]  # fmt: skip
        assert row["test accuracy %"] == spread(found, 2)
        assert ("difference" in row and bool(row["difference"].strip())) is (row["method"] not in ("SGD", "AdamW"))
