"""The studies on text: smoke tests through the command, how a rate is chosen, and a training by hand."""

import json
import math
from pathlib import Path

import pandas
import pytest
import torch
from quick import quick
from torch.nn.functional import cross_entropy

from fused_lwlr.data import open_text, train_batches, val_batches
from fused_lwlr.data.sampler import MicroBatch, MicroBatchSampler
from fused_lwlr.models.gpt import GPT
from fused_lwlr.papers import demo, elr_translation, language
from fused_lwlr.papers.held_out import hold_out
from fused_lwlr.papers.language import train_from, xavier_
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.tables import cell

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


def results_of(losses):
    """A data frame of two arms, "a" and "b": by arm and rate, (validation, test) losses of each seed."""
    rows = [
        {"labels": {"start": arm}, "start": arm, "lr": lr, "seed": seed, "val_loss": val, "loss": test}
        for arm, of in losses.items() for lr, seeds in of.items() for seed, (val, test) in enumerate(seeds)
    ]  # fmt: skip
    return pandas.DataFrame(rows)


def tables_of(losses):
    settings = find("gradinit-language").settings(seeds=2)
    paper = {"paper": lambda of: ""}
    tables = language.tables(settings, results_of(losses), title="title", paper=paper, notes=[])
    return [[dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in tables]


NONE = (None, None)


@pytest.mark.parametrize(
    ("losses", "rate", "loss", "trains"),
    [
        # the mean over seeds of the validation loss decides, not the reported loss
        ({0.1: [(2.0, 5.0), (2.2, 6.0)], 0.2: [(1.9, 1.0), (2.4, 1.0)]}, "0.1", "5.500 ± 0.707", "2 of 2"),
        # a rate at which a seed diverged is not the best
        ({0.1: [(3.0, 5.0), (3.0, 5.0)], 0.2: [(1.0, 1.0), NONE]}, "0.1", "5.000 ± 0.000", "0 of 2"),
        ({0.1: [NONE, NONE]}, "0.1", "2 of 2 diverged", "0 of 1"),
        # a seed that was trained without validation chooses nothing, and is reported
        ({0.1: [(2.0, 5.0), (None, 6.0)], 0.2: [(2.1, 1.0)]}, "0.1", "5.500 ± 0.707", "2 of 2"),
    ],
)
def test_how_a_rate_is_chosen(losses, rate, loss, trains):
    best, _, _ = tables_of({"a": losses, "b": {0.3: [(1.0, 1.0), (1.0, 1.0)]}})
    assert [best[0][column] for column in ("best lr", "held-out loss", "rates that train")] == [rate, loss, trains]


def test_every_rate_is_trained_with_every_seed():
    study = find("lwlr-language")
    trained = [(job.parameters["lr"], job.parameters["seed"]) for job in study.jobs(study.settings(seeds=2))]
    assert trained[:10] == [(lr, seed) for lr in (0.15, 0.3, 0.6, 1.2, 2.4) for seed in (0, 1)]


def test_a_training_that_diverges_has_no_losses():
    found = train_from(optimizer="sgd", lr=1e30, seed=0, **SETTINGS)
    assert (found.val_loss, found.test_loss) == (None, None)
    assert "the training loss became" in found.problem


@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("gradinit-language", "start", ["plain", "warm-up", "GradInit"]),
        ("elr-language", "setup", ["constrained", "constrained"]),
        ("elr-translation", "setup", ["constrained", "constrained"]),
        ("lwlr-language", "rates", ["single", "layer-wise"]),
    ],
)
def test_study(tmp_path, name, column, values):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} green bottles hang on the wall. " for i in range(300)))
    data = () if name == "elr-translation" else ("--data", f"text:{text}")
    (best, differences, grid), jobs = quick(name, tmp_path / "out", "--set", "calibration_steps=2", *data)
    assert [row[column] for row in best] == values
    assert len(jobs) == len(best) * 2 * 2  # two rates, two seeds
    assert len(grid) == 2 * len(best)
    for i, row in enumerate(best):
        of = {}
        for job in jobs[4 * i : 4 * i + 4]:
            of.setdefault(f"{job['parameters']['lr']:g}", []).append(job["values"])
        means = {lr: sum(values["val_loss"] for values in each) for lr, each in of.items()}
        assert row["best lr"] == min(means, key=means.get)
        assert row["held-out loss"] == cell(values["loss"] for values in of[row["best lr"]])
        shown = {each["lr"]: each["loss to choose by"] for each in grid[2 * i : 2 * i + 2]}
        assert shown == {lr: cell(values["val_loss"] for values in each) for lr, each in of.items()}
    assert [row["n"] for row in differences] == ["2"] * len(differences)
    assert len({row["held-out loss"] for row in best}) == len(best), "no two ways to train are the same"


