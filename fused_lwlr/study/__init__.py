"""Studies: what the papers' figures and tables look like at the size of this machine."""

from fused_lwlr.study.report import Report, Table, cell
from fused_lwlr.study.study import Job, Result, Results, Settings, Study

__all__ = ["Job", "Report", "Result", "Results", "Settings", "Study", "Table", "cell"]
