"""Writes each measured row at once, to standard output and to the file named by ROWS.

As a plugin of pytest (`-p bench.rows`) it selects the tests that run on the device and writes a row for each.
"""

import json
import os
from pathlib import Path
from typing import Any


def write(row: dict[str, Any]) -> None:
    """Writes a row as one line of JSON."""
    text = json.dumps(row) + "\n"
    print(text, end="", flush=True)
    _keep(text)


def _keep(text: str) -> None:
    if path := os.environ.get("ROWS"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out tests that run elsewhere."""
    kept = [item for item in items if "device" in item.fixturenames or item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_runtest_logreport(report: Any) -> None:
    """Writes the outcome of a test. With pytest-xdist the main process receives the reports of all tests."""
    if (report.when == "call" or not report.passed) and "PYTEST_XDIST_WORKER" not in os.environ:
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        _keep(json.dumps(row) + "\n")
