"""Values logged to Weights & Biases, with a fake package."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
from run_folder import fill

from fused_lwlr.integrations.extras import import_extra
from fused_lwlr.runs import run as running
from fused_lwlr.runs.boards import WandbSink
from fused_lwlr.runs.metrics import read_records, scalars
from fused_lwlr.training.recipe import Recipe


@pytest.fixture
def wandb(monkeypatch):
    """The runs that were started: their options and logged values."""
    runs = []

    def init(**options):
        run = SimpleNamespace(options=options, logged=[], metrics=[], finished=False)
        run.log = lambda content: run.logged.append(content)
        run.define_metric = lambda name, step_metric: run.metrics.append((name, step_metric))
        run.finish = lambda: setattr(run, "finished", True)
        runs.append(run)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return runs


def test_metrics_and_layers_over_steps(wandb, tmp_path):
    there = WandbSink(tmp_path, {"lr": 0.1})
    records = fill(tmp_path, [there], steps=4)
    there.close()
    [run] = wandb
    assert run.metrics == [("*", "step")]
    assert run.finished
    assert [content["step"] for content in run.logged] == [record.step for record in records]
    assert run.logged == [{**scalars(record), "step": record.step} for record in records]
    train = next(content for content in run.logged if "train/loss" in content)
    first = next(record for record in records if record.kind == "train")
    assert (train["train/loss"], train["train/images_per_second"]) == (first.loss, first.per_second)
    assert {name.split("/")[0] for content in run.logged for name in content} == {
        "step", "train", "validation", "elr", "trust_ratio", "multiplier",
    }  # fmt: skip


def test_a_resumed_run_keeps_its_id(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    recipe = Recipe(rates="single", steps=2, batch_size=64, device="cpu", workers=0, out=str(tmp_path / "name"))
    assert running.run(dataclasses.replace(recipe, wandb=True)) == 0
    again = WandbSink(tmp_path / "name", {})
    first, second = (run.options for run in wandb)
    assert (first["project"], first["name"], first["resume"]) == ("mine", "name", "allow")
    assert first["id"] == second["id"]
    assert first["config"]["batch_size"] == 64
    assert wandb[0].finished
    again.close()
    logged = [content["train/loss"] for content in wandb[0].logged if "train/loss" in content]
    assert logged == [r["loss"] for r in read_records(tmp_path / "name/metrics.jsonl") if r["kind"] == "train"]


@pytest.mark.parametrize("kind", [RuntimeError, OSError, type("UsageError", (Exception,), {})])
def test_without_a_login(kind, tmp_path, monkeypatch):
    def init(**options):
        raise kind("No API key configured.\nUse `wandb login`.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    message = r"^--wandb cannot log \(No API key configured. Use `wandb login`\): run wandb login, set WANDB_MODE=offl"
    with pytest.raises(ValueError, match=message):
        WandbSink(tmp_path, {})


def test_without_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"wandb is not installed: pip install '\.\[wandb\]'"):
        WandbSink(tmp_path, {})
    with pytest.raises(ImportError, match="wandb is not installed"):
        running.run(Recipe(wandb=True, device="cpu", out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_folder_of_results_is_not_the_package(tmp_path, monkeypatch):
    """Python imports it in the working directory, where wandb writes it."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ImportError, match=r"wandb is not installed: pip install '\.\[wandb\]'"):
        import_extra("wandb")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
