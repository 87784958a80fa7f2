"""Measurements of a training: over some steps, of a validation, and of the layers in one step."""

import math
from dataclasses import dataclass
from typing import ClassVar

from fused_lwlr.training.evaluate import Evaluation


def perplexity(loss: float) -> float:
    """e to a loss in nats a token; infinite if double precision overflows."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class Interval:
    """Training since the previous record.

    Attributes:
        step: optimizer steps taken.
        epoch: epochs trained, with fractions.
        lr: the learning rate of the last step, of the first parameter group.
        loss: the mean over the images, or tokens, of the interval.
        count: images, or tokens, trained on by all ranks in the interval.
        seconds: duration of the interval.
        loader_seconds: part of `seconds` spent waiting for the loader, on this rank.
        step_seconds: part of `seconds` spent in forward, backward and the optimizer.
        grad_norm: norm of the whole gradient in the last step, if it is known.
        skipped: images in the interval that could not be read.
        unit: "images", or "tokens" for text.
        steps_skipped: steps since the beginning that the optimizer skipped because of their gradients.
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
    steps_skipped: int = 0

    kind: ClassVar[str] = "train"

    @property
    def per_second(self) -> float:
        """Images, or tokens, by the seconds of the interval."""
        return self.count / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True)
class Validation:
    """One pass over the validation data.

    Attributes:
        step, epoch: as in `Interval`.
        weights: "model", or "ema" for averaged weights.
        top1, top5: fraction of images with the correct class first, or among the first five: 0 to 1; None for text.
        loss: the mean over images, or tokens, in nats.
        count: images, or tokens, of the pass over all ranks.
        seconds: duration, one number for all weights of the pass.
        unit: as in `Interval`.
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
    """The effect of one step on each layer.

    Attributes:
        step: optimizer steps taken, this one included.
        names: the layers, in the order of the model.
        weight: for each, whether it is a weight: not a bias, a scale, or the like.
        elr: ‖g‖ / ‖w‖ before the step; None for a weight of zeros or a gradient that is not finite.
        trust_ratio: the factor of the optimizer's scaling, 1 without one; None if it is unknown.
        multiplier: η; None if parts of the layer have different ones.
    """

    step: int
    names: tuple[str, ...]
    weight: tuple[bool, ...]
    elr: tuple[float | None, ...]
    trust_ratio: tuple[float | None, ...]
    multiplier: tuple[float | None, ...]

    kind: ClassVar[str] = "layers"


def results_text(results: Validation | Evaluation) -> str:
    """The results of a validation for the user; text has no accuracies."""
    if results.top1 is None or results.top5 is None:
        return f"loss {results.loss:.4f} nats a token, perplexity {perplexity(results.loss):.2f}"
    return f"top-1 {results.top1:.2%}, top-5 {results.top5:.2%}, loss {results.loss:.4f}"


Record = Interval | Validation | LayerValues
