"""Tables in Markdown."""

from collections.abc import Iterable, Iterator
from typing import Any


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Yields the lines of a table."""
    head = tuple(head)
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
