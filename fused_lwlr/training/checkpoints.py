"""Checkpoints of a run: written whole or not at all, found again after any crash, loaded only where they fit."""

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fused_lwlr import files
from fused_lwlr.training import state_dicts as states
from fused_lwlr.training.collectives import from_first, gathered, process_group, shared
from fused_lwlr.training.config_diff import check_config, json_values

FORMAT = 2
CONTENTS = ("format", "step", "config", "models", "optimizer", "state", "own")
"""What a checkpoint has."""


@dataclass(frozen=True)
class Checkpoint:
    """What came out of a checkpoint besides weights and the state of the optimizer, which are where they belong.

    Attributes:
        step: optimizer steps taken when it was written.
        path: the file.
        config: the configuration that it was written with.
        state: as given to `save`; tensors are on the CPU.
        own: what each of the ranks gave to `save`, by rank: there may have been more or fewer than now.
    """

    step: int
    path: Path
    config: dict[str, Any]
    state: dict[str, Any]
    own: list[dict[str, Any]]


class Checkpoints:
    """The checkpoints in a folder: `step-<steps taken>.pt`, the latest few of them.

    After a kill or a loss of power at any moment every one of them is whole. Rank 0 writes and reads; under
    torch.distributed all ranks make the same calls, and a failure of rank 0 is an error on every one. What is written
    depends neither on the number of processes nor on how the model is sharded.

    Args:
        folder: made when the first one is written.
        minutes: between two checkpoints, for `due`; 0 for one at every step, infinite for none.
        keep: how many are kept; with 2 there is one to go back to if the disk damages the latest.
        notice: gets a line for the user, on rank 0; to standard error by default.

    Raises:
        ValueError: `minutes` is negative, or `keep` below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        minutes: float = 15.0,
        keep: int = 2,
        notice: Callable[[str], object] = lambda line: print(line, file=sys.stderr),
    ):
        if not minutes >= 0:
            raise ValueError(f"minutes={minutes}: it must be 0 or more minutes between two checkpoints")
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self.folder = Path(folder)
        self._seconds = 60 * minutes
        self._keep = keep
        self.notice = notice
        self._last = time.monotonic()

    def paths(self) -> list[Path]:
        """The checkpoints, the latest last, by their names alone."""
        found = [path for path in self.folder.glob("step-*.pt") if path.stem[5:].isdigit()]
        return sorted(found, key=_step)

    def latest_step(self) -> int:
        """The step of the latest checkpoint that this rank finds, by its name; -1 without one."""
        found = self.paths()
        return _step(found[-1]) if found else -1

    def due(self, now: float | None = None) -> bool:
        """Whether it is time for the next one, on this rank's clock (`time.monotonic()`): ask `StopFlag.agree`."""
        return self._seconds < math.inf and (time.monotonic() if now is None else now) - self._last >= self._seconds

    def save(
        self,
        step: int,
        *,
        models: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint, and remove those that are older than the ones to keep.

        Args:
            step: optimizer steps taken.
            models: by name, the first being that which the optimizer steps; plain, compiled, in
                `DistributedDataParallel` or under `fully_shard`. Buffers are those of rank 0.
            optimizer: steps parameters of the first model; ours, or another of torch.
            config: values of JSON, which `restore` compares.
            state: what else is the same on all ranks: dicts, lists, tuples, strings, numbers and tensors.
            own: the same of this rank alone, small.

        Returns:
            the file.

        Raises:
            OSError: it could not be written, on all ranks; those before are untouched.
            ValueError: `state` or `own` hold what could not be read back, or `config` what JSON does not have.
        """
        group = process_group()
        content = {
            "format": FORMAT,
            "step": step,
            "config": json_values(config),
            "models": {name: states.of_model(model) for name, model in models.items()},
            "optimizer": states.of_optimizer(next(iter(models.values())), optimizer),
            "state": dict(state or {}),
            "own": gathered(dict(own or {}), group),
        }
        path = self.folder / f"step-{step:09d}.pt"
        try:
            from_first(lambda: self._write(path, content), group)
        finally:
            # a failure takes time on every attempt
            self._last = time.monotonic()
        return path

    def restore(
        self,
        *,
        models: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any] | None = None,
        free: Collection[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> Checkpoint | None:
        """Load the latest checkpoint that is whole, if it fits; None where there is none.

        A damaged one is put aside, with a notice, where an older one is whole.

        Args:
            models: as given to `save`, sharded in the same way, in another, or not at all.
            optimizer: of the same kind, with the same parameters in the same groups.
            config: that of this run; None to take any.
            free: fields of it that may differ from that of the checkpoint, as in `config_diff.difference`.
            defaults: of fields that older checkpoints do not have, as in `config_diff.difference`.

        Raises:
            ValueError: there are only damaged ones, it was written with another configuration, or it is of another
                model or optimizer; on all ranks, and before anything is loaded.
            OSError: it cannot be read, on all ranks; nothing is renamed.
        """
        group = process_group()
        wanted = {name: states.shapes(model) for name, model in models.items()}
        content: dict[str, Any] = {}

        def read() -> str | None:
            found = self._latest()
            if found is None:
                return None
            path, whole = found
            if config is not None:
                check_config(whole["config"], config, free=free, defaults=defaults, where=path)
            states.check_models(whole["models"], wanted, where=path)
            states.check_optimizer(whole["optimizer"], next(iter(models.values())), optimizer, where=path)
            content.update(whole)
            return str(path)

        where = from_first(read, group)
        if where is None:
            return None
        tensors = {name: content.pop(name, {}) for name in ("models", "optimizer")}
        content = shared(content, group)
        # the optimizer first, whose loading may fail and then changes nothing
        try:
            states.load_optimizer(next(iter(models.values())), optimizer, tensors["optimizer"], group)
        except ValueError as error:
            raise ValueError(f"{where} does not fit the optimizer: {error}") from error
        for name, model in models.items():
            states.load_model(model, tensors["models"].get(name, {}), group)
        return Checkpoint(content["step"], Path(where), content["config"], content["state"], content["own"])

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        states.check_readable(content)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.replace(path, lambda file: torch.save(content, file))
        # torch.save tells of a full disk by a RuntimeError of its own, which follows from that of the system
        except (OSError, RuntimeError) as error:
            left = [other.name for other in self.paths()]
            reason = str(error.__context__ if isinstance(error.__context__, OSError) else error).splitlines()[0]
            raise OSError(
                f"the checkpoint {path} could not be written ({reason}): make room or choose another folder (--out); "
                + (f"{left[-1]} is whole, and the run can go on from it" if left else "there is none before it")
            ) from error
        older = [other for other in self.paths() if other.name < path.name]
        for other in [*older[: len(older) + 1 - self._keep], *self.folder.glob("step-*.partial")]:
            other.unlink(missing_ok=True)

    def _latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The latest that is whole, and what it holds."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.paths()):
            try:
                content = _read(path)
            except ValueError as error:
                damaged.append((path, str(error)))
                continue
            for bad, reason in damaged:
                # under its own name it would count as the latest once more
                os.replace(bad, bad.with_suffix(".damaged"))
                self.notice(f"{bad} is damaged ({reason}): renamed to *.damaged; going back to {path.name}")
            return path, content
        if damaged:
            told = ", ".join(f"{path.name} ({reason})" for path, reason in damaged)
            raise ValueError(
                f"{self.folder} has no checkpoint that is whole, but {told}: put a copy of one in its place, "
                "delete them to begin anew, or choose another folder (--out)"
            )
        return None


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
            f"{path} has format {content['format']}, of another version of fused_lwlr; this one reads {FORMAT}"
        )
    found: dict[str, Any] = content
    return found
