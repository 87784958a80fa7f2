"""The studies by name."""

import importlib
from typing import Any

STUDIES = {
    "demo": "fused_lwlr.papers.demo",
    "lwlr-fashion": "fused_lwlr.papers.lwlr_fashion",
    "lwlr-glyphs": "fused_lwlr.papers.lwlr_glyphs",
    "lwlr-vs-single": "fused_lwlr.papers.lwlr_vs_single",
    "large-batch": "fused_lwlr.papers.large_batch",
    "methods": "fused_lwlr.papers.methods",
    "lwlr-T": "fused_lwlr.papers.lwlr_t",
    "elr-spread": "fused_lwlr.papers.elr_spread",
    "elr-warmup": "fused_lwlr.papers.elr_warmup",
    "elr-constrained": "fused_lwlr.papers.elr_constrained",
    "elr-fit": "fused_lwlr.papers.elr_fit",
    "elr-simulation": "fused_lwlr.papers.elr_simulation",
    "elr-language": "fused_lwlr.papers.elr_language",
    "gradinit": "fused_lwlr.papers.gradinit",
    "gradinit-language": "fused_lwlr.papers.gradinit_language",
    "lwlr-language": "fused_lwlr.papers.lwlr_language",
    "balance": "fused_lwlr.papers.balance",
    "balance-variants": "fused_lwlr.papers.balance_variants",
    "balanced-lr": "fused_lwlr.papers.balanced_lr",
}
"""Name -> the module with its `STUDY`; imported on use."""


def find(name: str) -> Any:
    """The `framework.Study` with this name.

    Raises:
        ValueError: no study has this name.
    """
    if name not in STUDIES:
        raise ValueError(f"there is no study {name!r}: choose from {', '.join(STUDIES)}")
    return importlib.import_module(STUDIES[name]).STUDY
