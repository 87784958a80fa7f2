"""The output of a study: tables, as text and as Markdown, and a picture."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; `notes` are sentences below it.

    The first `labels` columns name the row; the others are numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())
    labels: int = 1

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {list(row)} of {self.title!r} has {len(row)} cells for {len(self.columns)}")

    def rich(self) -> RichTable:
        """For a terminal."""
        caption = Text("\n".join(self.notes), justify="left") if self.notes else None
        table = RichTable(title=Text(self.title), caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, name in enumerate(self.columns):
            table.add_column(Text(name), justify="left" if i < self.labels else "right", overflow="fold")
        for row in self.rows:
            # lines may break between words, not between a number and its spread
            table.add_row(*(Text(text.replace(" ", "\N{NO-BREAK SPACE}")) for text in row))
        return table

    def markdown(self) -> str:
        """For a file."""
        rule = ["---" if i < self.labels else "---:" for i in range(len(self.columns))]
        lines = [f"| {' | '.join(row)} |" for row in (self.columns, rule, *self.rows)]
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"### {self.title}\n", *lines, *notes]) + "\n"


@dataclass(frozen=True)
class Report:
    """The whole output of a study; the picture is a figure of matplotlib."""

    tables: Sequence[Table]
    figure: "Figure"


def cell(values: Iterable[float | None], form: str = "{:.3f}") -> str:
    """Mean ± standard deviation of the finite values, and the number of others: None and NaN."""
    values = list(values)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    note = f"{len(values) - len(finite)} of {len(values)} diverged"
    if not finite:
        return note
    text = form.format(mean(finite))
    if len(finite) > 1:
        text += f" ± {form.replace('+', '').format(stdev(finite))}"
    return f"{text} ({note})" if len(finite) < len(values) else text
