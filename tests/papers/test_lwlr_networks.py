"""The study of layer-wise rates with several networks and optimizers: its arms, and a smoke test on small files."""

import numpy as np
import pytest
from idx_files import arrays, save
from test_lwlr_studies import quick, spread

from fused_lwlr.papers import lwlr_fashion
from fused_lwlr.papers.lwlr_fashion import ARMS, CONTROL
from fused_lwlr.papers.lwlr_networks import FIRST
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.training import Trained

STUDY = find("lwlr-networks")
NETWORKS = [("resnet8x8", "sgd"), ("resnet8x8", "adamw"), ("vit4x48p4", "adamw")]
GIVEN = [("resnet14x4", "sgd"), ("resnet14x4", "adamw")]
OF_ARMS = {
    "PyTorch's start, one rate": ("model", "single", None), CONTROL: ("lwlr", "single", None),
    "LWLR": ("lwlr", "layerwise", ()), "LWLR but tokens": ("lwlr", "layerwise", ("cls_token", "pos_embed")),
}  # fmt: skip


@pytest.mark.parametrize(("model", "networks"), [(None, NETWORKS), ("resnet14x4", GIVEN)])
def test_what_each_arm_trains(model, networks, monkeypatch):
    recipes = {}

    def untrained(recipe, *, tuned):
        assert tuned
        recipes.setdefault((recipe.model, recipe.optimizer, job.parameters["arm"]), {})[recipe.lr, recipe.seed] = recipe
        return Trained(losses=[1.0], accuracies=[50.0], val_loss=1.0)

    monkeypatch.setattr(lwlr_fashion, "train", untrained)
    for job in STUDY.jobs(STUDY.settings(model=model)):
        assert job.function(**job.parameters)["test_accuracy"] == 50.0
    # a ResNet has no tokens
    assert list(recipes) == [
        (*network, arm) for network in networks for arm in OF_ARMS if network[0][:3] == "vit" or arm[-6:] != "tokens"
    ]
    for (_, optimizer, arm), of in recipes.items():
        assert of.keys() == {(lr, seed) for lr in FIRST[optimizer] for seed in (0, 1)}
        fields = {(r.init, r.rates, r.rates_exclude, r.weight_decay, r.image_size, r.steps) for r in of.values()}
        assert fields == {(*OF_ARMS[arm], {"sgd": 1e-4, "adamw": 0.1}[optimizer], 16, 300)}


def test_a_smoke_test(tmp_path):
    save(tmp_path / "small", arrays(train=100))
    (table, grid), jobs = quick("lwlr-networks", tmp_path / "out", "--data", f"idx:{tmp_path / 'small'}")
    arms = [(optimizer, arm) for optimizer in ("sgd", "adamw") for arm in ARMS]
    assert [(row["optimizer"], row["arm"]) for row in table] == arms
    assert len(jobs) == 2 * len(grid) == 2 * 2 * len(arms)
    chosen = {}
    for row in table:
        rates = {}
        for job in jobs:
            if (job["parameters"]["optimizer"], job["parameters"]["arm"]) == (row["optimizer"], row["arm"]):
                rates.setdefault(job["parameters"]["lr"], []).append(job["values"])
        best = min(rates, key=lambda lr: np.mean([values["val_loss"] for values in rates[lr]]))
        assert float(row["best lr"]) == best
        chosen[row["optimizer"], row["arm"]] = [values["test_accuracy"] for values in rates[best]]
        assert row["test accuracy %"] == spread(chosen[row["optimizer"], row["arm"]], 2)
    for row in table:
        gain = np.subtract(chosen[row["optimizer"], row["arm"]], chosen[row["optimizer"], CONTROL])
        wanted = "" if row["arm"] == CONTROL else f"{np.mean(gain):+.2f} ± {np.std(gain, ddof=1):.2f}"
        assert row.get("difference", "").strip() == wanted
