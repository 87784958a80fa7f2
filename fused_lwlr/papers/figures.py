"""Curves of studies: the mean over seeds, with a band from the lowest to the highest."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

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
        seaborn.move_legend(grid, "outside lower center", ncols=4, frameon=False, fontsize="small")
    grid.set(**{f"{axis}scale": "log" for axis in log}).set_axis_labels(*labels).set_titles("{col_name}")
    figure: Figure = grid.figure
    pyplot.close(figure)  # pyplot would keep every figure in memory
    return figure


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
    """A row for each value of the lists in a column, and a column with its number."""
    of = results[results[values].notna()].explode(values)
    return of.assign(**{number: of.groupby("name").cumcount() + start})
