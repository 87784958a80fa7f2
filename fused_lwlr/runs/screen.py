"""Terminal output of a training: a progress bar with throughput and remaining time, and permanent lines."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from fused_lwlr.training.records import Interval, Record, Validation, results_text

NAMES = {"model": "test", "ema": "test of the average"}


class Output(Console):
    """Standard output that ignores a broken pipe: Ctrl-C may end its reader, such as `tee`, first."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


class Screen:
    """Prints for rank 0, and nothing for the other ranks."""

    def __init__(self, is_rank0: bool) -> None:
        self.console = Output(quiet=not is_rank0)
        self._bar: tuple[Progress, TaskID] | None = None

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self.console.print(Text(line), soft_wrap=True)

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[None]:
        """A progress bar within the context."""
        speed = TextColumn("{task.fields[speed]}")
        columns = (BarColumn(), MofNCompleteColumn(), "steps", speed, TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            self._bar = bar, bar.add_task("", total=total, completed=done, speed="")
            try:
                yield
            finally:
                self._bar = None

    def advance(self, step: int) -> None:
        """Set the number of completed steps."""
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=step)

    def add(self, record: Record) -> None:
        """Show a record of steps or of a validation."""
        if isinstance(record, Interval):
            self._interval(record)
        elif isinstance(record, Validation):
            at = f"at step {record.step}, epoch {record.epoch:.4g}"
            self.say(f"{NAMES[record.weights]} {at}: {results_text(record)}")

    def _interval(self, interval: Interval) -> None:
        waited = interval.loader_seconds / interval.seconds if interval.seconds > 0 else 0.0
        speed = f"{interval.per_second:,.0f} {interval.unit}/s, {waited:.0%} of the time waiting for data"
        if self._bar is not None:
            self._bar[0].update(self._bar[1], speed=speed)
        skipped = f"  {interval.skipped} images skipped" if interval.skipped else ""
        if interval.steps_skipped:
            skipped += f"  {interval.steps_skipped} steps skipped so far"
        at = f"step {interval.step:6}  epoch {interval.epoch:6.2f}"
        self.say(f"{at}  loss {interval.loss:.4f}  lr {interval.lr:.3g}  {speed}{skipped}")
