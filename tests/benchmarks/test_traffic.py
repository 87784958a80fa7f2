"""Every row of the traffic table equals the launcher's count, and the published table contains it."""

import pytest

from bench.traffic import FILE, ROWS, count, line

PUBLISHED = FILE.read_text().splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.label} {row.dtype}".replace(" ", "_"))
def test_row(row, device):
    found, floor = count(row, device)
    assert found == pytest.approx((row.memory, row.again, row.launches))
    # a step moves at least the necessary bytes, and at most one more pass over gradients or parameters
    assert floor <= row.memory <= floor + 4
    assert line(row, floor) in PUBLISHED


def test_nothing_else_is_published():
    assert len([text for text in PUBLISHED if text.startswith("| ")]) == len(ROWS) + 1
