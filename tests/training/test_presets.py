"""Presets train on a folder of pictures at test size; commands print their plan and the result."""

import json
import sys
from pathlib import Path

import pytest
import torch
from cases import long
from small_photos import make

from fused_lwlr.runs.metrics import read_records
from fused_lwlr.runs.run import run
from fused_lwlr.training import mlperf
from fused_lwlr.training.presets import PRESETS, resolve
from fused_lwlr.training.recipe import FIELDS
from fused_lwlr.training.setup import model_argument

# a narrow and shallow model of each architecture
SMALL = {
    "timm:resnet50": {"model": "timm:test_resnet"},
    "timm:vit_small_patch16_224": ("embed_dim=24", "depth=2", "num_heads=2"),
    "timm:deit3_small_patch16_224": ("embed_dim=24", "depth=2", "num_heads=2"),
    "timm:convnext_tiny": ("dims=(8,16,24,32)", "depths=(1,1,1,1)"),
    "timm:swin_tiny_patch4_window7_224": ("embed_dim=12", "depths=(1,1,1,1)", "num_heads=(1,1,2,2)", "window_size=2"),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make(tmp_path_factory.mktemp("pictures") / "folder", classes=3, images=6)


def small(preset, pictures, **options):
    recipe = resolve(preset, {})
    change = SMALL[recipe.model]
    change = change if isinstance(change, dict) else {"model_args": (*recipe.model_args, *change)}
    sizes = {"image_size": 32, "batch_size": 8, "micro_batch": 4, "steps": 2, "workers": 0}
    sizes |= {"calibration_steps": 1} if recipe.rates == "layerwise" else {}
    # LARS has no numbers for batches this small; some architectures take images of one size alone
    sizes |= {name: getattr(recipe, name) for name in mlperf.FIELDS} if "lars" in preset else {}
    sizes |= {"test_size": 40} if recipe.test_size else {}
    return resolve(preset, {"data": str(pictures), "device": "cpu", "log_every": 1, **sizes, **change, **options})


DISTINCT = [
    "resnet50-sgd-strong", "convnext-t", "vit-s-adamw", "swin-t", "resnet50-nesterov", "resnet50-a3", "vit-s-deit3",
    "vit-s-big-vision", "resnet50-lars-lwlr", "resnet50-larc", "resnet50-lamb", "resnet50-elr-lwlr",
]  # fmt: skip


def test_each_choice_of_a_preset_is_trained():
    """The other presets differ from those trained here in numbers only: rates, decay, epochs, strength of pictures."""
    numbers = {"lr", "weight_decay", "epochs", "augmentation"}
    every, trained = ([resolve(name, {}) for name in names] for names in (PRESETS, DISTINCT))
    for field in FIELDS.keys() - numbers:
        assert {repr(getattr(r, field)) for r in every} == {repr(getattr(r, field)) for r in trained}, field


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_start_as_the_page_of_recipes_says(preset):
    """Presets of the LWLR paper, `resnet50-elr` and names with `-lwlr` have its initialization. Others have timm's."""
    of_the_paper = "LWLR paper" in PRESETS[preset].source or preset == "resnet50-elr" or preset.endswith("-lwlr")
    assert resolve(preset, {}).init == ("lwlr" if of_the_paper else "model")
    # no --init is needed with weights from a file
    assert resolve(preset, {"weights": "model.pt"}).init == "model"


@pytest.mark.parametrize(
    ("given", "init"),
    [({}, "lwlr"), ({"rates": "single"}, "model"), ({"scaling": "lars"}, "model"), ({"weights": "w.pt"}, "model")],
)
def test_models_of_timm_start_as_the_page_of_recipes_says(given, init):
    assert resolve(None, {"model": "timm:resnet18", **given}).init == init


@pytest.mark.parametrize("preset", [name if name == "vit-s-adamw" else long(name) for name in DISTINCT])
def test_two_steps(preset, pictures, timm, tmp_path, monkeypatch):
    monkeypatch.setattr("fused_lwlr.runs.run.write_report", lambda folder: Path(folder) / "report.html")
    recipe = small(preset, pictures, out=str(tmp_path), ema=0.9 if "vit" in preset else None)
    assert run(recipe) == 0
    found = read_records(tmp_path / "metrics.jsonl")
    losses = [record["loss"] for record in found if record["kind"] == "train"]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
    tests = [(record["weights"], record["images"]) for record in found if record["kind"] == "validation"]
    assert tests == [("model", 3), ("ema", 3)][: 2 if "vit" in preset else 1]
    assert (tmp_path / "rates.json").exists() == (recipe.rates == "layerwise")
    start = json.loads((tmp_path / "run.json").read_text())[-1]
    assert start["config"]["model_args"] == list(recipe.model_args)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    fresh = timm.create_model(recipe.model.removeprefix("timm:"), num_classes=3, **_arguments(recipe))
    fresh.load_state_dict(weights)


def _arguments(recipe):
    found = dict(map(model_argument, recipe.model_args))
    return found if recipe.model == "timm:test_resnet" or "convnext" in recipe.model else {"img_size": 32, **found}


def cells(output):
    """The rows of tables with two columns."""
    return {row.split("│")[1].strip(): row.split("│")[2].strip() for row in output.splitlines() if row.count("│") == 3}


@pytest.mark.long
def test_the_real_resnet_in_a_dry_run(command, pictures, timm, tmp_path):
    line = f"train --preset resnet50-lars-lwlr --data {pictures} --image-size 32 --batch-size 16 --micro-batch 2 "
    line += "--lr 0.02 --warmup-epochs 5 --epochs 90 --momentum 0.9 --weight-decay 1e-4"
    output = command(f"{line} --workers 0 --device cpu --ema 0.99 --dry-run").output
    for text in (
        "timm:resnet50, 23,514,179 parameters",
        "18 images to train, 3 to test, 3 classes, 32 x 32 pixels",
        "16 images: 1 process, 8 passes in each, of 2 images",
        "1 steps; 2 images are left over",
        "90 steps, 5 of them warm-up, then a polynomial to 0",
        "0.02 at its peak",
        "sgd, momentum 0.9, nesterov False, lr_in_momentum True, rescale_weights False, scaling lars, rates layerwise",
        "0.0001 of 54 of 161 tensors, 23,461,056 parameters",
        "90 steps at the lower of these, without validation",
        "kept for the backward pass, 2 images",
        "Learning rates at the peak, calibrated on one minibatch",
        "Batches loaded ahead on this machine, at most",
        "training, 1 x 0 workers, 2 passes each of 2 images",
        "validation, 1 x 0 workers, 2 passes each of 3 images",
        "loader alone, 0 workers",
        "steps alone, passes of 2 images",
    ):
        assert text in output, text
    memory = cells(output)
    of_weights = f"{4 * 23_514_179 / 2**30:.3f}"
    for name in ("weights", "gradients", "state of the optimizer", "average of the weights"):
        assert memory[name] == of_weights, name
    speeds = [
        float(memory[part].replace(",", "")) for part in ("loader alone, 0 workers", "steps alone, passes of 2 images")
    ]
    hours, minutes = memory["90 steps at the lower of these, without validation"].removesuffix(" min").split(" h ")
    # speeds are printed to 0.1
    least, most = (90 * 16 / (min(speeds) + off) / 60 for off in (0.051, -0.051))
    assert least - 0.51 < 60 * int(hours) + int(minutes) < most + 0.51
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_small_images_has_whole_passes_and_the_time_of_an_epoch(command):
    found = cells(command("train --model resnet8x2 --batch-size 128 --device cpu --dry-run").output)
    speeds = [
        float(found[part].replace(",", "")) for part in ("loader alone, 0 workers", "steps alone, passes of 128 images")
    ]
    minutes = float(found["an epoch at the lower of these, 11 steps"].removesuffix(" min"))
    assert minutes == pytest.approx(11 * 128 / min(speeds) / 60, abs=0.051)


def test_saved_bytes_are_those_of_a_linear_layer():
    from fused_lwlr.runs.dry_run import saved_bytes

    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Sigmoid(), torch.nn.Linear(50, 2))
    with saved_bytes(model) as saved:
        model(torch.randn(7, 30)).sum().backward()
    # the inputs of both layers; sigmoid saves its output, which is the second layer's input
    assert saved[0] == 4 * 7 * (30 + 50)


