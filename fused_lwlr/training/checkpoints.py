"""Checkpoints of a run: written atomically, found again after any crash, and loaded only into a matching run."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fused_lwlr.data import files
from fused_lwlr.training import state_dicts as states
from fused_lwlr.training.collectives import broadcast_from_rank0, gather_to_rank0, on_rank0
from fused_lwlr.training.config_diff import check_config

FORMAT = 2
KEPT = 2
"""Checkpoints that stay in the folder: one remains if the disk damages the latest."""
CONTENTS = ("format", "step", "config", "models", "optimizer", "state", "own")
"""Keys of a checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a loaded checkpoint, except weights and optimizer state, which are loaded in place.

    Attributes:
        step, config, state: as given to `save`; tensors are on the CPU.
        own: the values that each rank gave to `save`, by rank; the number of ranks may differ from the present one.
    """

    step: int
    config: dict[str, Any]
    state: dict[str, Any]
    own: list[dict[str, Any]]


class Checkpoints:
    """The checkpoints in a folder: `step-<steps taken>.pt`, the latest `KEPT` of them.

    Every file is complete even after a kill or a power loss. Rank 0 writes and reads; under torch.distributed all ranks
    make the same calls, and a failure of rank 0 is an error on every rank. The contents depend neither on the number of
    ranks nor on how the model is sharded.

    Args:
        folder: made when the first one is written.
        minutes: between two checkpoints, for `due`.
    """

    def __init__(self, folder: str | Path, *, minutes: float = 15.0):
        self.folder = Path(folder)
        self._seconds = 60 * minutes
        self._last = time.monotonic()

    def paths(self) -> list[Path]:
        """The checkpoints, the latest last, by their names alone."""
        found = [path for path in self.folder.glob("step-*.pt") if path.stem[5:].isdecimal()]
        return sorted(found, key=_step)

    def latest_step(self) -> int:
        """The step of the latest checkpoint that this rank finds, by its name; -1 without one."""
        found = self.paths()
        return _step(found[-1]) if found else -1

    def due(self) -> bool:
        """Whether this rank's clock says that the next checkpoint is due; ask `StopFlag.agree`."""
        return time.monotonic() - self._last >= self._seconds

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        averages: nn.Module | None = None,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint, and remove all but the latest `KEPT` ones; returns the file.

        Args:
            model: it may be under `fully_shard`, but not compiled or in `DistributedDataParallel`. Rank 0 saves its
                buffers.
            averages: the `BufferAverages` of the model, if there are any.
            optimizer: steps parameters of the model; ours, or another of torch.
            config: JSON values, which `restore` compares.
            state: other values that are equal on all ranks: dicts, lists, tuples, strings, numbers and tensors.
            own: small values of this rank only, of the same types.

        Raises:
            OSError: it could not be written, on all ranks; earlier checkpoints are untouched.
            ValueError: `state` or `own` hold values that could not be read back, or `config` values that JSON lacks.
        """
        content = {
            "format": FORMAT,
            "step": step,
            "config": files.json_values(config),
            "models": {name: states.of_model(module) for name, module in _modules(model, averages).items()},
            "optimizer": states.of_optimizer(model, optimizer),
            "state": dict(state or {}),
            "own": gather_to_rank0(dict(own or {})),
        }
        path = self.folder / f"step-{step:09d}.pt"
        try:
            on_rank0(lambda: self._write(path, content))
        finally:
            # a failure takes time on every attempt
            self._last = time.monotonic()
        return path

    def restore(
        self,
        *,
        model: nn.Module,
        averages: nn.Module | None = None,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any] | None = None,
    ) -> Checkpoint | None:
        """Load the latest complete checkpoint if it matches the run; returns None without a checkpoint.

        A damaged checkpoint is renamed with a notice if an older complete one exists.

        Args:
            model, averages: as given to `save`; the model may be sharded in another way, or not at all.
            optimizer: of the same kind, with the same parameters in the same groups.
            config: the configuration of this run, for `check_config`; None to accept any.

        Raises:
            ValueError: all checkpoints are damaged, or the latest has another configuration, model or
                optimizer; on all ranks, and before anything is loaded.
            OSError: it cannot be read, on all ranks; nothing is renamed.
        """
        modules = _modules(model, averages)
        wanted = {name: states.shapes(module) for name, module in modules.items()}
        content: dict[str, Any] = {}

        def read() -> str | None:
            # only a training changes files
            latest = self._latest(rename=config is not None)
            if latest is None:
                return None
            path, whole = latest
            if config is not None:
                check_config(whole["config"], config, where=path)
            states.check_models(whole["models"], wanted, where=path)
            states.check_optimizer(whole["optimizer"], model, optimizer, where=path)
            content.update(whole)
            return str(path)

        where = on_rank0(read)
        if where is None:
            return None
        tensors = {name: content.pop(name, {}) for name in ("models", "optimizer")}
        content = broadcast_from_rank0(content)
        # the optimizer first: if its loading fails, nothing has changed
        try:
            states.load_optimizer(model, optimizer, tensors["optimizer"])
        except ValueError as error:
            raise ValueError(f"{where} does not fit the optimizer: {error}") from error
        for name, module in modules.items():
            states.load_model(module, tensors["models"].get(name, {}))
        return Checkpoint(content["step"], content["config"], content["state"], content["own"])

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.save_tensors(path, content)
        except OSError as error:
            left, reason = [other.name for other in self.paths()], str(error).splitlines()[0]
            raise OSError(
                f"the checkpoint {path} could not be written ({reason}): make room or choose another folder (--out); "
                + (f"the run can resume from {left[-1]}" if left else "there is no earlier checkpoint")
            ) from error
        older = [other for other in self.paths() if other.name < path.name]
        for other in [*older[: len(older) + 1 - KEPT], *self.folder.glob("step-*.partial")]:
            other.unlink(missing_ok=True)

    def _latest(self, *, rename: bool) -> tuple[Path, dict[str, Any]] | None:
        """Returns the latest complete checkpoint and its contents; damaged ones after it may be renamed."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.paths()):
            try:
                content = _read(path)
            except ValueError as error:
                damaged.append((path, str(error)))
                continue
            for bad, reason in damaged:
                if rename:
                    # with its old name it would again count as the latest
                    os.replace(bad, bad.with_suffix(".damaged"))
                done = "renamed to *.damaged; " if rename else ""
                notice(f"{bad} is damaged ({reason}): {done}going back to {path.name}")
            return path, content
        if damaged:
            listed = ", ".join(f"{path.name} ({reason})" for path, reason in damaged)
            raise ValueError(
                f"{self.folder} has no complete checkpoint, only {listed}: replace one by a copy, "
                "delete them to start from the beginning, or choose another folder (--out)"
            )
        return None


def notice(line: str) -> None:
    """Tell the user a line, on standard error of rank 0."""
    print(line, file=sys.stderr)


def _modules(model: nn.Module, averages: nn.Module | None) -> dict[str, nn.Module]:
    """The modules of a checkpoint by name; averages of a model without running statistics have nothing to save."""
    if averages is None or not any(True for _ in averages.buffers()):
        return {"model": model}
    return {"model": model, "averages": averages}


def _step(path: Path) -> int:
    return int(path.stem[5:])


def _read(path: Path) -> dict[str, Any]:
    content = files.read_tensors(path)
    missing = [name for name in CONTENTS if not isinstance(content, dict) or name not in content]
    if missing:
        raise ValueError(f"it has no {missing[0]!r}")
    if content["format"] != FORMAT:
        # not damaged: no reason to go back to an older one
        raise OSError(
            f"{path} was written by another version of fused_lwlr (format {content['format']}); "
            f"this version reads format {FORMAT}"
        )
    found: dict[str, Any] = content
    return found