@pytest.mark.parametrize("name", ["gradinit-language", "elr-language", "elr-translation", "lwlr-language"])
def test_data_that_are_not_text_are_refused(name):
    study = find(name)
    needed = "pairs" if name == "elr-translation" else "text"
    with pytest.raises(ValueError, match=f"--data digits is images: {name} needs {needed}"):
        study.settings(data="digits")
    with pytest.raises(ValueError, match="--epochs 2 has no meaning"):
        study.settings(epochs=2)
    data = f"{needed}:a.txt"
    jobs = study.jobs(study.settings(steps=7, data=data))
    assert all((job.parameters["steps"], job.parameters["data"]) == (7, data) for job in jobs)


def test_numbers_are_translated():
    """Some of them by hand; each is there once, and those for the choice of rates are apart from the training."""
    known = {
        0: ("zero", "null"), 1: ("one", "eins"), 16: ("sixteen", "sechzehn"), 30: ("thirty", "dreißig"),
        21: ("twenty-one", "einundzwanzig"), 101: ("one hundred one", "einhunderteins"),
        612: ("six hundred twelve", "sechshundertzwölf"), 700: ("seven hundred", "siebenhundert"),
        777: ("seven hundred seventy-seven", "siebenhundertsiebenundsiebzig"),
    }  # fmt: skip
    for number, words in known.items():
        assert (elr_translation.english(number), elr_translation.german(number)) == words
    lines = elr_translation.numbers()
    assert lines == elr_translation.numbers()
    assert {f"{source}\t{target}\n" for source, target in known.values()} < set(lines)
    assert len({line.split("\t")[0] for line in lines}) == len({line.split("\t")[1] for line in lines}) == 1000


def test_pairs_of_the_translation_are_trained_and_held_out(monkeypatch):
    def opened(data, val_data, **fields):
        text = open_text(data, context=elr_translation.CONTEXT, vocabulary="characters", val_data=val_data)
        fit, held = hold_out(text)
        splits = [fit.train, held, fit.val]
        assert [len(split) for split in splits] == [800, 100, 100]
        loaded = (split[MicroBatch(0, 0, 0, 0, tuple(range(len(split))))] for split in splits)
        targets = [set(map(tuple, examples.targets.tolist())) for examples in loaded]
        assert len(set.union(*targets)) == 1000
        return {"fields": fields}

    monkeypatch.setattr(language, "measure", opened)
    assert elr_translation.measure(elr_translation.DATA, lr=0.1) == {"fields": {"lr": 0.1}}
    monkeypatch.setattr(language, "measure", lambda **fields: fields)
    assert elr_translation.measure("pairs:other.tsv", lr=0.1) == {"data": "pairs:other.tsv", "lr": 0.1}


def test_a_translation_trains_below_the_least_loss_without_the_source():
    """log(1000) nats for each number, by its characters and END."""
    targets = [line.split("\t")[1].rstrip("\n") for line in elr_translation.numbers()]
    least = math.log(1000) / (sum(map(len, targets)) / 1000 + 1)
    assert abs(elr_translation.NO_SOURCE - least) < 0.001
    study, losses = find("elr-translation"), {0.1: [(0.29, 0.2)] * 2, 0.2: [(0.31, 0.3)] * 2}
    labels = {"optimizer": "SGD", "setup": "neither", "warm-up": "no"}
    results = results_of({"a": losses}).assign(labels=2 * 2 * [labels], **labels)
    best, _, _ = study.tables(study.settings(seeds=2), results)
    found = dict(zip(best.columns, best.rows[0], strict=True))
    assert (found["rates that train"], found["paper: perplexity"]) == ("1 of 2", "1.385")


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
    mean = {}
    for name in ("gradinit-language", "elr-language", "lwlr-language"):
        results = json.loads((RECORDED / name / "results.json").read_text())
        expected = {**entry.arm.fields, "steps": demo.STUDY.steps, "data": demo.STUDY.data}
        for job in results["jobs"]:
            parameters, values = job["parameters"], job["values"]
            if parameters | expected == parameters and parameters["labels"] == entry.arm.labels:
                mean.setdefault(parameters["lr"], []).append(values["val_loss"] or math.inf)
    lrs = {lr: sum(of) / len(of) for lr, of in mean.items()}
    assert entry.lr == min(lrs, key=lrs.get)
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
        ([1.80, 1.81, 1.79], "GradInit ends at 1.800, 0.150 below longer warm-up: helps (p < 0.001, n = 3)."),
        ([2.10, 2.11, 2.09], "GradInit ends at 2.100, 0.150 above longer warm-up: hurts (p < 0.001, n = 3)."),
        ([1.80, 2.11, 1.91], "GradInit ends at 1.940, 0.010 below longer warm-up: undecided (p = 0.92, n = 3)."),
        ([1.80], "GradInit ends at 1.800, 0.150 below longer warm-up: undecided (n = 1)."),
        ([1.80, float("nan"), 1.79], "GradInit diverges."),
    ],
)
def test_sentences_of_the_demo_follow_from_results(losses, said):
    before = [[2.0, 2.0, 2.0], [1.99, 1.98, 1.97], [1.95, 1.96, 1.94]]
    results = of_demo(demo.ENTRIES[:4], [*(of[: len(losses)] for of in before), losses])
    assert demo.sentence(results, demo.ENTRIES[3]) == f"Post-LN, AdamW: {said}"
