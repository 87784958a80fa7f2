"""The bench of whole trainings: every optimizer takes the steps, and the written values are consistent."""

import pytest

from bench import training
from fused_lwlr.data import open_data
from fused_lwlr.training.presets import resolve

MODELS = training.SIZES["quick"].models


@pytest.mark.parametrize("preset", MODELS)
def test_rows(preset):
    options = {"rates": "single", "init": "model", "augmentation": "none", "device": "cpu", "workers": 0}
    sizes = {"image_size": 16, "batch_size": 8, "micro_batch": 4, "mixup": 0.0}
    recipe = resolve(preset, {**options, **sizes, **MODELS[preset]})
    data = open_data("synthetic", image_size=16, augmentation="none", synthetic=(24, 2, 5))
    rows = [row for files in (False, True) for row in training.timed(recipe, data, 1, files=files)]
    assert [row["optimizer"] for row in rows[:5]] == [
        "ours", "ours, layer-wise", "ours, ELR", "torch fused", "torch fused, layer-wise",
    ]  # fmt: skip
    assert [row["images"] for row in rows[5:]] == ["from files, 0 workers"] * 2
    for row in rows:
        assert (row["batch"], row["passes"]) == (8, 2)
        assert 0 < row["update_seconds"] < row["seconds"]
        assert row["images_per_second"] == pytest.approx(8 / row["seconds"])
        assert len(training.cells(row)) == len(training.HEAD)
