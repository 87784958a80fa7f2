"""The studies by name; the module of a study is imported when it is asked for."""

import importlib
from typing import Any

STUDIES = {
    "demo": "demo.STUDY",
    "lwlr-fashion": "lwlr_fashion.STUDY",
    "lwlr-glyphs": "lwlr_fashion.GLYPHS",
    "lwlr-methods": "lwlr_methods.STUDY",
    "lwlr-networks": "lwlr_networks.STUDY",
    "lwlr-decay": "lwlr_decay.STUDY",
    "lwlr-width": "lwlr_width.STUDY",
    "lwlr-adam": "lwlr_adam.STUDY",
    "lwlr-vs-single": "lwlr_vs_single.STUDY",
    "large-batch": "large_batch.STUDY",
    "methods": "methods.STUDY",
    "lwlr-T": "lwlr_t.STUDY",
    "elr-spread": "elr_spread.STUDY",
    "elr-warmup": "elr_warmup.STUDY",
    "elr-constrained": "elr_constrained.STUDY",
    "elr-fashion": "elr_fashion.STUDY",
    "elr-deep": "elr_fashion.DEEP",
    "elr-fit": "elr_fit.STUDY",
    "elr-simulation": "elr_simulation.STUDY",
    "elr-language": "elr_language.STUDY",
    "elr-translation": "elr_translation.STUDY",
    "gradinit": "gradinit.STUDY",
    "gradinit-variants": "gradinit_variants.STUDY",
    "gradinit-language": "gradinit_language.STUDY",
    "lwlr-language": "lwlr_language.STUDY",
    "balance": "balance.STUDY",
    "balance-variants": "balance_variants.STUDY",
    "balanced-lr": "balanced_lr.STUDY",
}
"""Names of studies, and where they are."""


def find(name: str) -> Any:
    """The `framework.Study` with this name.

    Raises:
        ValueError: no study has this name.
    """
    if name not in STUDIES:
        raise ValueError(f"there is no study {name!r}: choose from {', '.join(STUDIES)}")
    module, attribute = STUDIES[name].split(".")
    return getattr(importlib.import_module(f"fused_lwlr.papers.{module}"), attribute)
