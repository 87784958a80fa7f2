"""Runs here write no report, which would take longer than their training; test_html_report.py tests reports."""

from pathlib import Path

import pytest

from fused_lwlr.runs import run as running


@pytest.fixture(autouse=True, scope="module")
def _no_report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "write_report", lambda folder: Path(folder) / "report.html")
        yield