def test_presets_are_listed(command):
    lines = command("train --presets").output.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(PRESETS)


@pytest.fixture
def asked(monkeypatch):
    """The recipes that would have been trained."""
    found = []
    monkeypatch.setattr("fused_lwlr.runs.run.run", lambda recipe: found.append(recipe) or 0)
    return found


@pytest.mark.parametrize(
    ("file", "text"),
    [("a.toml", 'preset = "resnet50-sgd"\nlr = 1e-2\nbatch-size = 512\ndata = "x"\nexclude = ["*bn*"]\n'),
     ("a.yaml", "preset: resnet50-sgd\nlr: 1e-2\nbatch_size: 512\ndata: x\nexclude: ['*bn*']\nema:\n")],
)  # fmt: skip
def test_a_file_is_between_the_preset_and_the_command_line(file, text, command, asked, tmp_path):
    (tmp_path / file).write_text(text, encoding="utf-8")
    command(f"train --config {file}")
    command(f"train --config {file} --batch-size 1024 --lr-scaling linear --exclude *.bias --exclude fc.*")
    command(f"train --config {file} --preset resnet50-adamw")
    first, second, third = asked
    assert (first.model, first.optimizer, first.weight_decay) == ("timm:resnet50", "sgd", 1e-4)
    assert (first.lr, first.lr_scaling, first.batch_size, first.exclude) == (0.01, "none", 512, ("*bn*",))
    assert (second.lr, second.lr_scaling, second.batch_size, second.exclude) == (
        0.01,
        "linear",
        1024,
        ("*.bias", "fc.*"),
    )
    assert (third.optimizer, third.lr, third.batch_size) == ("adamw", 0.01, 512)


