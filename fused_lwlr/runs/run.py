"""A training from the first step to the report, in a folder from which it can be resumed."""

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fused_lwlr import LayerRates
from fused_lwlr.data import Stream, files
from fused_lwlr.integrations.extras import import_extra
from fused_lwlr.runs.boards import TensorBoardSink, WandbSink
from fused_lwlr.runs.html_report import PeriodicReport, write_report
from fused_lwlr.runs.metrics import Metrics
from fused_lwlr.runs.provenance import code_changes, read_starts, record_facts, record_start
from fused_lwlr.runs.screen import Screen
from fused_lwlr.training.checkpoints import Checkpoints
from fused_lwlr.training.collectives import gather_to_rank0, on_rank0
from fused_lwlr.training.divergence import DivergedError
from fused_lwlr.training.loop import Loop, Sink
from fused_lwlr.training.processes import world_of
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.setup import load_data
from fused_lwlr.training.signals import IN_PREPARATION, NOTICE, StopFlag, StoppedError
from fused_lwlr.training.trainer import Trainer
from fused_lwlr.training.weights import save_weights

MISSED = 3
"""The exit code of a training that does not reach `target_top1`."""


def run(recipe: Recipe) -> int:
    """Train by a recipe, or resume the training if its folder has a checkpoint.

    The folder gets `recipe.toml`, `run.json` (what ran), `rates.json`, `metrics.jsonl`, `layers.jsonl`, checkpoints,
    with `keep_best` the best weights as `model_best.pt`, and at the end `model.pt`, with `ema` also `model_ema.pt`, and
    `report.html`.

    Returns:
        0, or `MISSED` if no validation reaches `target_top1`. After a signal, the exit code of the signal; a checkpoint
            exists then, unless the signal came during calibration or GradInit.

    Raises:
        DivergedError: the loss is not finite. The last checkpoint is from before that.
    """
    for board, wanted in (("tensorboard", recipe.tensorboard), ("wandb", recipe.wandb)):
        if wanted:
            # a missing package should be reported before rates are measured
            import_extra(board)
    with world_of(recipe.device) as world, ExitStack() as held:
        held.enter_context(reproducible(recipe.deterministic, world.device))
        trainer = Trainer(recipe, world, load_data(recipe))
        screen = Screen(world.is_rank0)
        on_rank0(lambda: _lock(Path(recipe.out), held))
        # not earlier: a signal ends a process that still opens its data at once
        flag = held.enter_context(StopFlag())
        if isinstance(trainer.data.train, Stream):
            screen.say(
                f"--loader {recipe.loader} decides order and augmentation: a killed run resumes "
                "from its last checkpoint, but not bit-identically."
            )
        if val_source := getattr(trainer.data, "val_source", ""):
            screen.say(f"{len(trainer.data.val):,} images for validation are from {val_source}.")
        checkpoints = Checkpoints(Path(recipe.out) / "checkpoints", minutes=recipe.checkpoint_minutes)

        def sinks(after: int | None) -> list[Sink]:
            chosen: list[Sink] = [Metrics(recipe.out, after=after)]
            if not world.is_rank0:
                return chosen
            if recipe.tensorboard:
                chosen.append(held.enter_context(closing(TensorBoardSink(recipe.out, after=after))))
            if recipe.wandb:
                chosen.append(held.enter_context(closing(WandbSink(recipe.out, loop.config))))
            # after the metrics, which it reads
            chosen.append(PeriodicReport(lambda: write_report(recipe.out), recipe.checkpoint_minutes))
            return [*chosen, screen]

        loop = Loop(trainer, sinks, checkpoints=checkpoints, agree=flag.agree, advance=screen.advance)
        begun = _begun(checkpoints)
        if begun:
            on_rank0(lambda: _check_rates(recipe))
        restored = loop.restore() if begun else None
        if restored is not None and loop.done:
            screen.say(f"The training in {recipe.out} is done: choose another folder (--out) for a new one.")
            if on_rank0(lambda: not read_starts(recipe.out)):
                _record(loop)  # run.json was deleted, since it was damaged
            finish(trainer, screen, "finished")
            return _judged(loop, screen)
        if restored is None:
            flag.notice = IN_PREPARATION
            try:
                trainer.prepare(progress=True, agree=flag.agree)
            except StoppedError:
                screen.say("Stopped before the first step, without a checkpoint: the same command begins again.")
                return flag.exit_code
        flag.notice = NOTICE
        _record(loop)
        # with it, --config trains the same again
        on_rank0(lambda: files.replace_text(Path(recipe.out) / "recipe.toml", recipe.to_toml()))
        if restored is None:
            loop.begin()
        else:
            screen.say(f"Going on after step {restored} of {trainer.total}.")
            if world.is_rank0 and (changed := code_changes(recipe.out)):
                screen.say(f"The code has changed since the last start ({'; '.join(changed)}): bits may differ.")
        with screen.progress(trainer.total, trainer.step):
            try:
                loop.train()
            except DivergedError as error:
                finish(trainer, screen, str(error))
                raise
        if not loop.done:
            screen.say(f"Stopped after step {trainer.step} of {trainer.total}: the same command goes on from there.")
        finish(trainer, screen, "finished" if loop.done else "stopped by a signal")
        return _judged(loop, screen) if loop.done else flag.exit_code


