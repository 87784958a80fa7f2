"""The best validation of a training, whose weights are kept, and the accuracy at which the training ends."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fused_lwlr.training.evaluate import Evaluation
from fused_lwlr.training.trainer import Trainer
from fused_lwlr.training.weights import save_weights


class Best:
    """The best validation so far.

    Attributes:
        score: top-1 accuracy from 0 to 1; for text the loss, with a minus; -infinite before the first validation.
        kept: the score of the weights in the file, which is less if better ones could not be written.
        reached: whether the score is at least `target_top1` of the recipe.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.score, self.kept, self.reached = -math.inf, -math.inf, False

    def compare(self, trainer: Trainer, results: Mapping[str, Evaluation], tell: Callable[[str], object]) -> None:
        """Take over the results of `trainer.evaluate` if they are better, and write the weights. All ranks call it.

        If the file cannot be written, `tell` gets a line for the user.
        """
        scores = {name: _score(result) for name, result in results.items()}
        weights = max(scores, key=lambda name: scores[name])
        target = trainer.recipe.target_top1
        self.reached = target is not None and scores[weights] >= target
        self.score = max(self.score, scores[weights])
        if not scores[weights] > self.kept:
            return
        try:
            if self.path is not None:
                with trainer.averaged() if weights == "ema" else nullcontext():
                    save_weights(trainer.model, self.path)
            self.kept = scores[weights]
        except OSError as error:
            tell(f"The best weights could not be written ({error}). Training continues without them.")

    def state(self) -> dict[str, Any]:
        """The values for a checkpoint."""
        return {"score": self.score, "kept": self.kept, "reached": self.reached}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the values of a checkpoint."""
        self.score, self.kept, self.reached = state["score"], state["kept"], state["reached"]


def _score(result: Evaluation) -> float:
    score = -result.loss if result.top1 is None else result.top1
    return -math.inf if math.isnan(score) else score
