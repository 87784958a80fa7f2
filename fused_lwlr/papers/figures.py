"""Curves of studies: the mean over seeds, with a band from the lowest to the highest."""

from typing import Any

import matplotlib

matplotlib.use("agg")  # figures are written to files, also on a machine with a screen

import seaborn

BAND = {"errorbar": ("pi", 100), "err_kws": {"alpha": 0.15, "linewidth": 0}}


def bands(results: Any, *, x: str, y: str, **options: Any) -> Any:
    """A grid of panels (`seaborn.relplot`), divided by `col` and `row`, with colours by `hue`."""
    columns = results[options["col"]].nunique() if "col" in options else 1
    grid = seaborn.relplot(
        results, kind="line", x=x, y=y, height=3, aspect=1.2 if columns > 1 else 1.5, **{**BAND, **options}
    )
    return grid.set_titles("{col_name}")


def band(axes: Any, results: Any, *, x: str, y: str, **options: Any) -> None:
    """The same in existing axes, with a small legend."""
    seaborn.lineplot(results, x=x, y=y, ax=axes, **{**BAND, **options})
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend() is not None:
        seaborn.move_legend(axes, "best", frameon=False, fontsize="x-small", title=None)
