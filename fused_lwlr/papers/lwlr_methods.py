"""A small ResNet on Fashion-MNIST with layer-wise rates, normalized gradients, LARC and LAMB, each at its best learning
rate (Initializing the Layer-wise Learning Rate, Table 2).
"""

from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import ON_FASHION_MNIST, Job, Settings, Study
from fused_lwlr.papers.grid import CHOOSING, LADDER, Grid
from fused_lwlr.papers.large_batch import ADAMW, MODEL, SGD, SIDE
from fused_lwlr.papers.lwlr_fashion import BATCH, CALIBRATION
from fused_lwlr.papers.methods import METHODS, PAPER
from fused_lwlr.papers.tables import Table
from fused_lwlr.papers.training import recipe_of, train

OF_SGD, OF_ADAMW = (0.03, 0.1, 0.3), (0.003, 0.01, 0.03)
ARMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "SGD": ("single", OF_SGD),
    "SGD-LW": ("LWLR", OF_SGD),
    "SGD-NG": ("SGD-NG", OF_SGD),
    "LARC": ("LARC", (0.1, 0.3, 1.0)),
    "AdamW": ("AdamW", OF_ADAMW),
    "AdamW-LW": ("AdamW-LWLR", OF_ADAMW),
    "Adam-NG": ("Adam-NG", OF_ADAMW),
    "LAMB": ("LAMB", OF_ADAMW),
}
"""Arm -> its name in the study `methods`, and the rates that it begins with. An arm whose best rate is the lowest or
highest of its rates gets the next."""
RULES = {arm: "AdamW" if "optimizer" in METHODS[method][1] else "SGD" for arm, (method, _) in ARMS.items()}
RIVALS = {arm: rule for arm, rule in RULES.items() if arm != rule}
GRID = Grid(("arm",), choosing=CHOOSING, ladder=LADDER)


def jobs(settings: Settings) -> list[Job]:
    """Every arm at its first rates, with the seeds that choose."""
    common = {"model": settings.model or MODEL, **settings.on_images(SIDE)}
    few = 2 if settings.quick else None
    cells = [{"arm": arm, "lr": lr} for arm, (_, lrs) in ARMS.items() for lr in lrs[:few]]
    return settings.jobs(measure, "{arm}-lr{lr:g}-seed{seed}", cells, seeds=CHOOSING, common=common)


def measure(arm: str, **common: Any) -> dict[str, Any]:
    """Train; the loss on held-out images, the training loss, and the test accuracy in % after the last step."""
    fields = {**(SGD if RULES[arm] == "SGD" else ADAMW), **METHODS[ARMS[arm][0]][1]}
    own = {"batch_size": BATCH, "calibration_steps": CALIBRATION, "eval_every": 10**9}
    return train(recipe_of(**{**own, **fields, **common}), tuned=True).last


def tables(settings: Settings, results: Any) -> list[Table]:
    """Test accuracy at the best rate of each arm, differences from SGD or AdamW, and all rates."""
    paper = ", ".join(f"{arm} {PAPER[method]}" for arm, (method, _) in ARMS.items())
    notes = [
        f"{results.model.iloc[0]}, {settings.over}; batches of {BATCH} images; a tenth is warm-up, then a cosine",
        f"weight decay: {SGD['weight_decay']:g} with SGD, which has momentum, and {ADAMW['weight_decay']:g} with "
        "AdamW; LARC has a trust coefficient of 0.001; all start from LWLR's initialization",
        f"LW: multipliers of {CALIBRATION} minibatches; NG: the gradient of every layer is divided by its norm",
        "paper: Table 2, and Table 1 for AdamW and AdamW-LW, ResNet-50 on ImageNet, 90 epochs, one run each: "
        f"{paper}; its LARS is LARC",
        "difference: test accuracy in points minus SGD's or AdamW's",
    ]
    title = "layer-wise methods, each at its best learning rate"
    return GRID.tables(results, title=title, labels={"method": "arm"}, rivals=RIVALS, notes=notes)


def draw(results: Any) -> Figure:
    """Test accuracy over the learning rate, for SGD and for AdamW."""
    of, names = GRID.of_choice(results), ("learning rate", ACCURACY)
    of, facets = of.assign(rule=of.arm.replace(RULES)), {"sharex": False}
    return bands(of, x="lr", y="test_accuracy", labels=names, hue="arm", col="rule", facet_kws=facets)


STUDY = Study("lwlr-methods", __doc__, jobs, tables, draw, grid=GRID, steps=300, **ON_FASHION_MNIST)
