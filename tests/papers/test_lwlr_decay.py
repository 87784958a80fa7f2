"""The study of learning rate and weight decay: its arms, its tables, its picture, and a smoke test on small files."""

import math

import pandas
import pytest
from quick import asked, check, quick_on_files

from fused_lwlr.papers import images, lwlr_decay
from fused_lwlr.papers.lwlr_decay import DECAYS, LRS
from fused_lwlr.papers.lwlr_fashion import CONTROL
from fused_lwlr.papers.studies import find

STUDY = find("lwlr-decay")
TOKENS = ("cls_token", "pos_embed")


@pytest.mark.parametrize(
    ("options", "model", "arms"),
    [
        ({}, "resnet8x8", {CONTROL: ("single", None), "LWLR": ("layerwise", ())}),
        (
            {"model": "vit1x16"},
            "vit1x16",
            {CONTROL: ("single", None), "LWLR": ("layerwise", ()), "LWLR but tokens": ("layerwise", TOKENS)},
        ),
    ],
)
def test_what_each_arm_trains(options, model, arms, monkeypatch):
    jobs = asked(STUDY, images, monkeypatch, **options)
    recipes = {(of["arm"], recipe.lr, recipe.weight_decay): recipe for of, recipe, _ in jobs}
    assert recipes.keys() == {(arm, lr, decay) for arm in arms for lr in LRS for decay in DECAYS}
    assert len(jobs) == 5 * len(recipes)
    assert {(arm, r.rates, r.rates_exclude) for (arm, *_), r in recipes.items()} == {
        (arm, *of) for arm, of in arms.items()
    }
    found = {(r.model, r.data, r.image_size, r.optimizer, r.init, r.steps) for r in recipes.values()}
    assert found == {(model, "fashion-mnist", 14, "sgd", "lwlr", 300)}


def results(cells):
    """Two seeds for each (arm, rate, decay): their held-out losses and test accuracies, None where one diverged."""
    rows = [
        {"model": "net", "arm": arm, "lr": lr, "weight_decay": decay, "seed": seed, "val_loss": top and loss,
         "train_loss": top and 1.0, "test_accuracy": top}
        for (arm, lr, decay), (loss, *tops) in cells.items() for seed, top in enumerate(tops)
    ]  # fmt: skip
    return pandas.DataFrame(rows).astype({"val_loss": float, "train_loss": float, "test_accuracy": float})


CELLS = {
    (CONTROL, 0.1, 0.001): (1.0, 80.0, 81.0),
    (CONTROL, 0.1, 0.01): (2.0, 79.0, 80.0),
    (CONTROL, 0.3, 0.001): (2.0, 79.4, 79.5),  # more than a point below the best
    (CONTROL, 0.3, 0.01): (0.5, 99.0, None),
    ("LWLR", 0.1, 0.001): (3.0, 70.0, 70.0),
    ("LWLR", 0.1, 0.01): (2.0, 82.0, 84.0),
    ("LWLR", 0.3, 0.001): (0.5, 82.0, 84.0),
    ("LWLR", 0.3, 0.01): (1.0, 85.0, 85.0),  # more accurate, but not chosen: good all the same
}


def test_the_best_setting_and_the_good_settings():
    best, every = STUDY.tables(STUDY.settings(seeds=2), results(CELLS))
    found = {row[0]: dict(zip(best.columns, row, strict=True)) for row in best.rows}
    one, layerwise = found[CONTROL], found["LWLR"]
    # the control diverged once at the setting with its lowest loss
    assert one["best lr, weight decay"] == "lr 0.1, decay 0.001"
    assert layerwise["best lr, weight decay"] == "lr 0.3, decay 0.001"
    assert (one["difference"], layerwise["difference"]) == ("", "+2.50 ± 0.71")
    columns = ("good settings", "their highest lr", "highest weight decay")
    assert [one[name] for name in columns] == ["2 of 4", "0.1", "0.01"]
    assert [layerwise[name] for name in columns] == ["3 of 4", "0.3", "0.01"]
    assert [(row[0], row[1]) for row in every.rows] == [
        ("0.1", "0.001"),
        ("0.1", "0.01"),
        ("0.3", "0.001"),
        ("0.3", "0.01"),
    ]
    at = dict(zip(every.columns, every.rows[3], strict=True))
    assert at[f"test %, {CONTROL}"] == "99.0 (1 of 2 diverged)"
    assert (at["difference"], at["n"]) == ("-14.00 (1 of 2 diverged)", "1")


def test_maps_have_one_scale_and_a_cross_where_a_seed_diverged():
    figure = lwlr_decay.draw(results(CELLS))
    maps = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    assert list(maps) == [CONTROL, "LWLR"]
    assert {axes.collections[0].get_clim() for axes in maps.values()} == {(75.0, 85.0)}
    texts = {name: {text.get_position(): text.get_text() for text in axes.texts} for name, axes in maps.items()}
    # columns are rates, rows are weight decays
    assert texts[CONTROL] == {(0.5, 0.5): "80.5", (1.5, 0.5): "79.5", (0.5, 1.5): "79.5", (1.5, 1.5): "×"}
    assert texts["LWLR"] == {(0.5, 0.5): "70.0", (1.5, 0.5): "83.0", (0.5, 1.5): "83.0", (1.5, 1.5): "85.0"}
    assert not any(math.isnan(bound) for axes in maps.values() for bound in axes.get_ylim())


def test_a_smoke_test(tmp_path):
    (best, every), jobs = quick_on_files("lwlr-decay", tmp_path)
    assert [row["arm"] for row in best] == [CONTROL, "LWLR", "LWLR but tokens"]
    assert len(jobs) == 3 * 4 * 2
    assert len(every) == 4
    check(best, jobs, {"arm": "arm"}, dict.fromkeys(["LWLR", "LWLR but tokens"], CONTROL), best="best lr, weight decay",
          label=lambda of: f"lr {of['lr']:g}, decay {of['weight_decay']:g}")  # fmt: skip
