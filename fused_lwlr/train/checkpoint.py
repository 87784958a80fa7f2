"""A training in a folder: a checkpoint after every epoch, and how to go on from it.

Checkpoints are written in one piece or not at all, and read without running code from the file.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fused_lwlr import LayerRates, files
from fused_lwlr.train.loop import Config, Epoch, Training

CONTENTS = ("config", "history", "model", "optimizer", "scheduler", "rng", "cuda_rng")
"""What `Training.state_dict` has."""


def start(config: Config, out: Path, *, resume: bool = False, progress: bool = False) -> Training:
    """A new training whose files will be in the folder `out`, or with `resume` the one that is there.

    Raises:
        FileExistsError: there is one, and `resume` was not asked for.
        FileNotFoundError: there is none to resume.
    """
    saved, rates = out / "checkpoint.pt", out / "rates.json"
    if resume:
        state = load(saved)
        training = Training(config, rates=LayerRates.from_json(rates) if config.rates != "single" else None)
        training.load_state_dict(state)
        return training
    if saved.exists():
        raise FileExistsError(f"{out} holds a run already: resume it (--resume) or choose another folder (--out)")
    training = Training(config, progress=progress)
    out.mkdir(parents=True, exist_ok=True)
    if training.rates is not None:
        training.rates.to_json(rates)
    return training


def finish(training: Training, out: Path, on_epoch: Callable[[Epoch], None] = lambda epoch: None) -> None:
    """Train what is left of the epochs, with a checkpoint and the history in `out` after each."""
    while len(training.history) < training.config.epochs:
        epoch = training.run_epoch()
        save(out / "checkpoint.pt", training.state_dict())
        content = {"config": asdict(training.config), "history": [asdict(epoch) for epoch in training.history]}
        (out / "history.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        on_epoch(epoch)


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`: after a crash there is the old one or the new one, whole."""
    files.replace(path, lambda file: torch.save(state, file))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint into the memory of the CPU.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is no checkpoint.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint to resume from at {path}")
    try:
        state = files.read_tensors(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a checkpoint of fused-lwlr: {error}") from error
    missing = [name for name in CONTENTS if not isinstance(state, dict) or name not in state]
    if missing:
        raise ValueError(f"{path} is not a checkpoint of fused-lwlr: it has no {missing[0]!r}")
    found: dict[str, Any] = state
    return found
