"""A small ResNet on Fashion-MNIST with layer-wise rates, normalized gradients, LARC and LAMB, each at its best learning
rate (Initializing the Layer-wise Learning Rate, Table 2).
"""

from functools import partial
from typing import Any

from fused_lwlr.papers import images
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.methods import METHODS
from fused_lwlr.papers.tables import Table
from fused_lwlr.training.defaults import WEIGHT_DECAY

OF_SGD, OF_ADAMW = (0.03, 0.1, 0.3), (0.003, 0.01, 0.03)
ARMS: images.Arms = {
    "SGD": (METHODS["single"][1], OF_SGD),
    "SGD-LW": (METHODS["LWLR"][1], OF_SGD),
    "SGD-NG": (METHODS["SGD-NG"][1], OF_SGD),
    "LARC": (METHODS["LARC"][1], (0.1, 0.3, 1.0)),
    "AdamW": (METHODS["AdamW"][1], OF_ADAMW),
    "AdamW-LW": (METHODS["AdamW-LWLR"][1], OF_ADAMW),
    "Adam-NG": (METHODS["Adam-NG"][1], OF_ADAMW),
    "LAMB": (METHODS["LAMB"][1], OF_ADAMW),
}
RULES = images.rules(ARMS)
GRID = images.ladder({"method": "arm"}, {arm: rule for arm, rule in RULES.items() if arm != rule})


def jobs(settings: Settings) -> list[Job]:
    """Every arm at its first rates, with the seeds that choose."""
    cells = images.cells(settings, ARMS, model=settings.model or images.MODEL)
    return images.jobs(settings, partial(images.last, ARMS), "{arm}-lr{lr:g}-seed{seed}", cells)


def tables(settings: Settings, results: Any) -> list[Table]:
    """Test accuracy at the best rate of each arm, differences from SGD or AdamW, and all rates."""
    notes = [
        f"{results.model.iloc[0]}, {settings.over}; {images.SCHEDULE}",
        f"weight decay: {WEIGHT_DECAY['sgd']:g} with SGD, which has momentum, and {WEIGHT_DECAY['adamw']:g} with "
        "AdamW; LARC has a trust coefficient of 0.001; all start from LWLR's initialization",
        f"LW: {images.MULTIPLIERS}; NG: the gradient of every layer is divided by its norm",
        "paper: Table 2, and Table 1 for AdamW and AdamW-LW, ResNet-50 on ImageNet, 90 epochs, one run each: SGD "
        "76.80, SGD-LW 77.12, SGD-NG 76.85, LARC 76.71, AdamW 76.40, AdamW-LW 76.67, Adam-NG 76.33, LAMB 76.43; its "
        "LARS is LARC",
        "difference: test accuracy in points minus SGD's or AdamW's",
    ]
    return GRID.tables(results, "layer-wise methods, each at its best learning rate", notes)


STUDY = Study(
    "lwlr-methods", __doc__, jobs, tables, partial(GRID.draw, hue="arm", panel=("rule",), free="x"), grid=GRID,
    columns={"rule": lambda of: of.arm.replace(RULES)}, steps=300, data="fashion-mnist",
)  # fmt: skip
