"""A progress bar."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def with_progress(items: Iterable[T], steps: int | None, description: str, progress: bool) -> Iterable[T]:
    """The items, with a progress bar if wanted; `steps` is their number, or None."""
    if not progress:
        return items
    from rich.progress import track

    return track(items, description=description, total=steps)
