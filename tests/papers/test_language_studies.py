"""The studies on text: smoke tests through the command, how a rate is chosen, and a training by hand."""

import json
import math
from pathlib import Path

import pandas
import pytest
import torch
from test_lwlr_studies import quick
from torch.nn.functional import cross_entropy

from fused_lwlr.data import open_text, train_batches, val_batches
from fused_lwlr.data.sampler import MicroBatchSampler
from fused_lwlr.models.gpt import GPT
from fused_lwlr.papers import demo, language
from fused_lwlr.papers.language import train_from, tuned, xavier_
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.tables import cell
from fused_lwlr.papers.training import Trained

CPU = torch.device("cpu")
SETTINGS = {"model": "postln1", "data": "python-docs", "steps": 3, "device": "cpu"}


def test_training_by_hand():
    """Plain SGD from Xavier's initialization, a linear decay after warm-up, and both halves of the held-out text."""
    found = train_from(start="xavier", warmup=0.34, optimizer="sgd", momentum=0.0, weight_decay=0.0, lr=0.3, seed=1,
                       eval_every=2, **SETTINGS)  # fmt: skip
    text = open_text("python-docs", context=64, vocabulary="characters")
    torch.manual_seed(1)
    model = GPT(1, True, context=64, classes=len(text.classes), width=32)
    torch.manual_seed(1)
    xavier_(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    sampler = MicroBatchSampler(len(text.train), seed=1, batch_size=16, micro_batch=16, steps=3)
    losses = []
    for lr, batch in zip((0.15, 0.3, 0.15), train_batches(text.train, sampler, device=CPU), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
        optimizer.step()
        losses.append(losses_of(model, text))
    assert found.curve == [(2, pytest.approx(losses[1][1])), (3, pytest.approx(losses[2][1]))]
    assert (found.val_loss, found.test_loss) == pytest.approx(losses[2])


@torch.no_grad()
def losses_of(model, text):
    """The losses of both halves of the held-out sequences; the first half is the shorter one."""
    inputs, targets = (torch.cat(parts) for parts in zip(
        *((b.inputs, b.targets) for b in val_batches(text.val, batch_size=64, device=CPU)), strict=True
    ))  # fmt: skip
    half = len(text.val) // 2
    losses = cross_entropy(model(inputs).transpose(1, 2), targets, ignore_index=-1, reduction="none")
    kept = targets >= 0
    return tuple(losses[at][kept[at]].mean().item() for at in (slice(half), slice(half, len(text.val))))


def trainings(monkeypatch, losses):
    """Replaces trainings by ones whose (validation, test) losses depend on rate and seed; returns the list of runs."""
    ran = []

    def stand_in(*, lr, seed, **fields):
        ran.append((lr, seed))
        val, test = losses[lr]
        return Trained(curve=[(1, test + seed)], val_loss=val, problem=None if val is not None else "diverged")

    monkeypatch.setattr(language, "train_from", stand_in)
    return ran


def test_the_rate_is_chosen_by_validation_and_not_by_what_is_reported(monkeypatch):
    ran = trainings(monkeypatch, {0.1: (2.0, 5.0), 0.2: (2.1, 1.0), 0.4: (None, 0.5)})
    found = tuned({}, [0.1, 0.2, 0.4], seeds=3)
    assert found == {
        "lr": 0.1,
        "losses": [5.0, 6.0, 7.0],
        "grid": [[0.1, 2.0, 5.0], [0.2, 2.1, 1.0], [0.4, None, None]],
    }
    assert ran == [(0.1, 0), (0.2, 0), (0.4, 0), (0.1, 1), (0.1, 2)]


def test_where_all_diverge_there_is_no_rate(monkeypatch):
    trainings(monkeypatch, {0.1: (None, 5.0)})
    assert tuned({}, [0.1], seeds=3) == {"lr": None, "losses": [None], "grid": [[0.1, None, None]]}


def test_a_training_that_diverges_has_no_losses():
    found = train_from(optimizer="sgd", lr=1e30, seed=0, **SETTINGS)
    assert (found.val_loss, found.test_loss) == (None, None)
    assert "the training loss became" in found.problem


@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("gradinit-language", "start", ["plain", "warm-up", "GradInit"]),
        ("elr-language", "setup", ["constrained", "constrained"]),
        ("lwlr-language", "rates", ["single", "layer-wise"]),
    ],
)
def test_study(tmp_path, name, column, values):
    (best, grid), jobs = quick(name, tmp_path, "--set", "calibration_steps=2")
    assert [row[column] for row in best] == values
    for row, shown, job in zip(best, grid, jobs, strict=True):
        tried = {f"{lr:g}": f"{val:.3f}" for lr, val, _ in job["values"]["grid"]}
        assert row["best lr"] == min(tried, key=tried.get)
        assert row["held-out loss"] == cell(job["values"]["losses"])
        assert len(job["values"]["losses"]) == 2
        assert shown["lr: loss"] == ": ".join(list(tried.items())[-1])
    assert len({row["held-out loss"] for row in best}) == len(best), "no two ways to train are the same"


