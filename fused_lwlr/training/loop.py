"""The loop over steps: measurements and checkpoints between steps, and records for sinks."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from fused_lwlr.data import Batch, files
from fused_lwlr.training.best import Best
from fused_lwlr.training.checkpoints import Checkpoints, notice
from fused_lwlr.training.collectives import on_rank0
from fused_lwlr.training.config_diff import DISTRIBUTION, FINGERPRINT, difference, resumed_differently
from fused_lwlr.training.divergence import check_weights, diverged
from fused_lwlr.training.layer_values import LayerProbe
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.records import Interval, Record, Validation
from fused_lwlr.training.running_loss import RunningLoss
from fused_lwlr.training.signals import Agree, StoppedError, no_signals
from fused_lwlr.training.skipped import SkippedList
from fused_lwlr.training.trainer import Trainer

CHECKS = 25
"""Steps between two counts of the skipped ones, for which the host waits for the device."""
MAX_SKIPS = 100
"""Steps in a row that may be skipped. More mean that the weights give no finite gradients any more."""


class Sink(Protocol):
    """Receives the records of a training."""

    def add(self, record: Record) -> None:
        """Receives a record."""


class Loop:
    """Runs the steps of a training, and passes measurements to sinks.

    With checkpoints it belongs to a run in a folder: it saves itself there, records layers, and stops at a signal.
    Without checkpoints, `trainer` is prepared, and no file is written.

    Args:
        trainer: constructed; not yet prepared for a run in a folder.
        open_sinks: makes the sinks, from the step after which the run resumes, or None.
        every: steps between two records of training; by default from the recipe.
        agree: called between steps, as `StopFlag.agree`.
        advance: called with the number of each completed step.

    Attributes:
        best: the best validation so far.
    """

    probe: LayerProbe | None = None

    def __init__(
        self,
        trainer: Trainer,
        open_sinks: Callable[[int | None], Sequence[Sink]],
        *,
        every: int | None = None,
        checkpoints: Checkpoints | None = None,
        agree: Agree = no_signals,
        advance: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.trainer, self.checkpoints = trainer, checkpoints
        self.agree, self.open_sinks, self.advance = agree, open_sinks, advance
        self.sinks: Sequence[Sink] = [] if checkpoints is not None else open_sinks(None)
        self.recipe: Recipe = trainer.recipe
        self.folder = Path(self.recipe.out)
        self.config = {
            **self.recipe.to_dict(),
            "world_size": trainer.world.size,
            # their order follows from their number
            trainer.data.example: [len(trainer.data.train), len(trainer.data.val)],
            FINGERPRINT: trainer.data.fingerprint,
        }
        self.every = every or self.recipe.log_every or min(50, trainer.steps_per_epoch)
        self.every_evaluation = self.recipe.eval_every or (self.recipe.eval_epochs or 1) * trainer.steps_per_epoch
        self.every_layer = self.recipe.stats_every or trainer.steps_per_epoch
        self.loss = RunningLoss(trainer.world, skips=self.recipe.nonfinite == "skip")
        # files since the last record
        self.skipped: list[str] = []
        # the number of steps that were not skipped, and the step of its last change
        self.taken, self.grew_at = 0, 0
        self.best = Best(self.folder / "model_best.pt" if self.recipe.keep_best and checkpoints is not None else None)
        self.unreadable = SkippedList(self.folder, self._tell)
        # whether the weights still need a validation, after steps or a checkpoint between steps and validation
        self.validation_due = False
        # the time of the last record, the time of waiting since then, and the rate of the last step
        self.began, self.waited, self.lr = 0.0, 0.0, 0.0

    def restore(self) -> int | None:
        """Load the latest checkpoint as `Checkpoints.restore`; returns its step, or None without a checkpoint."""
        trainer = self.trainer
        assert self.checkpoints is not None, "a run in a folder has checkpoints"
        trainer.prepare_to_resume()
        checkpoint = self.checkpoints.restore(
            model=trainer.model, averages=trainer.averages, optimizer=trainer.optimizer, config=self.config
        )
        if checkpoint is None:
            return None
        trainer.step = checkpoint.step
        trainer.scaler.load_state_dict(checkpoint.state["scaler"])
        self.validation_due = checkpoint.state["untested"]
        self.taken, self.grew_at = checkpoint.state["taken"]
        self.best.restore(checkpoint.state["best"])
        others = [name for name in self.config if name not in DISTRIBUTION]
        changed = difference(checkpoint.config, self.config, free=others)
        if changed and trainer.world.is_rank0:
            notice(resumed_differently(changed, checkpoint.state["pass_images"], trainer.micro_batch))
        # with the same number of ranks each restores its own values; otherwise all take the mean, and rank 0 the names
        same = len(checkpoint.own) == trainer.world.size
        mine = [checkpoint.own[trainer.world.rank]] if same else checkpoint.own
        self.loss.restore(mine)
        seconds, self.waited = max(each["spent"] for each in mine)
        self.began = -seconds
        self.skipped = [n for each in mine for n in each["skipped"]] if same or trainer.world.is_rank0 else []
        self._open(checkpoint.step)
        return checkpoint.step

    def begin(self) -> None:
        """Record the rates of a new training, and store its measurements in a first checkpoint."""
        rates = self.trainer.rates
        if rates is not None:
            path = self.folder / "rates.json"
            on_rank0(lambda: files.replace(path, lambda file: rates.to_json(file.name)))
        self._open(None)
        if self.recipe.rates == "layerwise" or self.recipe.init == "gradinit":
            self._save(0.0)

    def _open(self, after: int | None) -> None:
        self.sinks = self.open_sinks(after)
        self.probe = LayerProbe(self.trainer.model, self.trainer.optimizer, backend=self.recipe.backend)

    @property
    def done(self) -> bool:
        """Whether no step and no validation is left."""
        return not self.validation_due and (self.best.reached or self.trainer.step == self.trainer.total)

    def train(self) -> None:
        """Run the remaining steps, or fewer if a signal comes or a validation has the accuracy to end at.

        Raises:
            DivergedError: the loss or a weight is not finite, or with `nonfinite="raise"` a gradient.
            OSError: the last checkpoint cannot be written.
        """
        try:
            self._train()
        except FloatingPointError as error:
            raise diverged(str(error).partition(":")[0], self.recipe, self.trainer.step + 1) from error

    def _train(self) -> None:
        trainer = self.trainer
        if self.agree(False)[0]:
            return  # the signal came before the first step
        batches = self._timed(trainer.batches())
        self.began += time.perf_counter()
        while not self.done:
            if not self.validation_due:
                self._step(batches)
                self.advance(trainer.step)
            stop, save = self.agree(self.checkpoints is not None and self.checkpoints.due())
            paused = time.perf_counter()
            if self.validation_due and not stop:
                stop = self._validate()
                if self.best.reached and self.loss.count:
                    self._interval(paused)
            ends = stop or self.best.reached or trainer.step == trainer.total
            if self.checkpoints is not None and (save or ends):
                self._save(paused - self.began, needed=ends)
            self.began += time.perf_counter() - paused
            if stop:
                break

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields batches, and adds up the time that training waits for them."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def _step(self, batches: Iterator[Batch]) -> None:
        trainer = self.trainer
        probe = self.probe if (trainer.step + 1) % self.every_layer == 0 else None
        step = trainer.gradients(batches)
        if probe is not None:
            probe.before(trainer.scaler.get_scale())
        trainer.update()
        self.lr = trainer.optimizer.param_groups[0]["lr"]
        self.loss.add(step.loss, step.counted)
        self.skipped += step.skipped
        last = trainer.step == trainer.total
        if probe is not None:
            self._add(probe.after(trainer.step))
        if trainer.step % self.every == 0 or last:
            self._interval(time.perf_counter())
        if self.loss.skips and trainer.step % CHECKS == 0:
            self._check_skips()
        self.validation_due = trainer.step % self.every_evaluation == 0 or last

    def _add(self, record: Record) -> None:
        for sink in self.sinks:
            try:
                sink.add(record)
            except Exception as error:
                if self.checkpoints is None:
                    raise
                self._tell(
                    f"A record of step {record.step} could not be written ({error}). Training continues, and tries "
                    "again with the next record."
                )

    def _tell(self, line: str) -> None:
        if self.trainer.world.is_rank0 and self.checkpoints is not None:
            with suppress(OSError):  # standard error may be a file on the same full disk
                notice(line)

    def _interval(self, now: float) -> None:
        """Record the steps since the last record, over all ranks."""
        trainer, seconds = self.trainer, now - self.began
        mean, skipped = self._mean_loss(), self._note(self.skipped)
        steps_skipped = trainer.steps_skipped if self.loss.skips else 0
        interval = Interval(
            trainer.step, trainer.step / trainer.steps_per_epoch, lr=self.lr, loss=mean, count=int(self.loss.count),
            seconds=seconds, loader_seconds=self.waited, step_seconds=seconds - self.waited,
            grad_norm=self._grad_norm(), skipped=skipped, unit=trainer.data.unit,
            steps_skipped=steps_skipped,
        )  # fmt: skip
        self._add(interval)
        self.loss.clear()
        self.skipped = []
        self.began, self.waited = now, 0.0

    def _check_skips(self) -> None:
        taken, step = self.trainer.step - self.trainer.steps_skipped, self.trainer.step
        if taken != self.taken:
            self.taken, self.grew_at = taken, step
        elif step - self.grew_at > MAX_SKIPS:
            raise diverged(f"every step after step {self.grew_at} was skipped", self.recipe, step)

    def _mean_loss(self) -> float:
        mean = self.loss.mean()
        # a mean over skipped steps alone is NaN, and the weights are as before
        if not math.isfinite(mean) and not self.loss.skips:
            raise diverged(f"the training loss became {mean}", self.recipe, self.trainer.step)
        return mean

    def _grad_norm(self) -> float | None:
        """‖g‖ of the last step over all layers; None if the step needed no norms."""
        if self.trainer.optimizer.options.factor_formula is None:
            return None
        norm: torch.Tensor = self.trainer.optimizer.layer_stats().grad_norm
        return norm.square().sum().sqrt().item()

    def _note(self, skipped: Sequence[str]) -> int:
        """Add unreadable images to skipped.txt, each once; returns their number on all ranks."""
        return self.unreadable.add(skipped) if self.recipe.corrupt == "skip" else 0

    def _validate(self) -> bool:
        """Record a validation; returns True if a signal came before its end, and nothing was recorded."""
        start = time.perf_counter()
        try:
            results = self.trainer.evaluate(self.agree)
        except StoppedError:
            return True
        self.validation_due = False
        seconds = time.perf_counter() - start
        trainer = self.trainer
        for weights, result in results.items():
            self._note(result.skipped)
            record = Validation(
                trainer.step, trainer.step / trainer.steps_per_epoch, weights, top1=result.top1, top5=result.top5,
                loss=result.loss, count=result.count, seconds=seconds, unit=trainer.data.unit,
            )  # fmt: skip
            self._add(record)
        self.best.compare(trainer, results, self._tell)
        return False

    def _save(self, seconds: float, needed: bool = True) -> None:
        """Write a checkpoint `seconds` after the last record, unless the training has diverged.

        One that is not `needed` may fail with a notice.
        """
        self._mean_loss()
        trainer = self.trainer
        check_weights(trainer)
        assert self.checkpoints is not None, "a run in a folder has checkpoints"
        state = {
            "scaler": trainer.scaler.state_dict(), "pass_images": trainer.micro_batch, "untested": self.validation_due,
            "best": self.best.state(), "taken": (self.taken, self.grew_at),
        }  # fmt: skip
        try:
            self.checkpoints.save(
                trainer.step, model=trainer.model, averages=trainer.averages, optimizer=trainer.optimizer,
                config=self.config, state=state,
                own={**self.loss.state(), "skipped": self.skipped, "spent": (seconds, self.waited)},
            )  # fmt: skip
        except OSError as error:
            if needed:
                raise
            self._tell(f"{error}. Training continues, and tries again after --checkpoint-minutes.")
