"""The study of large batches: what its arms train."""

from quick import asked

from fused_lwlr.papers import images
from fused_lwlr.papers.large_batch import ARMS
from fused_lwlr.papers.studies import find


def test_what_each_arm_trains(monkeypatch):
    jobs = asked(find("large-batch"), images, monkeypatch)
    assert len(jobs) == (2 * len(ARMS) + 5) * 3 * 2
    recipes = {(of["arm"], recipe.batch_size): recipe for of, recipe, _ in jobs}
    found = {
        arm: (r.optimizer, r.scaling, r.rates, r.weight_decay, r.nesterov, r.lr_in_momentum)
        for (arm, _), r in recipes.items()
    }
    assert found == {
        "SGD": ("sgd", "none", "single", 1e-4, False, False),
        "SGD, Nesterov": ("sgd", "none", "single", 1e-4, True, False),
        "LARS": ("sgd", "lars", "single", 1e-4, False, False),
        "LARS, rate in momentum": ("sgd", "lars", "single", 1e-4, False, True),
        "SGD, LWLR": ("sgd", "none", "layerwise", 1e-4, False, False),
        "AdamW": ("adamw", "none", "single", 0.1, False, False),
        "LAMB": ("adamw", "lamb", "single", 0.1, False, False),
        "AdamW, LWLR": ("adamw", "none", "layerwise", 0.1, False, False),
    }  # fmt: skip
    assert {(r.data, r.image_size, r.epochs, r.init) for r in recipes.values()} == {("fashion-mnist", 14, 3.0, "lwlr")}
    calibration = {batch: r.calibration_steps for (arm, batch), r in recipes.items() if "LWLR" in arm}
    assert calibration == {256: 16, 2048: 2}