@pytest.mark.parametrize("name", ["gradinit-language", "elr-language", "lwlr-language"])
def test_data_that_are_not_text_are_refused(name):
    study = find(name)
    with pytest.raises(ValueError, match=f"--data digits is images: {name} needs text"):
        study.settings(data="digits")
    with pytest.raises(ValueError, match="--epochs 2 has no meaning"):
        study.settings(epochs=2)
    settings = study.settings(steps=7, data="text:a.txt")
    assert all((job.parameters["steps"], job.parameters["data"]) == (7, "text:a.txt") for job in study.jobs(settings))


def test_xavier():
    torch.manual_seed(0)
    model = GPT(1, True, context=8, classes=50)
    embedding = model.tok_embed.weight.clone()
    xavier_(model)
    bound = math.sqrt(6 / (64 + 256))
    weight = model.blocks[0].fc1.weight
    assert 0.95 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not model.blocks[0].fc1.bias.any()
    assert torch.equal(model.tok_embed.weight, embedding)


RECORDED = Path(__file__).parents[2] / "bench" / "results" / "studies"


@pytest.mark.parametrize("entry", demo.ENTRIES, ids=lambda entry: f"{entry.task}-{entry.name}")
def test_rates_of_the_demo_are_the_best_of_recorded_grids(entry):
    found = []
    for name in ("gradinit-language", "elr-language", "lwlr-language"):
        results = json.loads((RECORDED / name / "results.json").read_text())
        expected = {**entry.arm.fields, "steps": demo.STUDY.steps, "data": demo.STUDY.data}
        found += [
            job["values"] for job in results["jobs"] if job["parameters"] | expected == job["parameters"]
            and job["parameters"]["labels"] == entry.arm.labels
        ]  # fmt: skip
    [values] = found
    losses = {lr: val for lr, val, _ in values["grid"] if val is not None}
    assert entry.lr == values["lr"] == min(losses, key=losses.get)
    lrs = [lr for lr, _, _ in values["grid"]]
    assert min(lrs) < entry.lr < max(lrs), "the best rate is at the edge of its grid"


def of_demo(entries, losses):
    rows = [
        {"labels": entry.arm.labels, "seed": seed, "loss": loss, "curve": [[1, 3.0], [2, loss]]}
        for entry, of in zip(entries, losses, strict=True) for seed, loss in enumerate(of)
    ]  # fmt: skip
    return pandas.DataFrame(rows)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([1.80, 1.81, 1.79], "GradInit ends at 1.800, 0.150 below warm-up: it helps."),
        ([2.10, 2.11, 2.09], "GradInit ends at 2.100, 0.150 above warm-up: it does not help."),
        ([1.80, 2.11, 1.91], "GradInit ends at 1.940, 0.010 below warm-up: undecided, within two standard errors."),
        ([1.80], "GradInit ends at 1.800, 0.150 below warm-up: of one seed."),
        ([1.80, float("nan"), 1.79], "GradInit diverges."),
    ],
)
def test_sentences_of_the_demo_follow_from_results(losses, said):
    before = [[2.0, 2.0, 2.0], [1.95, 1.96, 1.94]]
    results = of_demo(demo.ENTRIES[:3], [*(of[: len(losses)] for of in before), losses])
    assert demo.sentence(results, demo.ENTRIES[2]) == f"Post-LN, AdamW: {said}"
