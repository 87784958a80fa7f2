"""The studies of layer-wise rates: smoke tests through the command, and the results of their jobs."""

import numpy as np
import pytest
import torch
from by_hand import batches
from quick import COMMON, change, quick, spread
from torch.nn.functional import cross_entropy

from fused_lwlr import calibrate
from fused_lwlr.data import open_data
from fused_lwlr.papers import lwlr_t, lwlr_vs_single, methods
from fused_lwlr.papers.lwlr_vs_single import RATES
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.training import Trained
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.setup import new_model


def test_number_of_minibatches(tmp_path):
    (steps, sizes), jobs = quick("lwlr-T", tmp_path)
    assert [row["T"] for row in steps] == ["1", "4"]
    eta = {
        (p["steps"], p["batch_size"], p["seed"]): np.array(job["values"]["eta"])
        for job in jobs
        for p in [job["parameters"]]
    }
    off = [abs(eta[1, 64, seed] - eta[4, 64, seed]) / eta[4, 64, seed] * 100 for seed in (0, 1)]
    assert steps[0]["max deviation %"] == spread([each.max() for each in off], 2)
    assert steps[0]["mean deviation %"] == spread([each.mean() for each in off], 2)
    assert steps[0]["paper: max"] == "11.02"
    assert [(row["minibatch"], row["T of as many images"]) for row in sizes] == [
        ("16", "16"),
        ("64", "4"),
        ("256", "1"),
    ]
    off = [abs(eta[16, 16, seed] - eta[4, 64, seed]).max() for seed in (0, 1)]
    assert min(off) > 0
    # T = 1 means the first minibatch of the training, at the initial weights
    model = new_model(Recipe(seed=1), image_size=8, channels=1, classes=10)
    rates = calibrate(model, batches(1), cross_entropy, steps=1, init=False)
    assert eta[1, 64, 1].tolist() == list(rates.values())


def test_layerwise_against_single(tmp_path):
    ((single, row), grid), jobs = quick("lwlr-vs-single", tmp_path)
    # each arm uses the rate that is best on held-out images, independent of the test images
    arms = {}
    for kind in ("single", "layerwise"):
        of_kind = [job["values"] for job in jobs if job["parameters"]["kind"] == kind]
        by_rate = {lr: [v for v in of_kind if v["lr"] == lr] for lr in (0.03, 0.09)}
        rate = min(by_rate, key=lambda lr: np.mean([v["val_loss"] for v in by_rate[lr]]))
        arms[kind] = [v["test_accuracy"] for v in by_rate[rate]]
        [found] = (each for each in (single, row) if each["rates"] == RATES[kind])
        assert (found["test accuracy %"], found["best lr"]) == (spread(arms[kind], 2), f"{rate:g}")
    assert row["difference"] == change(arms["layerwise"], arms["single"], 2)
    assert (row["n"], single["paper"], row["paper"]) == ("2", "76.80", "77.12")
    assert np.mean(arms["single"]) > 50
    assert [line["lr"] for line in grid] == ["0.03", "0.09"] * 2


def test_the_papers_models_have_one_rate(monkeypatch):
    """The rates of Table 5, without held-out images. ViT-S with SGD has another one for a single rate."""
    seen = {}

    def untrained(recipe, *, tuned):
        assert not tuned
        seen[recipe.optimizer, recipe.rates, recipe.rates_exclude] = recipe.lr, recipe.lr_scaling
        return Trained(train_loss=1.0, accuracies=[50.0])

    monkeypatch.setattr(lwlr_vs_single, "train", untrained)
    study = find("lwlr-vs-single")
    settings = study.settings(model="timm:vit_small_patch16_224", data="photos", epochs=300)
    jobs = study.jobs(settings)
    assert [job.parameters["factor"] for job in jobs] == [1] * 30
    results = study.frame([
        {"name": job.name, "parameters": job.parameters, "values": job.function(**job.parameters)} for job in jobs
    ])  # fmt: skip
    tokens = ("cls_token", "pos_embed")
    assert seen == {
        ("sgd", "single", None): (0.5, "linear"),
        ("sgd", "layerwise", ()): (1.6, "linear"),
        ("sgd", "layerwise", tokens): (1.6, "linear"),
        ("adamw", "single", None): (0.01, "sqrt"),
        ("adamw", "layerwise", ()): (0.01, "sqrt"),
        ("adamw", "layerwise", tokens): (0.01, "sqrt"),
    }
    [table] = study.tables(settings, results)
    assert "best lr: that of the preset" in table.notes
    assert [row[1:3] for row in table.rows] == [
        [optimizer, rates] for optimizer in ("sgd", "adamw") for rates in RATES.values()
    ]


