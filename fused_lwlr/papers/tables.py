"""Tables of studies, as text and as Markdown."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from statistics import mean, stdev
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """Rows of text under a title, and notes below. The first `labels` columns name the row, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
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


Value = tuple[str, str] | Callable[[Any], str | Sequence[str]]
"""Cells of a row: a column of the results and the format of its mean, or a function of the results of the row."""
Values = Mapping[Any, Value]
"""Columns of cells by name; a tuple of names for columns whose cells come from one function."""


def summary(title: str, results: Any, by: Mapping[str, str], values: Values, notes: Sequence[str] = ()) -> Table:
    """A table with a row for each group of results, in their order.

    Args:
        by: columns that name a row -> columns of the results, by which these are grouped.
        values: the other columns.
    """
    rows = [
        [*map(label, key), *_flat(_found(of, value) for value in values.values())]
        for key, of in results.groupby(list(by.values()), sort=False)
    ]
    return Table(title, [*by, *_flat(values)], rows, notes, labels=len(by))


def _flat(cells: Iterable[str | Sequence[str]]) -> list[str]:
    return [text for each in cells for text in ([each] if isinstance(each, str) else each)]


def _found(results: Any, value: Value) -> str | Sequence[str]:
    return cell(results[value[0]], value[1]) if isinstance(value, tuple) else value(results)


def across(column: str, wanted: Iterable[Any], values: Mapping[str, Value]) -> dict[Any, Value]:
    """`values` for each value of a column of the results, in columns with this value in their name.

    A cell is empty where a row has no such results.
    """

    def found(results: Any, value: Value, of: Any) -> str | Sequence[str]:
        chosen = results[results[column] == of]
        return _found(chosen, value) if len(chosen) else ""

    return {name.format(of): partial(found, value=value, of=of) for name, value in values.items() for of in wanted}


def paper_figures(figures: Mapping[Any, Any], *columns: str) -> Value:
    """The figure of a paper for the values that a row has in some columns; an empty cell where it has none."""

    def found(results: Any) -> Any:
        values = tuple(results[list(columns)].iloc[0])
        return figures.get(values if len(values) > 1 else values[0], "")

    return found


def label(value: Any) -> str:
    """A value that names a row: text, or a number."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, Integral) else f"{value:g}"
