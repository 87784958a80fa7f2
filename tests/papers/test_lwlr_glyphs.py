"""The study of layer-wise rates on glyphs: its arms, and a smoke test through the command."""

import numpy as np
import pandas
import pytest
from idx_files import arrays, save
from test_lwlr_studies import quick, spread

from fused_lwlr.papers import lwlr_fashion
from fused_lwlr.papers.lwlr_fashion import ARMS, CONTROL
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.training import Trained

STUDY = find("lwlr-glyphs")


def test_what_each_arm_trains(monkeypatch):
    recipes = {}

    def untrained(recipe, *, tuned):
        assert tuned
        recipes[job.parameters["arm"]] = recipe
        return Trained(losses=[1.0], accuracies=[50.0], val_loss=1.0)

    monkeypatch.setattr(lwlr_fashion, "train", untrained)
    jobs = STUDY.jobs(STUDY.settings())
    assert len(jobs) == len(ARMS) * 5 * 5
    for job in jobs:
        job.function(**job.parameters)
    assert [(r.init, r.rates, r.rates_exclude) for r in recipes.values()] == [
        ("model", "single", None), ("lwlr", "single", None), ("lwlr", "layerwise", ()),
        ("lwlr", "layerwise", ("cls_token", "pos_embed")),
    ]  # fmt: skip
    common = {(r.optimizer, r.data, r.model, r.image_size, r.epochs, r.augmentation) for r in recipes.values()}
    assert common == {("sgd", "glyphs", "vit4x96", 16, 20.0, "none")}


def test_an_arm_is_compared_at_its_best_rate_with_the_control():
    rows = [
        {"model": "vit", "arm": arm, "lr": lr, "seed": seed, "val_loss": loss, "train_loss": 1.0, "test_accuracy": top}
        for arm, lr, loss, tops in (
            (CONTROL, 0.1, 1.0, (80.0, 81.0)), (CONTROL, 0.3, 2.0, (99.0, 99.0)),
            ("LWLR", 0.1, 3.0, (10.0, 10.0)), ("LWLR", 0.3, 0.5, (83.0, 85.0)),
        )
        for seed, top in enumerate(tops)
    ]  # fmt: skip
    table, grid = STUDY.report(STUDY.settings(seeds=2), pandas.DataFrame(rows)).tables
    found = {row[0]: row[1:] for row in table.rows}
    assert found[CONTROL][:3] == ["0.1", spread([80.0, 81.0], 2), ""]
    assert found["LWLR"][:3] == ["0.3", spread([83.0, 85.0], 2), "+3.50 ± 0.71"]
    assert len(grid.rows) == 4


@pytest.mark.long
def test_a_smoke_test(tmp_path):
    save(tmp_path / "small", arrays(train=100))
    (table, grid), jobs = quick("lwlr-glyphs", tmp_path / "out", "--data", f"idx:{tmp_path / 'small'}")
    assert len(jobs) == len(grid) * 2 == len(ARMS) * 2 * 2
    for row in table:
        of = [job for job in jobs if job["parameters"]["arm"] == row["arm"]]
        values = [job["values"]["test_accuracy"] for job in of if f"{job['parameters']['lr']:g}" == row["best lr"]]
        assert row["test accuracy %"] == spread(values, 2)
        assert np.isfinite(values).all()
