"""Every example of the documentation runs, shortened to seconds, and gives the described result."""

import importlib.util
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import HAS_GPU

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TINY = {"width": 16, "depth": 2, "steps": 40}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs an example in a temporary folder, and returns its variables."""

    def run(name, *arguments, **options):
        given = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments, *given])
        monkeypatch.chdir(tmp_path)
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return run


@pytest.fixture
def photographs(tmp_path):
    """A folder of images for training and one for validation: red ones and blue ones."""
    image = pytest.importorskip("PIL.Image")
    for split, count in (("train", 8), ("val", 4)):
        for color in ("red", "blue"):
            folder = tmp_path / "photographs" / split / color
            folder.mkdir(parents=True)
            for i in range(count):
                image.new("RGB", (40, 30), color).save(folder / f"{i}.png")
    return tmp_path / "photographs"


def numbers_after(what, text):
    return [float(number) for number in re.findall(rf"{what} ([\d.]+)", text)]


def test_examples_are_short_and_all_tested():
    for path in EXAMPLES.glob("*.py"):
        assert f"test_{path.stem}" in globals()
        assert len(path.read_text().splitlines()) < 80, path.name


@pytest.mark.parametrize(
    ("name", "package"),
    [("finetune_timm", "timm"), ("imagenet_lars", "timm"), ("lightning_trainer", "pytorch_lightning"),
     ("transformers_trainer", "transformers")],
)  # fmt: skip
@pytest.mark.long
def test_examples_with_other_libraries_start_as_a_user_starts_them(name, package, tmp_path):
    """Examples start in new processes, in which no fixture has imported a package beforehand."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--help"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout


@pytest.mark.long
@pytest.mark.usefixtures("timm")
def test_finetune_timm(run, photographs, capsys):
    sizes = {"model": "test_vit", "batch_size": 8, "epochs": 4, "workers": 0, "lr": 0.01}
    found = run("finetune_timm", "--no-pretrained", data=photographs / "train", **sizes)
    losses = numbers_after("training loss", capsys.readouterr().out)
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    assert found["multipliers"]["head.weight"] == 1
    assert found["multipliers"]["blocks.0.attn.qkv.weight"] == 0.75 ** len(found["model"].blocks)
    assert found["multipliers"]["patch_embed.proj.weight"] == 0


@pytest.mark.long
@pytest.mark.usefixtures("timm")
def test_imagenet_lars(run, photographs, capsys):
    sizes = {"model": "test_resnet", "image_size": 32, "batch_size": 8, "pass_size": 4, "epochs": 2, "workers": 0}
    found = run("imagenet_lars", data=photographs, warmup_epochs=1, **sizes)
    assert found["scheduler"].last_epoch == found["total"] == 4
    assert found["optimizer"].param_groups[0]["lr"] == 0
    assert len(numbers_after("training loss", capsys.readouterr().out)) == 2


@pytest.mark.long
def test_bf16_master_weights(run):
    losses = run("bf16_master_weights", epochs=5)["losses"]
    off = {name: abs(loss - losses["float32"]) for name, loss in losses.items()}
    assert off["bfloat16, master weights"] < off["bfloat16"] / 4
    assert off["bfloat16, stochastic rounding"] < off["bfloat16"] / 2


@pytest.mark.long
def test_own_scaling(run, capsys):
    found = run("own_scaling")
    factors = dict(
        zip(*(getattr(found["optimizer"].layer_stats(), name) for name in ("names", "trust_ratio")), strict=True)
    )
    assert factors["0.weight"] < 1
    assert factors["2.weight"] < 1
    assert factors["0.bias"] == factors["2.bias"] == 1
    assert "The step is the one that was written out." in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("gradinit", ["--gradinit", "--no-gradinit"])
def test_language_model(run, gradinit):
    sizes = {"gradinit_steps": 5, "context": 16, "lr": 0.01, "width": 16, "depth": 1, "steps": 20}
    losses = run("language_model", gradinit, **sizes)["losses"]
    assert losses[-1] < losses[0] - 1
    assert losses[0] < math.log(256) + 1


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
def test_cuda_graph_without_gpu(run):
    with pytest.raises(SystemExit, match=r"cuda_graph\.py needs a CUDA GPU"):
        run("cuda_graph")


@pytest.mark.gpu
def test_cuda_graph(run):
    losses = torch.stack(run("cuda_graph", steps=200)["losses"])
    assert losses[-10:].mean() < losses[:10].mean() - 0.1


@pytest.mark.long
def test_fsdp2(tmp_path):
    """Two processes; the checkpoint has all of the model and of the optimizer's state.

    The processes end without a shutdown of Python, in which a thread of gloo may abort them.
    """
    from torch.distributed.checkpoint import FileSystemReader

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(EXAMPLES / "fsdp2.py"), "--device=cpu", f"--checkpoint={tmp_path / 'checkpoint'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parents[1]), str(tmp_path)])
    hook = "import atexit, os, pathlib\nif 'RANK' in os.environ: atexit.register(pathlib.Path('shutdown').touch)\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    sizes = [f"--{name}={value}" for name, value in TINY.items()]
    result = subprocess.run(
        [*command, *sizes], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "shutdown").exists()
    (first,), (last,) = (re.findall(rf"([\d.]+) at {when}", result.stdout) for when in ("first", "last"))
    assert float(last) < float(first) - 1
    saved = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    assert saved["model.0.weight"].size == torch.Size([256, 16])
    assert saved["optimizer.state.0.weight.exp_avg"].size == torch.Size([256, 16])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_transformers_trainer(run, third_party):
    third_party("transformers")
    result = run("transformers_trainer", steps=200)["result"]
    assert result.global_step == 200
    assert result.training_loss < math.log(64) - 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_lightning_trainer(run, third_party):
    third_party("pytorch_lightning")
    assert run("lightning_trainer")["trainer"].callback_metrics["loss"] < 0.8