def test_epochs_of_the_command_line_replace_steps_of_a_file(command, asked, tmp_path):
    (tmp_path / "a.toml").write_text("steps = 5\n")
    for options in ("", "--epochs 2", "--epochs 2 --steps 3"):
        command(f"train --config a.toml {options}")
    assert [(recipe.epochs, recipe.steps) for recipe in asked] == [(20.0, 5), (2.0, None), (2.0, 3)]


def test_warm_up_of_a_file_keeps_its_share_of_the_epochs_of_the_command_line(command, asked, tmp_path):
    """As of steps; a file without steps has its warm-up in epochs."""
    text = "epochs = 20\nwarmup_epochs = 2\n"
    (tmp_path / "steps.toml").write_text(f'{text}steps = 5\nschedule = "step"\nstep_epochs = 5\n')
    (tmp_path / "epochs.toml").write_text(text)
    for file in ("steps", "epochs"):
        command(f"train --config {file}.toml --epochs 4")
    assert [recipe.warmup_epochs for recipe in asked] == pytest.approx([0.4, 2])
    assert asked[0].step_epochs == pytest.approx(1)


def test_a_rate_of_the_command_line_is_not_scaled_as_a_rate_of_the_file(command, asked, tmp_path):
    (tmp_path / "a.toml").write_text('lr = 0.1\nlr_scaling = "linear"\nlr_batch_size = 16\n')
    for options in ("", "--lr 0.2", "--lr 0.2 --lr-scaling sqrt"):
        command(f"train --config a.toml {options}")
    found = [(recipe.lr, recipe.lr_scaling) for recipe in asked]
    assert found == [(0.1, "linear"), (0.2, "none"), (0.2, "sqrt")]


