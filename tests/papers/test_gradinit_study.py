"""The study gradinit: a smoke test through the command, and its parts by hand."""

import numpy as np
import pandas
import pytest
import torch
from by_hand import batches
from quick import COMMON, FEW, change, quick, spread
from torch.nn.functional import cross_entropy

from fused_lwlr.data import open_data
from fused_lwlr.data.digits import digits
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.models.build import build
from fused_lwlr.models.deep import kaiming_init_
from fused_lwlr.papers import gradinit_variants
from fused_lwlr.papers.gradinit import (
    LABELS,
    PAPER,
    STARTS,
    factors,
    gradient_std,
    initialize_and_train,
    paper_of,
)
from fused_lwlr.papers.held_out import hold_out
from fused_lwlr.papers.starts import start_
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.training import recipe_of, trainer_of


@pytest.mark.filterwarnings("ignore:gradinit_. no step was on the constraint:UserWarning")
def test_study(tmp_path, monkeypatch):
    monkeypatch.setattr("fused_lwlr.papers.gradinit.MEASURED", 2)
    (accuracy, differences, variance, grid), jobs = quick("gradinit", tmp_path, "--model", "noshort8x2-nobn", *FEW)
    labels = [label for start, label in LABELS.items() if start != "gradinit-relative"]
    assert [row["initialization"] for row in accuracy] == labels
    of = {(p["init"], p["tau"], p["seed"]): job["values"] for job in jobs for p in [job["parameters"]]}
    assert accuracy[0]["first epoch %"] == spread([of["kaiming", 0.0, seed]["first"] for seed in (0, 1)], 1)
    # each at its best rate by the loss on held-out images
    rates = {tau: sum(of["gradinit", tau, seed]["val_loss"] for seed in (0, 1)) for tau in (0.01, 0.03)}
    tau = min(rates, key=rates.get)
    row = next(row for row in accuracy if row["initialization"] == "GradInit")
    assert row["best τ"] == f"{tau:g}"
    ours, theirs = ([of[init, of_init, seed]["first"] for seed in (0, 1)]
                    for init, of_init in (("gradinit", tau), ("warm-up", 0.0)))  # fmt: skip
    compared = next(r for r in differences if r["initialization"] == "GradInit" and "warm-up" in r["minus"])
    assert compared["difference"] == change(ours, theirs, 1)
    assert of["kaiming", 0.0, 0]["before"] == of["kaiming", 0.0, 0]["after"] == of["gradinit", 0.01, 0]["before"]
    for init in ("metainit", "metainit-adam", "gradinit", "gradinit-normalized"):
        factor = np.array(of[init, 0.03, 0]["after"]) / np.array(of[init, 0.03, 0]["before"])
        assert abs(factor - 1).max() > 1e-3
    assert [row["initialization"] for row in variance] == labels[1:]
    assert len(grid) == 8


def trainer(model="noshort8x2-nobn", **fields):
    found = trainer_of(recipe_of(init="model", model=model, lr=0.1, warmup=0.0, seed=1, **COMMON, **fields))
    found.prepare(lambda trainer: None)
    return found


@pytest.mark.parametrize(
    ("start", "size"), [("metainit", 64), ("metainit-adam", 64), ("gradinit", 32), ("gradinit-relative", 32)]
)
def test_an_initialization_takes_one_pass_over_the_data(start, size, monkeypatch):
    """GradInit joins two halves of a minibatch; none of the images comes twice."""
    seen = []

    def taken(model, batches, loss, *, steps, relative_gamma=None, **options):
        assert steps is None
        assert relative_gamma == (0.8 if start == "gradinit-relative" else None)
        seen.extend(inputs for inputs, _ in batches)

    monkeypatch.setattr("fused_lwlr.papers.starts.gradinit_", taken)
    monkeypatch.setattr("fused_lwlr.papers.starts.metainit_", taken)
    start_(trainer(), start, 0.01)
    assert {len(inputs) for inputs in seen} == {size}
    images = torch.cat(seen).flatten(1)
    assert len(images) == 1437 // size * size
    whole = digits()[0].inputs.flatten(1)
    assert len(images.unique(dim=0)) >= len(images) - (len(whole) - len(whole.unique(dim=0)))


