"""Mixup and CutMix of a micro-batch on its device, and the loss that goes with them."""

from torch import Tensor
from torch.nn import functional

from fused_lwlr.data.randomness import MIXING, globals_restored, seed_globals, sequence
from fused_lwlr.integrations.extras import import_timm


class Mixing:
    """Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899) by timm, each image with the one at the mirrored position.

    The random numbers of a micro-batch follow from (seed, step, micro). One that is split differently is mixed
    differently, since images are mixed within it.

    Args:
        mixup: α of Mixup, whose weights are drawn from Beta(α, α); 0 for none. 0.5 in the LWLR paper.
        cutmix: α of CutMix; 0 for none. With both, one of them is drawn for each micro-batch.
        smoothing: label smoothing, in [0, 1): this much of a target is spread evenly over all classes.

    Raises:
        ImportError: timm cannot be imported.
    """

    def __init__(
        self, *, classes: int, mixup: float = 0.0, cutmix: float = 0.0, smoothing: float = 0.0, seed: int = 0
    ) -> None:
        self.seed = seed
        self.mix = import_timm("Mixup and CutMix").data.Mixup(
            mixup, cutmix, label_smoothing=smoothing, num_classes=classes
        )

    def __call__(self, inputs: Tensor, targets: Tensor, *, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """The given images, mixed in place, and probabilities of shape (images, classes), float32.

        Args:
            inputs: (images, channels, height, width), of a floating-point dtype; an even number of images.
            targets: (images,), int64.
            micro: number among the passes of the step in all processes.
        """
        with globals_restored():
            seed_globals(sequence(MIXING, self.seed, step, micro))
            mixed: tuple[Tensor, Tensor] = self.mix(inputs, targets)
        return mixed


def mixed_cross_entropy(outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
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
    outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0, threshold: float | None = None
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
