"""A small ResNet on Fashion-MNIST with layer-wise rates, normalized gradients, LARC and LAMB, each at its best learning
rate (Initializing the Layer-wise Learning Rate, Table 2).
"""

from functools import partial

from fused_lwlr.papers import images
from fused_lwlr.papers.methods import METHODS, PAPER

OF_SGD, OF_ADAMW = (0.03, 0.1, 0.3), (0.003, 0.01, 0.03)
FIRST = {
    "SGD": OF_SGD, "SGD-LW": OF_SGD, "SGD-NG": OF_SGD, "LARC": (0.1, 0.3, 1.0),
    "AdamW": OF_ADAMW, "AdamW-LW": OF_ADAMW, "Adam-NG": OF_ADAMW, "LAMB": OF_ADAMW,
}  # fmt: skip
NAMES = {arm: arm for arm in FIRST} | {"SGD": "single", "SGD-LW": "LWLR", "AdamW-LW": "AdamW-LWLR"}
"""Arm -> its name in the study `methods`."""
ARMS: images.Arms = {arm: (METHODS[NAMES[arm]][1], lrs) for arm, lrs in FIRST.items()}
PLAIN = images.plain_arms(ARMS)

STUDY = images.study(
    "lwlr-methods", __doc__, partial(images.train_arm, ARMS), {"method": "arm"}, PLAIN,
    lambda settings: [({"model": settings.model or images.MODEL}, ARMS)],
    lambda grid, settings, results: grid.tables(results, "layer-wise methods, each at its best learning rate", [
        f"{results.model.iloc[0]}, {settings.over}; {images.SCHEDULE}",
        f"{images.DECAY}; LARC has a trust coefficient of 0.001; all start from LWLR's initialization",
        f"LW: {images.MULTIPLIERS}; NG: the gradient of every layer is divided by its norm",
        "paper: Table 2, and Table 1 for AdamW and AdamW-LW, ResNet-50 on ImageNet, 90 epochs, one run each: "
        f"{', '.join(f'{arm} {PAPER[method]}' for arm, method in NAMES.items())}; its LARS is LARC",
        "difference: test accuracy in points minus SGD's or AdamW's",
    ]),
    lines={"hue": "arm", "panel": ("rule",), "free": "x"}, columns={"rule": lambda of: of.arm.replace(PLAIN)},
    steps=300,
)  # fmt: skip