@pytest.mark.parametrize("start", ["constant", "warm-up"])
def test_an_epoch_more_by_hand(start, monkeypatch):
    """An epoch of four minibatches: rounding grows over more."""
    epoch = batches(1001)[:4]
    monkeypatch.setattr("fused_lwlr.papers.starts.one_epoch", lambda trainer, size: iter(epoch))
    ours = trainer("resnet8x2")
    optimizer = start_(ours, start, 0.0)
    model = drawn(1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for i, (x, y) in enumerate(epoch):
        plain.param_groups[0]["lr"] = 0.1 * (i + 1) / (len(epoch) + 1) if start == "warm-up" else 0.1
        plain.zero_grad()
        cross_entropy(model(x), y).backward()
        plain.step()
    for p, q in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
        momentum = optimizer.state[p]["momentum_buffer"]
        torch.testing.assert_close(momentum, plain.state[q]["momentum_buffer"], rtol=1e-2, atol=1e-4)


def drawn(seed):
    """A ResNet with He's initialization."""
    torch.manual_seed(seed)
    model = build("resnet8x2", image_size=8, channels=1, classes=10)
    torch.manual_seed(seed)
    kaiming_init_(model)
    return model


def test_learned_scalars():
    """GradInit, Table 5: the function stays, and each weight has a scalar that is trained."""
    ours = trainer("resnet8x2")
    x, y = batches(0)[0]
    torch.manual_seed(1)
    kaiming_init_(ours.model)
    before = ours.model.eval()(x).detach()
    optimizer = start_(ours, "scalars", 0.0)
    torch.testing.assert_close(ours.model.eval()(x), before)
    scalars = {name: param for name, param in ours.model.named_parameters() if name.endswith("scalar")}
    assert len(scalars) == 8
    cross_entropy(ours.model.train()(x), y).backward()
    optimizer.step()
    # the weights before a normalization are scale-invariant, so their scalars do not move
    assert {round(param.item(), 4) == 1 for name, param in scalars.items() if "head" in name} == {False}


@pytest.mark.parametrize(
    ("name", "model", "others"),
    [
        ("gradinit", "resnet", ("gradinit-relative",)),
        ("gradinit-fashion", "noshort20x8-nobn", ("metainit", "metainit-adam")),
    ],
)
def test_more_seeds_run_at_the_best_rate(name, model, others):
    study, starts = find(name), {init: taus for init, (_, _, taus) in STARTS.items() if init not in others}
    assert {job.parameters["init"] for job in study.jobs(study.settings())} == set(starts)
    rows = [
        {"model": model, "init": init, "tau": tau, "seed": seed, "val_loss": abs(tau - 0.03), "last": 90.0}
        for init, taus in starts.items() for tau in taus for seed in (0, 1)
    ]  # fmt: skip
    found = study.next_jobs(study.settings(seeds=4), pandas.DataFrame(rows))
    assert [(job.parameters["init"], job.parameters["tau"], job.parameters["seed"]) for job in found] == [
        (init, 0.03 if len(taus) > 1 else 0.0, seed) for init, taus in starts.items() for seed in (2, 3)
    ]
    assert all(job.parameters.get("image_size") == (14 if name == "gradinit-fashion" else None) for job in found)
    # these seeds do not change the choice
    rows += [{**job.parameters, "val_loss": 9.0, "last": 90.0} for job in found]
    assert study.next_jobs(study.settings(seeds=4), pandas.DataFrame(rows)) == found


def train_an_epoch(model, optimizer):
    """Trains on the digits without a fifth of the images, which choose rates; returns this fifth."""
    data, held = hold_out(open_data("digits", image_size=8, augmentation="none"))
    epoch = list(minibatches(data.train, 64, torch.device("cpu"), seed=2, steps=len(data.train) // 64))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(epoch))
    for x, y in epoch:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return held


def test_training_by_hand():
    found = initialize_and_train("kaiming", 0.0, model="resnet8x2", seed=2, **COMMON)
    model = drawn(2)
    # running statistics of batch normalization would show if measuring had changed them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    train_an_epoch(model, optimizer)
    test = digits()[1]
    right = (model.eval()(test.inputs).argmax(1) == test.targets).double().mean().item()
    assert found["first"] == found["last"] == pytest.approx(100 * right)
    assert found["normalized"]


def test_gradient_std():
    torch.manual_seed(0)
    model = build("resnet8x2", image_size=8, channels=1, classes=10)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = gradient_std(model, batches(0, 200))
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    of_head = []
    for x, y in batches(0, 200):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        of_head.append(model.head.weight.grad.numpy().copy())
    assert found[-1] == pytest.approx(np.std(np.array(of_head, dtype=np.float64), axis=0, ddof=1).mean(), rel=1e-5)
    assert len(found) == 8


@pytest.mark.parametrize(
    ("model", "normalized", "net", "gradinit"),
    [
        ("vgg19x8", [True, True], "VGG-19 with BN", "47.8 ± 1.8"),
        ("noshort20x8-nobn", [False], "VGG-19 without BN", "29.3 ± 0.6"),
        ("densenet100-nobn", [False], "DenseNet-100 without BN", "37.2 ± 1.1"),
        ("timm:resnet50", [True], "ResNet-110 with BN", "38.2 ± 0.9"),
        ("resnet1202x2", [True], "ResNet-1202 with BN", "29.0 ± 1.1"),
        ("resnet20-nobn", [False], "ResNet-110 without BN", "36.2 ± 0.8"),
    ],
)
def test_figures_of_the_paper(model, normalized, net, gradinit):
    """GradInit, Tables 3 and 10, after the first epoch."""
    of = pandas.DataFrame({"model": model, "normalized": normalized})
    found, figures = paper_of(of)
    assert (found, figures["gradinit-normalized"][0]) == (net, gradinit)


def test_a_net_that_the_paper_does_not_have():
    found = paper_of(pandas.DataFrame({"model": "resnet1202-nobn", "normalized": [False]}))
    assert found == ("ResNet-1202 without BN", {})


@pytest.mark.parametrize(
    ("net", "normalized", "signs", "adam"),
    [("VGG-19", False, "30.89, 94.41", "30.48, 94.62"), ("VGG-19", True, "16.58, 94.46", "35.09, 94.64"),
     ("ResNet-110", False, "16.21, 94.29", "14.55, 94.19"), ("ResNet-110", True, "26.28, 94.95", "29.00, 94.76")],
)  # fmt: skip
def test_metainit_is_compared_with_its_own_row(net, normalized, signs, adam):
    """GradInit, Table 9, "real + signSGD" and "real + Adam"; Table 3 has the latter rounded."""
    figures = PAPER[net, normalized]
    assert ", ".join(figures["metainit"]) == signs
    for rounded, exact in zip(figures["metainit-adam"], adam.split(", "), strict=True):
        assert abs(float(rounded.split()[0]) - float(exact)) <= 0.0501


def test_factors():
    rows = [([1.0, 2.0], [0.5, 4.0]), (None, None), ([0.0, 1.0], [1.0, 1.0])]
    [found] = factors(pandas.DataFrame(rows, columns=["before", "after"]))
    assert found.tolist() == [0.5, 2.0]


@pytest.mark.parametrize("problem", ["the loss is not finite: nan", "the loss after a step of sgd at lr=0.1 is nan"])
def test_a_failed_initialization_is_reported(problem, monkeypatch):
    def fail(*args, **options):
        raise ValueError(problem)

    monkeypatch.setattr("fused_lwlr.papers.starts.metainit_", fail)
    found = initialize_and_train("metainit", 0.1, model="noshort8x2-nobn", seed=0, **COMMON)
    assert found["first"] is None
    assert found["problem"] == problem
    assert found["normalized"] is False


def test_variants_have_their_arguments(monkeypatch):
    """Each variant of the paper's tables calls `gradinit_` with its own arguments; the scales of BN are one part."""
    calls = []
    monkeypatch.setattr("fused_lwlr.papers.starts.gradinit_", lambda *args, **options: calls.append(options))
    study = find("gradinit-variants")
    jobs = {job.parameters["init"]: job for job in study.jobs(study.settings())}
    assert set(jobs) == set(gradinit_variants.ARGUMENTS)
    for init, job in jobs.items():
        found = gradinit_variants.train_variant(init, 0.01, model="resnet8x2", seed=0, **COMMON)
        assert found["problem"] is None
        assert len(found["accuracies"]) == 1
        assert job.function is gradinit_variants.train_variant
    own = [{name: value for name, value in call.items() if name not in ("lr", "tau", "steps")} for call in calls]
    adam = {"optimizer": "adam", "normalize": False}
    assert own == [
        {"normalize": True, **arguments} | (adam if init == "AdamW, GradInit" else {})
        for init in jobs
        if not isinstance(arguments := gradinit_variants.ARGUMENTS[init], str)
    ]
    assert {"optimizer": "adam", "normalize": False, "gamma": 25.0} in own
    model = build("resnet8x2", image_size=8, channels=1, classes=10)
    scales = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)]
    named, others = dict(model.named_parameters()), gradinit_variants.ARGUMENTS["fixed scales of BN"]["select"]
    assert [name for name, param in named.items() if gradinit_variants.is_scale(name, param)] == scales
    assert [name for name, param in named.items() if not others(name, param)] == scales


def test_a_variant_with_adamw_by_hand(monkeypatch):
    """GradInit, "Generalizing to Adam": AdamW at 0.003 with a decay of 0.2."""
    found = gradinit_variants.train_variant("AdamW, He", 0.0, model="resnet8x2", seed=2, **COMMON)
    model = drawn(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.2)
    held = train_an_epoch(model, optimizer)
    images = next(minibatches(held, len(held), torch.device("cpu"), seed=0, steps=1))
    assert found["val_loss"] == pytest.approx(cross_entropy(model.eval()(images[0]), images[1]).item(), rel=1e-2)


@pytest.mark.parametrize(
    ("model", "without"),
    [("vgg19x8", set()), ("noshort20x8-nobn", {"fixed scales of BN", "only scales of BN"})],
)
def test_a_model_has_all_its_variants_once(model, without):
    study = find("gradinit-variants")
    jobs = study.jobs(study.settings(model=model))
    assert {job.parameters["init"] for job in jobs} == set(gradinit_variants.ARGUMENTS) - without
    assert len({job.name for job in jobs}) == len(jobs)


def test_resnet110_has_the_variants_with_adamw():
    study = find("gradinit-variants")
    found = [job.parameters["init"] for job in study.jobs(study.settings()) if job.parameters["model"] == "resnet110x4"]
    assert list(dict.fromkeys(found)) == ["AdamW, He", "AdamW, GradInit", "AdamW, He, +1 epoch"]
