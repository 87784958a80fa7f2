import io
import json
import subprocess
import sys
from itertools import chain

import pytest
from idx_files import arrays, save

from fused_lwlr import LayerRates
from fused_lwlr.command.group import COMMANDS, command
from fused_lwlr.command.main import app
from fused_lwlr.data.sampler import permutation
from fused_lwlr.data.sources import Tensors

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("--help", ["calibrate", "train", "demo", "--version", "Start with fused-lwlr demo"]),
        ("calibrate --help", ["Examples:", "--no-init", "a folder for each class", "fashion-mnist"]),
        ("train --help", ["Examples:", "1e-4 for sgd, 0.1 for adamw", "runs/train"]),
        ("demo --help", ["--seeds", "--steps", "runs/demo"]),
        ("study --help", ["elr-fit", "--set", "amp=bf16"]),
    ],
)
def test_help(run, line, texts):
    output = " ".join(run(line).output.split())
    for text in texts:
        assert text in output


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_is_cut_at_80_columns(run, name, monkeypatch):
    assert (command(name).help or "").startswith(COMMANDS[name][1])
    monkeypatch.setenv("COLUMNS", "80")
    output = run(f"{name} --help").output
    assert max(map(len, output.splitlines())) <= 80
    assert {opt for param in command(name).params for opt in param.opts if opt[0] == "-"} <= set(output.split())


def test_no_option_has_its_name_as_placeholder():
    """Typer 0.27 takes such a placeholder, `--device DEVICE`, for the name of the option: `--DEVICE`."""
    params = [param for name in COMMANDS for param in command(name).params if param.param_type_name == "option"]
    assert {"device", "seeds", "batch_size"} <= {param.name for param in params}
    assert not [param.name for param in params if param.name.upper() == param.metavar]


def test_help_imports_neither_torch_nor_plotting():
    slow = {"torch", "matplotlib", "sklearn", "timm", "PIL", "pandas", "pydantic"}
    code = f"import sys, fused_lwlr.command.main; print({slow} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_version(run):
    assert run("--version").output == "fused-lwlr 0.1.0\n"


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ("", ["cls_token", "pos_embed"]),
        ("--rates-exclude none", []),
        ("--rates-exclude pos_embed --rates-exclude head.*", ["pos_embed", "head.weight", "head.bias"]),
        # the position embedding of this model does not start at zero
        ("--no-init", ["cls_token"]),
    ],
)
def test_calibrate_leaves_layers_out(run, tmp_path, options, left_out):
    line = "calibrate --model vit1x16 --steps 1 --device cpu"
    run(f"{line} --rates-exclude none --out all.json")
    every = LayerRates.from_json(tmp_path / "all.json")
    run(f"{line} {options}")
    rates = LayerRates.from_json(tmp_path / "rates.json")
    assert [layer.name for layer in rates.layers if layer.note == "excluded"] == left_out
    if "--no-init" not in options:
        assert dict(rates) == dict(every.exclude(*left_out) if left_out else every)


def test_calibrate_knows_the_layers_that_it_leaves_out(run):
    told = run("calibrate --model vit1x16 --steps 1 --device cpu --rates-exclude pos_embd", code=2).output
    assert "--rates-exclude has 'pos_embd': it is not a layer of vit1x16; did you mean 'pos_embed'?" in told


@pytest.mark.long
def test_a_run_keeps_the_layers_that_it_left_out(run, tmp_path):
    line = "train --model vit --calibration-steps 1 --epochs 0.1 --device cpu"
    run(line)
    assert LayerRates.from_json(tmp_path / "runs/train/rates.json")["pos_embed"] == 1
    told = run(f"{line} --rates-exclude none", code=2).output
    assert "--rates-exclude: null -> []" in told


