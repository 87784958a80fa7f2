"""Tables and figures of the papers, at the size of this machine: what a study is, and a file for each."""

from fused_lwlr.papers.framework import Job, Result, Results, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell

__all__ = ["Job", "Report", "Result", "Results", "Settings", "Study", "Table", "cell"]
