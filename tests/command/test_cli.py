import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fused_lwlr import LayerRates
from fused_lwlr.command.main import app
from fused_lwlr.training.defaults import NOSHORT

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in an empty folder, with a terminal wide enough not to break lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()

    def run(line, code=0):
        result = runner.invoke(app, line.split(), prog_name="fused-lwlr")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("--help", ["calibrate", "train", "demo", "--version", "Start with fused-lwlr demo"]),
        ("calibrate --help", ["Examples:", "--steps", "--no-init", "--plot", "one sub-folder per class", "synthetic"]),
        (
            "train --help",
            ["Examples:", "--rates", "--scaling", "--goal", "--preset", "1e-4 for sgd, 0.1 for adamw", "runs/train"],
        ),
        ("demo --help", ["--seeds", "1797", "runs/demo"]),
    ],
)
def test_help(run, line, texts):
    output = run(line).output
    for text in texts:
        assert text in output


def test_help_does_not_wait_for_matplotlib_or_scikit_learn():
    code = "import sys, fused_lwlr.command.main; print({'matplotlib', 'sklearn', 'timm', 'PIL'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_version(run):
    assert run("--version").output == "fused-lwlr 0.1.0\n"


def test_calibrate_then_train_with_its_rates(run, tmp_path):
    output = run("calibrate --model vit --steps 2 --out a/rates.json --plot a/rates.png --device cpu").output
    rates = LayerRates.from_json(tmp_path / "a" / "rates.json")
    assert rates.steps == 2
    assert all(f"{layer.name} " in output and f"{layer.eta:.4f}" in output for layer in rates.layers)
    assert "vit on digits, 2 minibatches of 64. Wrote a/rates.json and a/rates.png." in output
    assert (tmp_path / "a" / "rates.png").read_bytes().startswith(PNG)

    line = "train --model vit --rates a/rates.json --epochs 1 --device cpu"
    assert "test at epoch 1: top-1" in run(line).output
    assert dict(LayerRates.from_json(tmp_path / "runs/train/rates.json")) == dict(rates)
    assert "The training in runs/train is done" in run(line).output


def test_calibrate_without_drawing_weights(run, tmp_path):
    run("calibrate --steps 1 --out drawn.json --device cpu")
    run("calibrate --steps 1 --no-init --out own.json --device cpu")
    drawn, own = (dict(LayerRates.from_json(tmp_path / name)) for name in ("drawn.json", "own.json"))
    assert drawn.keys() == own.keys()
    assert drawn != own


def test_synthetic_images_are_named(run):
    line = "calibrate --data synthetic --image-size 16 --batch-size 4 --steps 1 --device cpu"
    assert "resnet on synthetic (random images and labels), 1 minibatches of 4" in run(line).output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("calibrate --model nope", "there is no model 'nope': choose from resnet, vit, noshort, short or timm:NAME"),
        ("calibrate --data nowhere", "nowhere is not a folder of images"),
        ("calibrate --device toaster", "device 'toaster' cannot be used here"),
        ("calibrate --steps 23 --device cpu", "22 minibatches"),
        ("train --rates nowhere.json", "rates must be single, layerwise or a file of rates, not 'nowhere.json'"),
        ("train --warmup-epochs -2", "warmup_epochs must be at least 0, not -2.0"),
        ("train --scaling elr", "scaling elr needs a goal: the effective learning rate of every layer"),
        ("train --goal 0.1", "goal 0.1 is for scaling elr, not none"),
        ("train --scaling elr --goal -1", "goal must be above 0, not -1.0"),
        ("demo --model noshort --optimizer adamw", "trains noshort with sgd only"),
        ("train --preset resnet50", "there is no preset 'resnet50': did you mean resnet50-"),
        ("train --batch-size 2000", "batch_size=2000 is more than the 1437 images of the training set"),
        ("train --fsdp", "fsdp shards a model over processes, of which there is one"),
        ("report nowhere", "nowhere holds no run"),
    ],
)
def test_bad_input_is_one_line_without_a_traceback(run, line, message):
    stderr = run(line, 2).stderr.strip()
    assert stderr.startswith("Error: ")
    assert message in stderr
    assert "\n" not in stderr


def test_divergence_is_one_line_too(run):
    stderr = run("train --rates single --lr 1e12 --warmup-epochs 0 --epochs 1 --device cpu", 1).stderr
    assert "try a lower learning rate" in stderr


@pytest.mark.parametrize("line", ["demo", "calibrate --plot rates.png"])
def test_a_missing_extra_is_named(run, monkeypatch, line):
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] == "matplotlib" or name == "fused_lwlr.papers.demo_figure"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fused_lwlr.papers.demo", raising=False)

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name == "matplotlib":
                raise ModuleNotFoundError("No module named 'matplotlib'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    assert run(line, 2).stderr.strip() == "Error: matplotlib is not installed: pip install 'fused_lwlr[cli]'"


def test_demo(run, tmp_path):
    output = run("demo --model resnet --optimizer adamw --seeds 2 --epochs 1 --out here --device cpu").output
    for text in (
        "layer-wise",
        "single",
        "difference",
        "accuracy in %",
        "calibrated multipliers",
        "Wrote here/demo.png",
    ):
        assert text in output
    assert (tmp_path / "here" / "demo.png").read_bytes().startswith(PNG)
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    runs = results["runs"]
    assert results["elr"] == []
    assert [(r["config"]["lr"], r["config"]["rates"], r["config"]["seed"]) for r in runs] == [
        (lr, rates, seed) for lr in (0.03, 0.09) for rates in ("single", "layerwise") for seed in (0, 1)
    ]
    assert [r["multipliers"] is None for r in runs] == [True, True, False, False] * 2
    accuracy = sum(100 * r["history"][-1]["test_accuracy"] for r in runs[:2]) / 2
    assert f"{accuracy:.2f} ± " in output


def test_demo_of_effective_rates(run, tmp_path):
    output = run("demo --model noshort --optimizer sgd --seeds 1 --epochs 1 --out here --device cpu").output
    for text in ("32 layers without shortcuts", " ELR  ", " plain  ", "goal", "Wrote here/results.json."):
        assert text in output
    assert not (tmp_path / "here" / "demo.png").exists()
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert results["runs"] == []
    configs = [r["config"] for r in results["elr"]]
    assert len(configs) == len(NOSHORT)
    assert {c["seed"] for c in configs} == {0}
    assert [c["goal"] for c in configs if c["scaling"] == "elr"] == [NOSHORT[-1]["goal"]]
    assert f"{100 * results['elr'][-1]['history'][-1]['test_accuracy']:.2f}" in output
