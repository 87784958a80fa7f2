"""The end of every plot."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def finish(figure: "Figure", path: str | Path | None, title: str | None) -> "Figure":
    """Hides the upper and right lines of frames, adds the title, saves the figure to `path`, and returns it."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
