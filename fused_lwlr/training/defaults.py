"""Learning rates and weight decay to start from."""

from typing import Any

WEIGHT_DECAY = {"sgd": 1e-4, "adamw": 0.1}
LEARNING_RATE = {"sgd": 0.1, "adamw": 3e-3}
"""Those of the paper for ResNet-50 (Initializing the Layer-wise Learning Rate, Table 5)."""

# For the demo, whose base rates for both arms they are, they were chosen with a single rate only: trained as in the
# demo, on four fifths of the training images, tested on the other fifth (288 images); the test images and the seeds of
# the demo had no part in it. Accuracy in percent and training loss, means of seeds 100 to 103. The highest accuracy
# decides, or the lowest loss within half a percent of it:
#   sgd     0.001  0.003          0.01           0.03           0.1            0.3
#   resnet                        97.5           97.7 (0.0026)  98.1 (0.0034)  97.6 (0.0030)
#   vit     70.6   71.7           56.4           18.2
#   adamw   0.001  0.003          0.01           0.03           0.1
#   resnet         97.3           97.5           98.2 (0.0026)  98.5 (0.0048)
#   vit     84.7   91.1           91.8           75.3
ON_DIGITS = {("resnet", "sgd"): 0.03, ("resnet", "adamw"): 0.03, ("vit", "sgd"): 0.003, ("vit", "adamw"): 0.01}

# For the deep network without shortcuts they were chosen in the same way, by the same rule, with SGD alone. Plain SGD's
# rate, with momentum 0.9 and weight decay 1e-4 or with neither, without warm-up or with a tenth of training:
#                   0.003        0.01         0.03         0.1          0.3          1
#   both            42.4 (1.63)  65.0 (1.05)  63.3 (1.00)  57.0 (1.06)
#   both, warm-up   42.7 (1.66)  64.6 (1.07)  62.1 (1.00)  51.4 (1.15)
#   neither                                   59.5 (1.34)  78.6 (0.83)  62.9 (1.00)  55.7 (1.06)
#   neither, warm-up                          55.0 (1.43)  72.5 (0.86)  69.2 (0.89)  63.0 (0.97)
# Constrained ELR, with neither and no warm-up, by lr (down) and lr · goal (across):
#          0.009        0.01         0.015        0.03
#   0.1                 57.7 (1.02)  78.7 (0.47)  76.4 (0.63)
#   0.3    65.2 (0.83)               82.7 (0.47)  78.1 (0.64)
#   1                   78.0 (0.53)               70.1 (0.81)
# and with warm-up: 76.2 (0.63) at 0.1 · 0.15, 73.4 (0.70) at 0.3 · 0.05, 76.1 (0.64) at 1 · 0.01
# The four seeds of a cell lie 1 to 31 points apart.
# Depth and width come from the held-out images too, by one or two seeds of coarser grids. 44 layers: 66.5 (0.98) at
# 0.1 · 0.15 and 54.3 (1.25) for plain SGD at 0.1, four seeds, but 64.6 (0.90) for the latter at 0.3 with warm-up, two.
# 20 layers of 8 channels: 72.6 (0.86) and, with momentum at 0.1, 76.0 (0.62). Fully connected layers, 16 of width 32:
# 89.2 (0.38) and 93.4 (0.27); 24 of width 64: 79.9 (0.46) and 87.5 (0.43). So constraining is no gain in all of them.
# From 44 fully connected layers or 56 convolutions of 8 channels on, neither learned much in 10 epochs.
NEITHER: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "warmup": 0.0}
NOSHORT: tuple[dict[str, Any], ...] = (
    {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4, "warmup": 0.0},
    {**NEITHER, "lr": 0.1},
    {**NEITHER, "lr": 0.3},
    {**NEITHER, "lr": 0.3, "scaling": "elr", "goal": 0.05},
)
"""The arms of the demo without shortcuts: SGD at its best rates, at that of constrained ELR, and constrained ELR."""


def learning_rate(model: str, optimizer: str) -> float:
    """A base learning rate for a model and an optimizer."""
    return ON_DIGITS.get((model, optimizer), LEARNING_RATE[optimizer])


def image_size(model: str) -> int | None:
    """The side of images for a model: that of the data set, or 224 for models of timm."""
    return 224 if model.startswith("timm:") else None
