"""The studies by name; the module of a study is imported when it is asked for."""

import importlib
from typing import Any

STUDIES = (
    "demo", "lwlr-fashion", "lwlr-glyphs", "lwlr-methods", "lwlr-networks", "lwlr-decay", "lwlr-width", "lwlr-adam",
    "lwlr-vs-single", "large-batch", "methods", "lwlr-T", "elr-spread", "elr-warmup", "elr-constrained", "elr-fashion",
    "elr-deep", "elr-fit", "elr-simulation", "elr-language", "elr-translation", "gradinit", "gradinit-fashion",
    "gradinit-variants", "gradinit-language", "lwlr-language", "balance", "balance-variants", "balanced-lr",
)  # fmt: skip
"""Names of studies. Each is `STUDY` of the module with its name, except for some."""
ELSEWHERE = {
    "lwlr-glyphs": ("lwlr_fashion", "GLYPHS"), "lwlr-networks": ("lwlr_fashion", "OF_NETWORKS"),
    "elr-deep": ("elr_fashion", "DEEP"), "gradinit-fashion": ("gradinit", "FASHION"),
}  # fmt: skip


def find(name: str) -> Any:
    """The `framework.Study` with this name.

    Raises:
        ValueError: no study has this name.
    """
    if name not in STUDIES:
        raise ValueError(f"there is no study {name!r}: choose from {', '.join(STUDIES)}")
    module, attribute = ELSEWHERE.get(name, (name.lower().replace("-", "_"), "STUDY"))
    return getattr(importlib.import_module(f"fused_lwlr.papers.{module}"), attribute)
