"""What a training measures: of some steps, of a validation, and of the layers in one step."""

import math
from dataclasses import dataclass
from typing import ClassVar


def perplexity(loss: float) -> float:
    """e to a loss in nats a token; infinite where double precision has no such number."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class Interval:
    """Training since the record before.

    Attributes:
        step: optimizer steps taken.
        epoch: epochs trained, in parts of one.
        lr: the learning rate of the last step, of the first parameter group.
        loss: the mean over the images, or tokens, of the interval.
        count: images, or tokens, trained on in it by all ranks.
        seconds: that it took.
        loader_seconds: of these, waited for the loader; the mean over ranks, or that of the first.
        step_seconds: of these, in forward, backward and the optimizer.
        grad_norm: of the whole gradient in the last step, where it is known.
        skipped: images in it that could not be read.
        unit: "images", or "tokens" of text.
    """

    step: int
    epoch: float
    lr: float
    loss: float
    count: int
    seconds: float
    loader_seconds: float
    step_seconds: float
    grad_norm: float | None = None
    skipped: int = 0
    unit: str = "images"

    kind: ClassVar[str] = "train"

    @property
    def per_second(self) -> float:
        """Images, or tokens, by the seconds of the interval."""
        return self.count / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True)
class Validation:
    """One pass over the validation data.

    Attributes:
        step, epoch: as of `Interval`.
        weights: "model", or "ema" for averaged weights.
        top1, top5: the part of the images with the right class first, or among the first five: 0 to 1; of text None.
        loss: the mean over images, or tokens, in nats.
        count: images, or tokens, of the pass, all ranks together.
        seconds: that it took, which is the same for all weights that it was of.
        unit: as of `Interval`.
    """

    step: int
    epoch: float
    weights: str
    top1: float | None
    top5: float | None
    loss: float
    count: int
    seconds: float
    unit: str = "images"

    kind: ClassVar[str] = "validation"


@dataclass(frozen=True)
class LayerValues:
    """What one step did to each layer.

    Attributes:
        step: optimizer steps taken, this one included.
        names: the layers, in the order of the model.
        weight: for each, whether it is a weight: not a bias, a scale, or the like.
        elr: ‖g‖ / ‖w‖ before the step; None for a weight of zeros or a gradient that is not finite.
        trust_ratio: the factor of the optimizer's scaling, 1 without one; None where it cannot be told.
        multiplier: η; None where parts of the layer have different ones.
    """

    step: int
    names: tuple[str, ...]
    weight: tuple[bool, ...]
    elr: tuple[float | None, ...]
    trust_ratio: tuple[float | None, ...]
    multiplier: tuple[float | None, ...]

    kind: ClassVar[str] = "layers"


Record = Interval | Validation | LayerValues
