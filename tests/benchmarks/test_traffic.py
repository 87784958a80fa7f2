"""Every row of the published traffic table equals the launcher's count."""

import pytest

from bench import traffic
from bench.traffic import FILE, ROWS, cells, count

PUBLISHED = FILE.read_text().splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.label} {row.dtype}".replace(" ", "_"))
def test_row(row, device, monkeypatch):
    memory, floor, _, _ = found = count(row, device)
    monkeypatch.setattr(traffic, "count", lambda *_: found)
    assert f"| {' | '.join(cells(row, device))} |" in PUBLISHED
    # a step moves at least the necessary bytes, and at most one more pass over gradients or parameters
    assert floor <= memory <= floor + 4


def test_nothing_else_is_published():
    assert len([text for text in PUBLISHED if text.startswith("| ")]) == len(ROWS) + 1
