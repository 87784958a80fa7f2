"""Every row of the traffic table is what the launcher counts, and the table that is published holds it."""

import pytest

from bench.traffic import FILE, ROWS, count, line

PUBLISHED = FILE.read_text().splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.label} {row.dtype}".replace(" ", "_"))
def test_row(row, device):
    found, floor = count(row, device)
    assert found == pytest.approx((row.memory, row.again, row.launches))
    # a step moves what it must, and no more than a pass over gradients or parameters besides
    assert floor <= row.memory <= floor + 4
    assert line(row, floor) in PUBLISHED


def test_nothing_else_is_published():
    assert len([text for text in PUBLISHED if text.startswith("| ")]) == len(ROWS) + 1
