"""One command: its measurements here, its notes on skipped ones, and its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import cli, codegen, sweep
from bench.contestants import contestants
from bench.parameter_sets import NETWORKS, SETS, numel, shapes_of
from bench.targets import TARGETS
from fused_lwlr.kernels import constants

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the GPU")
def test_missing_measurements_are_reported(tmp_path, capsys):
    assert cli.main(["--gpu", "--out", str(tmp_path)]) == 0
    assert "skipped: gpu: no GPU: GPU time" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert results["about"].keys() >= {"device", "python", "torch", "triton", "commit", "date", "settings"}
    assert results["skipped"].keys() == {"gpu", *cli.SECTIONS}
    text = path.with_suffix(".md").read_text()
    assert text.count("| not measured |") == len(TARGETS)


def test_sections_are_run_and_saved(tmp_path, monkeypatch):
    lines = [{"kernel": f"step {n}", "dtype": "fp32", "target": "sm_90", "registers": 32, "resident": 16, "spilled": 0,
              "loads": {}, "stores": {}} for n in range(3)]  # fmt: skip
    monkeypatch.setattr(codegen, "rows", lambda quick: iter(lines))
    assert cli.main(["--only", "codegen", "--out", str(tmp_path)]) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["codegen"] == lines


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "speed"],
        ["--gpu", "--only", "host"],
        *(["--gpu", "--seconds", number] for number in ("0", "-1", "nan", "inf")),
        ["--out", "/dev/null/results"],
    ],
)
def test_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["--out", str(tmp_path), *arguments])
    assert error.value.code == 2
    assert f"argument {arguments[-2]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("refused", "row", "failed"),
    [
        ({}, {"who": "torch fused", "skipped": "fails: no memory"}, 0),
        ({"sgd ELR, torch fused fp32": "wrong by 1"}, {"who": "ours"}, 0),
        ({"sgd ELR, ours fp32": "wrong by 1"}, {"who": "ours"}, 1),
        ({}, {"who": "ours", "skipped": "fails: no memory"}, 1),
        ({}, {"who": "ours", "skipped": "no time left"}, 0),
    ],
)
def test_a_failure_of_ours_is_a_failure_of_the_command(refused, row, failed):
    row |= {"set": "toy", "rule": "sgd", "method": "ELR"}
    assert len(cli.failures({"refused": refused, "rows": [row]})) == failed


# as in their papers and timm's model cards; GPT-3 XL rounds to 1.3 billion
@pytest.mark.parametrize(
    ("name", "tensors", "millions"),
    [
        ("ResNet-50", 161, 25.6), ("ViT-S/16", 152, 22.1), ("ConvNeXt-T", 182, 28.6), ("Swin-T", 173, 28.3),
        ("ViT-L/16", 296, 304.3), ("decoder 1.3B", 292, 1315.7), ("2,000 tiny", 2000, 0.128),
        ("one of 2^28", 1, 268.4),
    ],
)  # fmt: skip
def test_parameter_sets(name, tensors, millions):
    shapes = shapes_of(name)
    assert len(shapes) == tensors
    assert numel(shapes) / 1e6 == pytest.approx(millions, rel=0.003)


def test_every_parameter_set_has_shapes():
    assert [name for name in SETS if not shapes_of(name)] == []
    with pytest.raises(ValueError, match="no parameter set 'AlexNet': choose from ResNet-50"):
        shapes_of("AlexNet")


@pytest.mark.long
def test_shapes_equal_timms(timm):
    with torch.device("meta"):
        model = timm.create_model(NETWORKS["ViT-S/16"])
    assert shapes_of("ViT-S/16") == [tuple(p.shape) for p in model.parameters()]


@pytest.mark.long
def test_constants_are_set_before_kernels_are_imported():
    """As in a trial of the sweep: all values that depend on a constant follow."""
    code = (
        "import importlib; from bench.sweep import apply\n"
        "apply({'GPU': {'block': 2048, 'queue_passes': 2, 'window': 5}, 'THREADS': 256,\n"
        "    'PER_PROCESSOR': 3, 'LEAST_RESIDENT': {'queue': [8]}})\n"
        "step, tile, launch = (importlib.import_module('fused_lwlr.kernels.triton.' + name)\n"
        "    for name in ('step', 'tile', 'launch'))\n"
        "print(launch.GPU.block, step.WARPS, tile.TAIL.value, launch.GPU.queue_tile, launch.GPU.window,\n"
        "    step.PER_PROCESSOR, step.max_registers(step.least_resident('queue', 1)))\n"
        "try: apply({})\n"
        "except RuntimeError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == [
        "2048 8 512 4096 5 3 64",
        "constants must be set before the kernels are imported: use a new process",
    ], result.stderr


def test_the_sweep_tries_existing_constants():
    steps = {(c.rule, c.method) for c in contestants() if c.library == "ours"}
    for step, _, changes in sweep.candidates():
        rule, _, method = step.partition(" ")
        assert (rule, method or "statistics") in steps
        for name, value in changes.items():
            now = getattr(constants, name)
            if isinstance(now, constants.Sizes):
                assert value.keys() <= set(now._fields)
            else:
                assert value.keys() == now.keys() if isinstance(now, dict) else isinstance(now, int)
        # at least 16 bytes a thread in single precision, for every block size that is tried
        assert changes.get("GPU", {}).get("block", 1024) / changes.get("THREADS", 128) >= 4
    # and in half precision for the current constants
    assert constants.GPU.block / constants.THREADS >= 8
