"""The studies of layer-wise rates on Fashion-MNIST and on glyphs, on small files, and their ladder of rates."""

import pandas
import pytest
from quick import asked

from fused_lwlr.papers import images
from fused_lwlr.papers.grid import LADDER
from fused_lwlr.papers.lwlr_fashion import ARMS, CONTROL
from fused_lwlr.papers.studies import find

STUDY, GLYPHS = find("lwlr-fashion"), find("lwlr-glyphs")


def results(losses, seeds=(0, 1)):
    """Results of one arm: a loss for each learning rate, the same for all seeds."""
    rows = [
        {"arm": CONTROL, "lr": lr, "seed": seed, "val_loss": loss, "train_loss": loss, "test_accuracy": 1.0}
        for lr, loss in losses.items()
        for seed in seeds
    ]
    return pandas.DataFrame(rows)


@pytest.mark.parametrize(
    ("losses", "wanted"),
    {
        (3.0, 2.0, 1.0): [(0.1, 0), (0.1, 1)],
        (1.0, 2.0, 3.0): [(0.001, 0), (0.001, 1)],
        (2.0, 1.0, 3.0): [(0.01, 2), (0.01, 3), (0.01, 4)],
        # a rate at which a training diverged is not chosen
        (2.0, 1.0, None): [(0.01, 2), (0.01, 3), (0.01, 4)],
    }.items(),
)
def test_the_best_rate_is_inside_the_grid(losses, wanted):
    found = STUDY.next_jobs(STUDY.settings(), results(dict(zip((0.003, 0.01, 0.03), losses, strict=True))))
    assert [(job.parameters["lr"], job.parameters["seed"]) for job in found] == wanted


def test_there_is_no_rate_beyond_the_last():
    every = dict(zip(LADDER, range(len(LADDER), 0, -1), strict=True))
    found = STUDY.next_jobs(STUDY.settings(), results(every))
    assert [(job.parameters["lr"], job.parameters["seed"]) for job in found] == [
        (LADDER[-1], seed) for seed in (2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("study", "common"),
    [
        (STUDY, ("sgd", "fashion-mnist", "vit6x64", None, "basic", 375)),
        (GLYPHS, ("sgd", "glyphs", "vit4x96p4", 16, "none", 20.0)),
    ],
)
def test_what_each_arm_trains(study, common, monkeypatch):
    jobs = asked(study, images, monkeypatch)
    assert len(jobs) == len(ARMS) * 3 * 2
    recipes = {parameters["arm"]: recipe for parameters, recipe, _ in jobs}
    assert [(r.init, r.rates, r.rates_exclude) for r in recipes.values()] == [
        ("model", "single", None), ("lwlr", "single", None), ("lwlr", "layerwise", ()),
        ("lwlr", "layerwise", ("cls_token", "pos_embed")),
    ]  # fmt: skip
    found = {
        (r.optimizer, r.data, r.model, r.image_size, r.augmentation, r.steps or r.epochs) for r in recipes.values()
    }
    assert found == {common}


def test_a_network_without_tokens_has_no_arm_for_them():
    jobs = STUDY.jobs(STUDY.settings(model="resnet8x8"))
    assert {job.parameters["arm"] for job in jobs} == ARMS.keys() - {"LWLR but tokens"}
