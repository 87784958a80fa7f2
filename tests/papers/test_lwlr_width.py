"""The study of DavidNet over widths: its arms, and a smoke test on small files."""

import pytest
import torch
from quick import DONE, asked, check, quick_on_files, spread

from fused_lwlr.models.build import build
from fused_lwlr.papers import lwlr_width
from fused_lwlr.papers.lwlr_width import ARMS, FIRST, WIDTHS
from fused_lwlr.papers.studies import find

STUDY = find("lwlr-width")


def test_what_each_arm_trains(monkeypatch):
    jobs = asked(STUDY, lwlr_width, monkeypatch, data="digits")
    recipes = {(of["width"], of["arm"], recipe.lr, recipe.seed): recipe for of, recipe, _ in jobs}
    assert recipes.keys() == {(w, arm, lr, seed) for w in WIDTHS for arm in ARMS for lr in FIRST for seed in (0, 1)}
    found = {(arm, r.model, r.init, r.rates, r.rates_exclude) for (_, arm, *_), r in recipes.items()}
    assert found == {
        (arm, f"davidnet{width}", *of) for width in WIDTHS for arm, of in {
            "one rate": ("model", "single", None), "μP": ("model", "single", None),
            "LWLR's start, one rate": ("lwlr", "single", None), "LWLR": ("lwlr", "layerwise", ()),
        }.items()
    }  # fmt: skip
    assert {(r.optimizer, r.weight_decay, r.steps) for r in recipes.values()} == {("sgd", 1e-4, 200)}
    # Fashion-MNIST alone is made smaller
    assert {r.image_size for r in recipes.values()} == {None}
    assert {job.parameters["image_size"] for job in STUDY.jobs(STUDY.settings())} == {16}


@pytest.mark.parametrize(("width", "first", "last"), [(4, 1.0, 1.0), (8, 2.0, 0.5), (16, 4.0, 0.25)])
def test_multipliers_and_initial_weights_of_mup(width, first, last, monkeypatch):
    """With the width of its base μP is one rate. With other widths the first and the last layer differ from it."""
    models = {}

    def untrained(recipe, *, model, optimizer, tuned):
        models[recipe.seed] = model
        return DONE

    monkeypatch.setattr(lwlr_width, "train", untrained)
    found = lwlr_width.measure(width, "μP", lr=0.1, seed=5, data="digits", steps=4, device="cpu")
    assert found["layers"] == [
        "prep.0.weight", "layer1.0.weight", "residual1.0.weight", "residual1.3.weight", "layer2.0.weight",
        "layer3.0.weight", "residual3.0.weight", "residual3.3.weight", "head.weight",
    ]  # fmt: skip
    assert found["eta"] == [first, *[1.0] * 7, last]
    torch.manual_seed(5)
    plain = build(f"davidnet{width}", image_size=8, channels=1, classes=10)
    for (name, own), other in zip(models[5].named_parameters(), plain.parameters(), strict=True):
        factor = last**0.5 if name == "head.weight" else 1.0
        torch.testing.assert_close(own, other * factor)


def test_a_smoke_test(tmp_path):
    (table, over, layers, grid), jobs = quick_on_files("lwlr-width", tmp_path)
    cells = [(width, arm) for width in WIDTHS[:2] for arm in ARMS]
    assert [(int(row["width"]), row["rates"]) for row in table] == cells
    assert len(jobs) == 2 * len(grid) == 2 * 2 * len(cells)
    rivals = {"μP": "one rate", "LWLR's start, one rate": "one rate", "LWLR": "LWLR's start, one rate"}
    values = check(table, jobs, {"width": "width", "rates": "arm"}, rivals)
    assert {(row["rates"], width): row[f"width {width}"] for row in over for width in WIDTHS[:2]} == {
        (row["rates"], int(row["width"])): row["best lr"] for row in table
    }
    # at the width of the base μP is one rate
    assert values["4", "μP"] == values["4", "one rate"]
    assert [row["rates"] for row in layers] == ["μP"] * 9 + ["LWLR"] * 9
    eta = [each["eta"] for each in values["8", "LWLR"]["0.1"]]
    assert [row["η at width 8"] for row in layers[9:]] == [spread(of_seeds, 3) for of_seeds in zip(*eta, strict=True)]
    assert len({row["η at width 4"] for row in layers[9:]}) > 1
