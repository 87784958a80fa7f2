"""Mixup and CutMix of a micro-batch on its device."""

from torch import Tensor

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

    def __init__(self, *, classes: int, mixup: float, cutmix: float, smoothing: float, seed: int) -> None:
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
            # timm mixes in place, and the inputs may be the memory of a data set
            mixed: tuple[Tensor, Tensor] = self.mix(inputs.clone(), targets)
        return mixed
