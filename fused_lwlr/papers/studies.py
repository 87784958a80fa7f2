"""The studies by name; the module of a study is imported when it is asked for."""

import importlib
from typing import Any

STUDIES = (
    "demo",
    "lwlr-fashion",
    "lwlr-glyphs",
    "lwlr-vs-single",
    "large-batch",
    "methods",
    "lwlr-T",
    "elr-spread",
    "elr-warmup",
    "elr-constrained",
    "elr-fit",
    "elr-simulation",
    "elr-language",
    "gradinit",
    "gradinit-language",
    "lwlr-language",
    "balance",
    "balance-variants",
    "balanced-lr",
)
"""Names of studies. Each has a module with a `STUDY`."""


def find(name: str) -> Any:
    """The `framework.Study` with this name.

    Raises:
        ValueError: no study has this name.
    """
    if name not in STUDIES:
        raise ValueError(f"there is no study {name!r}: choose from {', '.join(STUDIES)}")
    return importlib.import_module(f"fused_lwlr.papers.{name.lower().replace('-', '_')}").STUDY
