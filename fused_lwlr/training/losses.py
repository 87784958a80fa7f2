"""The loss of a micro-batch: of images with classes, of images that Mixup and CutMix have mixed, or of text."""

from torch import Tensor
from torch.nn import functional

from fused_lwlr.training.recipe import Recipe


def loss_of(recipe: Recipe, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a recipe, averaged over the images or tokens of a micro-batch."""
    outputs, targets = flatten_predictions(outputs, targets)
    if recipe.loss == "bce":
        return mixed_binary_cross_entropy(
            outputs, targets, smoothing=recipe.label_smoothing, threshold=recipe.bce_threshold
        )
    return mixed_cross_entropy(outputs, targets, smoothing=recipe.label_smoothing)


def flatten_predictions(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flattens predictions: logits of (..., classes) to (predictions, classes), and targets of (...) likewise.

    Logits of images, (images, classes), and targets that are probabilities do not change.
    """
    return outputs.flatten(0, -2), targets if targets.is_floating_point() else targets.flatten()


def mixed_cross_entropy(outputs: Tensor, targets: Tensor, *, smoothing: float) -> Tensor:
    """Cross entropy, averaged over images, for classes or for the probabilities that `Mixing` returns.

    Args:
        outputs: (images, classes), logits.
        targets: (images,), int64, where -1 does not count; or (images, classes), of a floating-point dtype.
        smoothing: label smoothing of classes; not applied to probabilities, which are smoothed already.
    """
    if targets.is_floating_point():
        return functional.cross_entropy(outputs, targets.to(outputs.dtype))
    return functional.cross_entropy(outputs, targets, ignore_index=-1, label_smoothing=smoothing)


def mixed_binary_cross_entropy(
    outputs: Tensor, targets: Tensor, *, smoothing: float, threshold: float | None
) -> Tensor:
    """Binary cross entropy of each class, averaged over classes and images (ResNet strikes back).

    Args:
        outputs: (images, classes), logits.
        targets, smoothing: as for `mixed_cross_entropy`.
        threshold: targets above it are 1, and others 0; None does not change them.
    """
    if not targets.is_floating_point():
        classes = outputs.shape[1]
        targets = functional.one_hot(targets, classes) * (1 - smoothing) + smoothing / classes
    if threshold is not None:
        targets = targets > threshold
    return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))