@pytest.mark.long
def test_idx_files_are_calibrated_on_and_trained_on(run, tmp_path):
    save(tmp_path / "small", arrays())
    data = "--data idx:small --device cpu"
    assert "resnet on idx:small, 2 minibatches of 20" in run(f"calibrate {data} --batch-size 20 --steps 2").output
    line = f"train {data} --epochs 1 --batch-size 20"
    assert "test at step 3, epoch 1: top-1" in run(f"{line} --augmentation basic").output
    wrong = run(f"{line} --augmentation strong --out other", code=2).output
    assert "--augmentation strong is for photographs: --data idx:small takes none or basic" in wrong.replace("'", "")
    absent = run("train --data idx:nowhere", code=2).output
    assert "--data idx:nowhere: there is no folder nowhere" in absent


@pytest.mark.long
def test_calibrate_then_train_with_its_rates(run, tmp_path):
    output = run("calibrate --model vit --steps 2 --out a/rates.json --plot a/rates.png --device cpu").output
    rates = LayerRates.from_json(tmp_path / "a" / "rates.json")
    assert rates.steps == 2
    assert all(f"{layer.name} " in output and f"{layer.eta:.4f}" in output for layer in rates.layers)
    assert "vit on digits, 2 minibatches of 64. Wrote a/rates.json and a/rates.png." in output
    assert (tmp_path / "a" / "rates.png").read_bytes().startswith(PNG)

    line = "train --model vit --rates a/rates.json --epochs 1 --device cpu"
    assert "test at step 22, epoch 1: top-1" in run(line).output
    assert dict(LayerRates.from_json(tmp_path / "runs/train/rates.json")) == dict(rates)
    assert "The training in runs/train is done" in run(line).output


def test_a_terminal_that_lacks_letters(tmp_path, monkeypatch):
    """The table has an η."""
    monkeypatch.chdir(tmp_path)
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1", write_through=True))
    with pytest.raises(SystemExit) as end:
        app(["calibrate", "--steps", "1", "--device", "cpu"])
    assert end.value.code == 0
    assert b"Wrote rates.json" in shown.getvalue()
    assert (tmp_path / "rates.json").exists()


def test_synthetic_images_are_named(run):
    line = "calibrate --model resnet8x2 --data synthetic --image-size 16 --batch-size 4 --steps 1 --device cpu"
    assert "resnet8x2 on synthetic (random images and labels), 1 minibatches of 4" in run(line).output


@pytest.mark.long
def test_minibatches_of_more_than_an_epoch(run, tmp_path, monkeypatch):
    """An epoch of the digits has 22 minibatches; the following ones come from the next epoch, in another order."""
    loaded, load = [], Tensors.__getitem__
    monkeypatch.setattr(
        Tensors, "__getitem__", lambda self, wanted: (loaded.append(wanted.indices), load(self, wanted))[1]
    )
    run("calibrate --steps 23 --batch-size 64 --device cpu --workers 0")
    assert LayerRates.from_json(tmp_path / "rates.json").steps == 23
    first, second = (permutation(1437, 0, epoch).tolist() for epoch in (0, 1))
    assert [*chain(*loaded)] == first[: 22 * 64] + second[:64]
    assert first[:64] != second[:64]


@pytest.mark.long
def test_demo(run, tmp_path):
    output = run("demo --quick --seeds 1 --jobs 1 --out here --device cpu").output
    for text in ("Post-LN", "GradInit", "LWLR", "needs", "one seed", "4 steps say nothing about", "here/demo.png"):
        assert text in output
    assert " ends at " not in output
    assert (tmp_path / "here" / "demo.png").read_bytes().startswith(PNG)
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert results["settings"] | {"seeds": 1, "steps": 4, "quick": True} == results["settings"]
    table = (tmp_path / "here" / "table.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| P")]
    for job, row in zip(results["jobs"], rows, strict=True):
        assert row[3:] == [f"{job['parameters']['lr']:g}", f"{job['values']['loss']:.3f}"]
        steps = 5 if row[1].startswith("longer") else 4
        assert job["values"]["curve"][-1] == [steps, job["values"]["loss"]]
