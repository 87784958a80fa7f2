"""What plots of results have in common."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def finish(figure: "Figure", path: str | Path | None, title: str | None) -> "Figure":
    """Returns a figure with open frames and the title, after it is saved to `path`, unless this is None."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
