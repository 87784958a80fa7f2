"""Initial values for learning rate and weight decay."""

WEIGHT_DECAY = {"sgd": 1e-4, "adamw": 0.1, "lion": 1.0}
LEARNING_RATE = {"sgd": 0.1, "adamw": 3e-3, "lion": 3e-4}
"""The paper's values for ResNet-50 (Initializing the Layer-wise Learning Rate, Table 5). Lion's are a
tenth and ten times AdamW's, the ends of the ranges in Symbolic Discovery of Optimization Algorithms, Section 5."""

# Small nets on the digits, chosen with a single rate: 10 epochs on four fifths of the training images, tested on
# the other fifth (288 images). The study lwlr-vs-single has them within the grid of each arm. Accuracy in percent and
# training loss, means of seeds 100 to 103. The highest accuracy decides, or within half a percent the lowest loss:
#   sgd     0.001  0.003          0.01           0.03           0.1            0.3
#   resnet                        97.5           97.7 (0.0026)  98.1 (0.0034)  97.6 (0.0030)
#   vit     70.6   71.7           56.4           18.2
#   adamw   0.001  0.003          0.01           0.03           0.1
#   resnet         97.3           97.5           98.2 (0.0026)  98.5 (0.0048)
#   vit     84.7   91.1           91.8           75.3
ON_DIGITS = {("resnet", "sgd"): 0.03, ("resnet", "adamw"): 0.03, ("vit", "sgd"): 0.003, ("vit", "adamw"): 0.01}


def learning_rate(model: str, optimizer: str) -> float:
    """A base learning rate for a model and an optimizer."""
    return ON_DIGITS.get((model, optimizer), LEARNING_RATE[optimizer])
