"""Curves of studies: the mean over seeds, with a band from the lowest to the highest."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from math import ceil, inf
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

matplotlib.use("agg")  # figures are written to files, also on a machine with a screen

import seaborn

WIDTH = 7.2
"""Inches; about as wide as the text of a page, so that text of 10 points is as large as the text around it."""
ACCURACY = "test accuracy in %,\nmean and range of seeds"


def panels(count: int, *, height: float = 2.8) -> tuple[Figure, list[Any]]:
    """A figure with axes in two columns."""
    figure = Figure(figsize=(WIDTH if count > 1 else 0.6 * WIDTH, height * ceil(count / 2)), layout="constrained")
    axes = figure.subplots(ceil(count / 2), min(count, 2), squeeze=False).ravel()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, list(axes[:count])


def bands(
    results: Any, *, x: str, y: str, labels: tuple[str, str], log: str = "x", columns: int = 2,
    panel: Sequence[str] = (), free: str = "", **options: Any,
) -> Figure:  # fmt: skip
    """Panels of lines (`seaborn.relplot`), with the legend below.

    Args:
        labels: names of the axes.
        log, free: the axes that are logarithmic, and that differ between panels: "x", "y", "xy" or none.
        panel: columns, whose values tell panels apart.
    """
    titles = results[list(panel)].agg(lambda names: ", ".join(filter(None, names)), axis=1) if panel else ""
    results = results.astype({y: float}).assign(panel=titles)
    if results[y].isna().all():  # seaborn refuses a column without a number
        results = results.fillna({y: inf})
    count = results.panel.nunique()
    columns = min(columns, count)
    facets: dict[str, Any] = {"col": "panel", "col_wrap": columns if count > 1 else None}
    facets["facet_kws"] = {f"share{axis}": axis not in free for axis in "xy"}
    style = {"errorbar": ("pi", 100), "err_kws": {"alpha": 0.15, "linewidth": 0}, "marker": "o"}
    grid = seaborn.relplot(results, kind="line", x=x, y=y, **{**style, **facets, **options})
    rows = ceil(count / columns)
    grid.figure.set_size_inches(WIDTH, (5.6 if columns < 3 else 4.6) / columns * rows + 0.6)
    grid.figure.set_layout_engine("constrained")
    if grid.legend is not None:
        _put_legend_below(grid, options.get("style"))
    if "x" not in log and results[x].dtype.kind == "i":
        for axes in grid.axes.flat:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid.set(**{f"{axis}scale": "log" for axis in log}).set_axis_labels(*labels).set_titles("{col_name}")
    figure: Figure = grid.figure
    pyplot.close(figure)  # pyplot would keep every figure in memory
    return figure


def _put_legend_below(grid: Any, style: str | None) -> None:
    """Replace the legend by one below the panels: a row for the colors, and a row for the column `style`, if given."""
    labels = [text.get_text() for text in grid.legend.get_texts()]
    entries = list(zip(grid.legend.legend_handles, labels, strict=True))
    title, columns, length = grid.legend.get_title().get_text(), 4, 2.0
    if style in labels:
        first = labels.index(style)
        rows = entries[:first], entries[first:]
        columns, length = max(map(len, rows)), 3.5  # room for dashes
        # a legend fills one column after the other
        entries = list(chain(*zip_longest(*rows, fillvalue=(Line2D([], [], linestyle=""), ""))))
    grid.legend.remove()
    form: dict[str, Any] = {"ncols": columns, "title": title, "handlelength": length}
    grid.figure.legend(*zip(*entries, strict=True), loc="outside lower center", frameon=False, fontsize="small", **form)


def mark_diverged(figure: Figure, loss: float, *, room: float = 0.05) -> Figure:
    """Draw a line at the loss that diverged trainings have in a picture. Panels end a little above it."""
    for axes in figure.axes:
        axes.set_ylim(None, loss + room)
        axes.tick_params(axis="x", which="minor", labelbottom=False)
        axes.axhline(loss, color="0.5", linewidth=0.8, linestyle=":")
        place: dict[str, Any] = {"va": "top", "transform": axes.get_yaxis_transform()}
        axes.text(0.02, loss - 0.02, "diverged", color="0.4", size="small", **place)
    return figure


def unrolled(results: Any, values: str, number: str, *, start: int = 0) -> Any:
    """A row for each value of the lists in a column, one for a missing list, and a column with its number."""
    of = results.explode(values)
    return of.assign(**{number: of.groupby("name").cumcount() + start})
