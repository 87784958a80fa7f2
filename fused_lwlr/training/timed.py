"""The time that training waits for its batches."""

import time
from collections.abc import Iterator

from fused_lwlr.data import Batch


class Timed:
    """Batches, and the time spent waiting for them."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches, self.seconds = batches, 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.seconds += time.perf_counter() - start

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