def _record(loop: Loop) -> None:
    """Record a start in `run.json`."""
    recipe, trainer = loop.recipe, loop.trainer
    record_start(
        recipe.out, loop.config, device=trainer.world.device, steps=trainer.total, classes=len(trainer.data.classes)
    )


def _judged(loop: Loop, screen: Screen) -> int:
    """The exit code of a training that is done; tells whether it has `target_top1`."""
    target, trainer, reached = loop.recipe.target_top1, loop.trainer, loop.best.reached
    if target is None:
        return 0
    when = f"at step {trainer.step} of {trainer.total}" if reached else f"in {trainer.total} steps"
    line = f"--target-top1 {target:g}: the best top-1 accuracy is {loop.best.score:.2%}, {when}."
    screen.say(f"{'Reached' if reached else 'Missed'} {line}")
    return 0 if reached else MISSED


def _lock(folder: Path, held: ExitStack) -> None:
    """Prevent other runs from writing to the folder, since processes of torchrun can outlive it unnoticed."""
    path, new = folder / "lock", not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(FileLock(path, timeout=0))
        held.callback(_remove_unused, folder, new)
        path.write_text(str(os.getpid()), encoding="utf-8")
    except Timeout as error:
        raise ValueError(
            f"process {path.read_text(encoding='utf-8')} is training in {folder}: wait for it, end it, or choose "
            "another folder (--out)"
        ) from error
    except OSError as error:
        raise OSError(f"no run can be written to {folder} ({error.strerror}): choose another folder (--out)") from error


def _begun(checkpoints: Checkpoints) -> bool:
    """Whether rank 0 finds a checkpoint to continue from.

    Raises ValueError if another rank finds a later one, for example if machines do not share the folder, or if there
    is no checkpoint, but a model that would be lost.
    """
    folder = checkpoints.folder.parent
    latest_steps = gather_to_rank0((platform.node(), checkpoints.latest_step()))

    def decide() -> bool:
        (here, mine), (there, latest) = latest_steps[0], max(latest_steps, key=lambda each: each[1])
        if latest > mine:
            at_first = f"is at step {mine}" if mine >= 0 else "has no checkpoint"
            raise ValueError(
                f"{checkpoints.folder} {at_first} on {here}, the machine of process 0, but is at step {latest} on "
                f"{there}: copy it to {here}, or start with --node-rank 0 on {there}"
            )
        if mine < 0 and (folder / "model.pt").exists():
            raise ValueError(
                f"{folder} has model.pt, but no checkpoint of its training: choose another folder (--out), or delete "
                "model.pt to train again"
            )
        return bool(mine >= 0)

    return on_rank0(decide)


def _check_rates(recipe: Recipe) -> None:
    """Refuse to continue with a file of rates that has changed. If it is gone, the checkpoint has the rates."""
    own = Path(recipe.out) / "rates.json"
    if recipe.rates in ("single", "layerwise") or not Path(recipe.rates).is_file() or not own.is_file():
        return
    if dict(LayerRates.from_json(recipe.rates)) != dict(LayerRates.from_json(own)):
        raise ValueError(
            f"--rates {recipe.rates} has other rates than the run in {recipe.out} began with: replace it by {own}, or "
            "choose another folder (--out)"
        )


def _remove_unused(folder: Path, new: bool) -> None:
    """Remove the lock of a run that was refused before it wrote anything, and its folder if that is new."""
    if [path.name for path in folder.iterdir()] == ["lock"]:
        (folder / "lock").unlink()
        if new:
            folder.rmdir()


def finish(trainer: Trainer, screen: Screen, end: str) -> None:
    """Write the end of a run: the facts, its weights if it is "finished", and the report."""
    recipe, device = trainer.recipe, trainer.world.device
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    record_facts(recipe.out, end=end, end_step=trainer.step, peak_memory_bytes=memory)
    if end == "finished":
        folder = Path(recipe.out)
        save_weights(trainer.model, folder / "model.pt")
        if trainer.averages is not None:
            with trainer.averaged():
                save_weights(trainer.model, folder / "model_ema.pt")
    report = on_rank0(lambda: str(write_report(recipe.out)))
    screen.say(f"Everything is in {recipe.out}; {report} shows it.")


@contextmanager
def reproducible(wanted: bool | None, device: torch.device) -> Iterator[None]:
    """Within the context, only use algorithms that give the same bits each time; warn about other algorithms.

    Otherwise, convolutions on a GPU use the fastest algorithm, found by trials, and sums of atomic additions have a
    random order. None restricts algorithms on a CPU, where this costs no time, and not on a GPU.
    """
    if wanted is None:
        wanted = device.type == "cpu"
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill, modes = memory.fill_uninitialized_memory, (cudnn.deterministic, cudnn.benchmark)
    if wanted:
        # read when the first matrix product runs
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    memory.fill_uninitialized_memory = False
    cudnn.deterministic, cudnn.benchmark = wanted, not wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill
        cudnn.deterministic, cudnn.benchmark = modes
