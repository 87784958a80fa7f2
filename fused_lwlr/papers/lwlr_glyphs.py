"""Layer-wise rates and tokens that start at zero: a ViT with SGD on letters and digits in many fonts.

Initializing the Layer-wise Learning Rate, Table 1: a ViT with SGD is where the paper gains most. The arms are the ones
of the study lwlr-fashion; each has its own best learning rate of five, by the loss on held-out images.
"""

import re
from typing import Any

from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.lwlr_fashion import ARMS, BATCH, all_rates, compared, drawn, measure
from fused_lwlr.papers.tables import Report
from fused_lwlr.papers.tuning import best

MODEL, QUICK = "vit4x96", "vit1x16"
SIDE = 16
"""Side of the images in pixels."""
LRS = (0.003, 0.01, 0.03, 0.1, 0.3)


def jobs(settings: Settings) -> list[Job]:
    """Every arm at every rate."""
    of: dict[str, Any] = {"model": settings.model or (QUICK if settings.quick else MODEL), "workers": 0}
    if settings.data == "glyphs":
        of["image_size"] = SIDE
    return [
        Job(
            f"{re.sub('[^A-Za-z]+', '-', arm)}-lr{lr:g}-seed{seed}",
            measure,
            {"arm": arm, "lr": lr, "seed": seed} | of | settings.common,
        )
        for arm in ARMS
        for lr in (LRS[1:3] if settings.quick else LRS)
        for seed in range(settings.seeds)
    ]


def report(settings: Settings, results: Any) -> Report:
    """Test accuracy at the best rate of each arm, differences from the control, and all rates."""
    setting = f"batches of {BATCH}, {settings.over}"
    choice = (
        f"of {results.lr.nunique()}, by the loss on a fifth of the training images, which no training has; images for "
        "testing are in other fonts"
    )
    return Report(
        [
            compared("a ViT with SGD on glyphs", best(results, by=["arm"]), setting, choice),
            all_rates("all learning rates", results),
        ],
        drawn(results),
    )


STUDY = Study(
    name="lwlr-glyphs",
    doc="A ViT with SGD on letters and digits in many fonts: one rate and layer-wise rates, with and without tokens "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    jobs=jobs,
    report=report,
    epochs=20,
    data="glyphs",
)
