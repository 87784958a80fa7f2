"""The command line under torchrun on two machines, both of which are this one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_lwlr.runs import run as running
from fused_lwlr.training.recipe import Recipe

FIELDS = {
    "model": "vit", "lr": 0.01, "steps": 4, "batch_size": 48, "micro_batch": 12, "device": "cpu", "workers": 0,
    "rates": "single", "backend": "torch", "warmup_epochs": 0.0, "weight_decay": 1e-4,
}  # fmt: skip


@pytest.mark.long
def test_two_nodes_train_as_one_process(tmp_path, monkeypatch):
    """Each node has a folder of its own, as without a shared disk: the first one's gets the run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id run"
    command = [sys.executable, "-m", "torch.distributed.run", *launch.split(), "--local-addr", "127.0.0.1"]
    command += ["-m", "fused_lwlr", "train", *(f"--{name.replace('_', '-')}={value}" for name, value in FIELDS.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    nodes = []
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        with (tmp_path / node / "output").open("wb") as output:
            nodes.append(
                subprocess.Popen(command, cwd=tmp_path / node, env=environment, stdout=output, stderr=output)
            )  # fmt: skip
    try:
        codes = [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    said = [(tmp_path / node / "output").read_text() for node in ("a", "b")]
    assert codes == [0, 0], said
    [out] = tmp_path.glob("*/runs/train")
    [start] = json.loads((out / "run.json").read_text())
    assert (start["world_size"], start["devices"], start["end"]) == (2, ["cpu", "cpu"], "finished")
    assert sum("Everything is in runs/train" in text for text in said) == 1
    monkeypatch.setattr(running, "write_report", lambda folder: Path(folder) / "report.html")
    assert running.run(Recipe(**FIELDS, out=str(tmp_path / "alone"))) == 0
    ends = [torch.load(folder / "model.pt", weights_only=True) for folder in (out, tmp_path / "alone")]
    for name, weights in ends[0].items():
        torch.testing.assert_close(weights, ends[1][name], rtol=1e-3, atol=2e-5, msg=name)
