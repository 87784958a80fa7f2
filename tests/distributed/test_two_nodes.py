"""The command line under torchrun on two nodes, simulated on one machine."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from torchrun import free_port, launched

from fused_lwlr.runs import run as running
from fused_lwlr.training.recipe import Recipe

FIELDS = {
    "model": "vit2x16", "lr": 0.01, "steps": 4, "batch_size": 48, "micro_batch": 12, "device": "cpu", "workers": 0,
    "rates": "single", "backend": "torch", "warmup_epochs": 0.0, "weight_decay": 1e-4,
}  # fmt: skip


def test_two_nodes_train_as_one_process(tmp_path, monkeypatch):
    """Each node has a separate folder, as without a shared disk: the first node's folder gets the run."""
    launch = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id run"
    nodes = [launched(tmp_path / node, launch, FIELDS) for node in ("a", "b")]
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
    assert (start["config"]["world_size"], start["devices"], start["end"]) == (2, ["cpu", "cpu"], "finished")
    assert sum("Everything is in runs/train" in text for text in said) == 1
    monkeypatch.setattr(running, "write_report", lambda folder: Path(folder) / "report.html")
    assert running.run(Recipe(**FIELDS, out=str(tmp_path / "alone"))) == 0
    ends = [torch.load(folder / "model.pt", weights_only=True) for folder in (out, tmp_path / "alone")]
    for name, weights in ends[0].items():
        torch.testing.assert_close(weights, ends[1][name], rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("handled", "ends"), [("SIGTERM,SIGUSR1", "torchrun signals them"), ("SIGTERM", "torchrun leaves them")]
)
def test_no_process_is_left_after_sigusr1_to_torchrun(handled, ends, tmp_path):
    """torchrun passes on the signals that it was configured for; other signals end only torchrun."""
    launch = f"--nnodes 1 --nproc-per-node 2 --master-port {free_port()} --signals-to-handle {handled}"
    node = launched(tmp_path / "a", launch, {**FIELDS, "steps": 10**6, "log_every": 1})
    out = tmp_path / "a/runs/train"
    try:
        wait(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0)
        first = int((out / "lock").read_text())
        node.send_signal(signal.SIGUSR1)
        assert node.wait(60) != 0, ends
        wait(lambda: not alive(first))
    finally:
        node.kill()
        node.wait()
    [start] = json.loads((out / "run.json").read_text())
    assert start["end"] == "stopped by a signal"
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{start['end_step']:09d}.pt"]


def wait(until):
    limit = time.monotonic() + 120
    while not until():
        assert time.monotonic() < limit
        time.sleep(0.2)


def alive(process):
    """Whether a process runs; one that ended waits for its parent, which may be none here."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
