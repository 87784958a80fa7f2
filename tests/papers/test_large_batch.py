"""The study of large batches: its arms, and a smoke test through the command, on small files."""

import numpy as np
from idx_files import arrays, save
from test_lwlr_studies import quick, spread

from fused_lwlr.papers import large_batch
from fused_lwlr.papers.large_batch import ARMS, PLAIN
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.training import Trained

STUDY = find("large-batch")


def test_what_each_arm_trains(monkeypatch):
    recipes = {}

    def untrained(recipe, *, tuned):
        assert tuned
        recipes[job.parameters["arm"], recipe.batch_size] = recipe
        return Trained(losses=[1.0], accuracies=[50.0], val_loss=1.0)

    monkeypatch.setattr(large_batch, "train", untrained)
    jobs = STUDY.jobs(STUDY.settings())
    assert len(jobs) == (2 * len(ARMS) + 5) * 3 * 2
    for job in jobs:
        assert job.function(**job.parameters)["test_accuracy"] == 50.0
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


def test_a_smoke_test(tmp_path):
    save(tmp_path / "small", arrays(train=100))
    (table, grid), jobs = quick(
        "large-batch", tmp_path / "out", "--data", f"idx:{tmp_path / 'small'}", "--model", "resnet8x2",
        "--set", "calibration_steps=2",
    )  # fmt: skip
    assert [(row["batch"], row["optimizer"]) for row in table] == [("32", arm) for arm in ARMS]
    assert len(jobs) == 2 * len(grid) == 2 * len(ARMS) * 2
    losses, chosen = {}, {}
    for job in jobs:
        of, values = job["parameters"], job["values"]
        losses.setdefault((str(of["batch_size"]), of["arm"]), {}).setdefault(f"{of['lr']:g}", []).append(values)
    for row in table:
        arm = row["batch"], row["optimizer"]
        best = min(losses[arm], key=lambda lr: np.mean([values["val_loss"] for values in losses[arm][lr]]))
        assert row["best lr"] == best
        chosen[arm] = np.array([values["test_accuracy"] for values in losses[arm][best]])
        assert row["test accuracy %"] == spread(chosen[arm], 2)
    for row in table:
        over = ""
        if row["optimizer"] in PLAIN:
            gain = chosen[row["batch"], row["optimizer"]] - chosen[row["batch"], PLAIN[row["optimizer"]]]
            over = f"{gain.mean():+.2f} ± {gain.std(ddof=1):.2f}"
        assert row.get("difference", "").strip() == over
