"""Defaults that follow from other options: of the learning rate, the weight decay, the initialization, ..."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

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


def implied_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields whose defaults follow from fields that were given, and differ from the defaults of a recipe."""
    fields: dict[str, Any] = {}
    if given.get("optimizer") == "lion":
        fields["betas"] = (0.9, 0.99)
    if given.get("weights") is not None:
        fields["init"] = "model"
    if given.get("layer_decay") is not None:
        fields["rates"] = "single"
    return fields


def small_model_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults for a small model and the embedded images, as far as the options determine them."""
    optimizer = str(given.get("optimizer", "sgd"))
    fields: dict[str, Any] = {"weight_decay": WEIGHT_DECAY.get(optimizer, 0.0)}
    if optimizer in WEIGHT_DECAY:
        fields["lr"] = learning_rate(str(given.get("model", "resnet")), optimizer)
    with suppress(TypeError, ValueError):  # validation refuses other values in the user's spelling
        fields["warmup_epochs"] = float(given.get("epochs", 20.0)) / 10
    if given.get("data") == "fashion-mnist":
        fields["augmentation"] = "basic"
    if given.get("scaling", "none") != "none":
        fields["rates"] = "single"
    single = {**fields, **implied_defaults(given), **given}.get("rates") == "single"
    pretrained = is_pretrained(given.get("pretrained"), given.get("model_args", ()))
    if pretrained or (single and str(given.get("model", "")).startswith("timm:")):
        fields["init"] = "model"
    return fields


def is_pretrained(pretrained: Any, model_args: Any) -> bool:
    """Whether these fields, or their strings, ask for a model with trained weights."""
    given = dict(str(text).partition("=")[::2] for text in model_args) if isinstance(model_args, (list, tuple)) else {}
    return bool(pretrained) or given.get("pretrained", "False") not in ("False", "0") or "checkpoint_path" in given
