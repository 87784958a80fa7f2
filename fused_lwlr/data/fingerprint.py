"""Fingerprints of data, by which a resumed run detects that its data have changed."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

SAMPLE = 1024
"""A fingerprint samples at most this many files or places of a text, since all of them would take minutes."""


def digest(*parts: Any) -> str:
    """The first 16 digits of the SHA-256 of texts, numbers and arrays, in this order."""
    found = hashlib.sha256()
    for part in parts:
        content = np.ascontiguousarray(part).view(np.uint8).data if isinstance(part, np.ndarray) else part
        content = content if isinstance(content, (bytes, memoryview)) else str(content).encode(errors="surrogateescape")
        found.update(f"{len(content)}:".encode())
        found.update(content)
    return found.hexdigest()[:16]


def sample(count: int) -> Iterator[int]:
    """Evenly spaced indices below `count`, at most `SAMPLE` of them."""
    chosen = min(count, SAMPLE)
    return (i * count // chosen for i in range(chosen))
