"""Terminal output of a training: a progress bar with throughput and remaining time, and permanent lines."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from fused_lwlr.training.records import Interval, Record, Validation, told

NAMES = {"model": "test", "ema": "test of the average"}


class Output(Console):
    """Standard output, whose reader may end before the run does, such as `tee` at Ctrl-C: then it is silent."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


class Screen:
    """Prints for the first process, and nothing for the other processes."""

    def __init__(self, first: bool) -> None:
        self.console = Output(quiet=not first)
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
            results = told(record.loss, record.top1, record.top5)
            self.say(f"{NAMES[record.weights]} at step {record.step}, epoch {record.epoch:.4g}: {results}")

    def _interval(self, found: Interval) -> None:
        waited = found.loader_seconds / found.seconds if found.seconds > 0 else 0.0
        speed = f"{found.per_second:,.0f} {found.unit}/s, {waited:.0%} of the time waiting for data"
        if self._bar is not None:
            self._bar[0].update(self._bar[1], speed=speed)
        skipped = f"  {found.skipped} images skipped" if found.skipped else ""
        if found.steps_skipped:
            skipped += f"  {found.steps_skipped} steps skipped so far"
        self.say(
            f"step {found.step:6}  epoch {found.epoch:6.2f}  loss {found.loss:.4f}  lr {found.lr:.3g}  {speed}{skipped}"
        )