def test_methods(tmp_path):
    (losses, rates, accuracies), jobs = quick("methods", tmp_path)
    for table in (losses, rates, accuracies):
        assert [row["method"] for row in table] == ["single", "LWLR", "mup", "LAMB"]
    found = {}
    for job in jobs:
        parameters = job["parameters"]
        found.setdefault((parameters["method"], parameters["lr"]), []).append(job["values"]["train_loss"])
    for row in losses:
        best = min((np.mean(of), lr) for (method, lr), of in found.items() if method == row["method"])[1]
        assert row["2x32: loss at lr"] == f"{spread(found[row['method'], best], 4)} at {best:g}"


@pytest.mark.parametrize("name", ["single", "AdamW"])
def test_a_method_without_anything_is_that_of_torch(name):
    """One epoch by hand, with torch's optimizer: the schedule has a warm-up of a tenth, then a cosine."""
    model, _ = methods.perceptron(name, "2x32", open_data("digits", image_size=8, augmentation="none"), seed=3)
    lr = 0.1
    optimizer = (
        torch.optim.SGD(model.parameters(), lr, momentum=0.9)
        if name == "single"
        else torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    )
    losses = []
    epoch = batches(3)
    for step, (inputs, targets) in enumerate(epoch):
        warm = round(0.1 * len(epoch))
        part = (1 + np.cos(np.pi * (step - warm) / (len(epoch) - warm))) / 2
        part = (step + 1) / (warm + 1) if step < warm else part
        optimizer.param_groups[0]["lr"] = lr * part
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = methods.measure(name, "2x32", None, lr=lr, seed=3, **COMMON)
    assert found["train_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_methods_differ():
    """Each from its second grid rate: no two methods have the same loss."""
    losses = {
        name: methods.measure(name, "2x128", None, lr=0.02, seed=0, **COMMON)["train_loss"] for name in methods.METHODS
    }
    assert len(set(losses.values())) == len(methods.METHODS)


def test_divergence_is_a_result():
    assert methods.measure("single", "2x32", None, lr=1e30, seed=0, **COMMON) == {
        "train_loss": None,
        "test_accuracy": None,
        "val_loss": None,
    }


def test_mup_draws_and_multiplies():
    data = open_data("digits", image_size=8, augmentation="none")
    _, rates = methods.perceptron("mup", "3x128", data, seed=0)
    assert [rates[f"{i}.weight"] for i in (1, 3, 5)] == [4.0, 1.0, 0.25]
    wide, _ = methods.perceptron("mup", "3x512", data, seed=0)
    expected = [1 / 64, 1 / 512, 32 / 512**2]
    for layer, variance in zip(wide[1::2], expected, strict=True):
        assert layer.weight.var().item() == pytest.approx(variance, rel=0.06)
    narrow, _ = methods.perceptron("mup", "3x32", data, seed=0)
    assert narrow[-1].weight.var().item() == pytest.approx(1 / 32, rel=0.25)


@pytest.mark.parametrize("name", ["lwlr-T", "lwlr-vs-single", "methods"])
def test_jobs_of_a_model_of_timm(name, monkeypatch):
    digits = open_data("digits", image_size=8, augmentation="none")
    monkeypatch.setattr(lwlr_t, "load_data", lambda recipe: {("photos", 224): digits}[recipe.data, recipe.side])
    study = find(name)
    jobs = study.jobs(study.settings(model="timm:resnet50", data="photos", epochs=90))
    for job in jobs:
        assert [job.parameters[key] for key in ("model", "data", "epochs")] == ["timm:resnet50", "photos", 90]
    assert not any("mup" in job.name for job in jobs)