@pytest.mark.parametrize(
    ("line", "files", "message"),
    [
        ("--preset resnet50-sgd", {}, "--data is missing: --preset resnet50-sgd is for photographs"),
        ("--batch-size 0", {}, "--batch-size 0: must be greater than or equal to 1"),
        ("--config a.toml", {}, "--config a.toml: there is no such file"),
        ("--config a.json", {"a.json": "{}"}, "--config a.json: must end in .toml, .yaml, .yml"),
        ("--config a.toml", {"a.toml": "preset = 5"}, "--preset 5 in a.toml must be the name of a preset"),
        ("--config a.toml", {"a.toml": "lr ="}, "--config a.toml: Invalid value"),
        ("--config a.yaml", {"a.yaml": "lr: ["}, "--config a.yaml: while parsing"),
        *((f"--config {name}", {name: f"{lr} {'[' * 5000}"}, f"--config {name}: maximum recursion depth exceeded")
          for name, lr in {"a.toml": "lr =", "a.yaml": "lr:"}.items()),
        ("--config a.yaml", {"a.yaml": "3"}, "--config a.yaml: must be a table of options, such as 'batch_size'"),
        ("--config a.toml", {"a.toml": "batch_size = 0"}, "a.toml: --batch-size 0: must be greater than or equal to 1"),
        ("--config a.toml", {"a.toml": "batchsize = 0"}, "a.toml: batchsize: there is no such option; did you mean"),
        ("--config a.toml --lr -1", {"a.toml": "lr = 0.1"}, "--lr -1: must be greater than or equal to 0"),
        ("--config a.toml", {"a.toml": "\udcff\udcfel\0r\0"}, "--config a.toml is not UTF-8: convert it"),
        ("--config a.yaml", {"a.yaml": "data: \udce4"}, "--config a.yaml is not UTF-8: convert it"),
        ("--config a.yaml", {"a.yaml": "lr: 2020-13-45"}, "--config a.yaml: month must be in 1..12"),
        ("--config a.toml", {"a.toml": "batch_size = true"}, "a.toml: --batch-size true: must not be true or false"),
        ("--preset resnet50-lars --data x --config a.toml", {"a.toml": "batch_size = inf"},
         "a.toml: --batch-size inf: must be a finite number"),
        ("--preset resnet50-lars --data x --config a.toml --batch-size 64", {"a.toml": "steps = inf"},
         "--batch-size 64: the table of MLPerf has batches of 1,632 to"),
        ("--config a.toml", {"a.toml": "batch-size = 1\nbatch_size = 1"}, "--config a.toml has batch-size twice"),
        ("--config a.yaml", {"a.yaml": "lr: 1\nout: x\nlr: 2"}, "--config a.yaml: lr is given twice: give it once"),
        ("--config a.toml --eval-only", {"a.toml": "batch_size = 0"}, "a.toml: --batch-size 0: must be greater than"),
    ],
)  # fmt: skip
def test_wrong_commands_get_one_line_in_the_users_spelling(line, files, message, command, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    stderr = command(f"train {line}", 2).stderr
    assert stderr.startswith(f"Error: {message}")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("given", ["*.bias,fc.*", ("*.bias", "fc.*"), ["*.bias", "fc.*"]])
def test_patterns_may_be_one_text(given):
    """As `fused-lwlr study --set` has them."""
    recipe = resolve(None, {"exclude": given, "scaling": "lars", "select": given})
    assert recipe.exclude == recipe.select == ("*.bias", "fc.*")


def test_yaml_needs_pyyaml(command, tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("lr: 1", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert command("train --config a.yaml", 2).stderr.startswith(
        "Error: --config a.yaml needs PyYAML: pip install pyyaml"
    )


def test_decisions_that_are_not_obvious_are_reported(command, asked):
    said = command("train --model timm:resnet18 --pretrained --rates single").output
    assert "The weights are pretrained: training starts from them as they are" in said
    said = command("train --preset resnet50-lars --data x --batch-size 5000").output
    assert "MLPerf has no batch of 5,000 images: interpolated between 4,096 and 8,192" in said
    assert "nobody has tried: --lr 12.01, --warmup-epochs 5, --weight-decay 0.0002, --momentum 0.9, --epochs " in said
    said = command("train --preset resnet50-a3 --data digits --batch-size 2048").output
    assert "--preset resnet50-a3 is for photographs: replace its options that have no meaning for --data digits" in said
    said = command("train --model resnet50").output
    assert "--model resnet50 is a net for small images, of three stages: ImageNet's is --model timm:resnet50." in said
    assert len(asked) == 4


def test_help_lists_every_option_with_its_default(command):
    text = command("train --help").output
    for name, field in FIELDS.items():
        assert f"--{name.replace('_', '-')}" in text, name
        assert field.description.split()[0] in text
    for default in ("0.9,0.999", "depends on the model and the optimizer", "bicubic|bilinear|random", "runs/train"):
        assert default in " ".join(text.split())


@pytest.mark.long
def test_a_run_of_an_older_version_resumes(command, tmp_path):
    """Checkpoints of an older version lack newer options; a change of one of these is refused."""
    line = "train --model noshort --rates single --device cpu --epochs 2 --checkpoint-minutes 1000"
    command(line)
    [path] = (tmp_path / "runs/train/checkpoints").glob("*.pt")
    saved = torch.load(path, weights_only=False)
    for name in ("nesterov", "betas", "loss", "power", "min_lr", "exclude", "mean", "repeats"):
        del saved["config"][name]
    torch.save(saved, path)
    assert "is done" in command(line).output
    assert "  --min-lr: 0.0 -> 0.001\n" in command(f"{line} --min-lr 0.001", 2).stderr


@pytest.mark.parametrize("code", [0, 143])
def test_one_of_several_processes_ends_at_once(code, command, monkeypatch):
    """The exit code tells torchrun whether the training is complete, also if gloo's threads do not end cleanly."""
    left = []
    monkeypatch.setattr("fused_lwlr.runs.run.run", lambda recipe: code)
    monkeypatch.setattr("os._exit", left.append)
    command("train", code)
    assert not left
    monkeypatch.setenv("WORLD_SIZE", "2")
    command("train", code)
    command("train --goal 1", 2)
    assert left == [code, 2]


@pytest.mark.long
def test_train_and_report(command, tmp_path):
    pytest.importorskip("tensorboard")
    line = (
        "train --model noshort --scaling elr --goal 0.15 --momentum 0 --epochs 1 --device cpu --ema 0.9 --tensorboard"
    )
    output = command(line).output
    for text in (
        "step     22",
        "epoch   1.00",
        "images/s",
        "test at step 22, epoch 1: top-1",
        "test of the average at step 22",
    ):
        assert text in output
    assert "Everything is in runs/train; runs/train/report.html shows it." in output
    assert {path.name for path in (tmp_path / "runs/train").iterdir()} == {
        "checkpoints", "layers.jsonl", "lock", "metrics.jsonl", "model.pt", "model_ema.pt", "recipe.toml",
        "report.html", "run.json", "tensorboard",
    }  # fmt: skip
    (tmp_path / "runs/train/report.html").unlink()
    assert "Wrote runs/train/report.html" in command("report").output
    refused = command(f"{line} --goal 0.2", 2).stderr
    assert "  --goal: 0.15 -> 0.2\n" in refused
    config = json.loads((tmp_path / "runs/train/run.json").read_text())[0]["config"]
    assert {key: config[key] for key in ("scaling", "goal", "rates")} == {
        "scaling": "elr", "goal": 0.15, "rates": "single",
    }  # fmt: skip
