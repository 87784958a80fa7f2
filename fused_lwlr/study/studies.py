"""The studies by name."""

import importlib

from fused_lwlr.study.study import Study

STUDIES = {
    "lwlr-vs-single": "fused_lwlr.study.lwlr_vs_single",
    "methods": "fused_lwlr.study.methods",
    "lwlr-T": "fused_lwlr.study.lwlr_t",
}
"""Name -> the module whose `STUDY` it is; imported when it is asked for."""


def find(name: str) -> Study:
    """A study.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in STUDIES:
        raise ValueError(f"there is no study {name!r}: choose from {', '.join(STUDIES)}")
    study: Study = importlib.import_module(STUDIES[name]).STUDY
    return study
