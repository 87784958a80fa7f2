"""The best validation, and the accuracy at which a training ends."""

import errno
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fused_lwlr.training import best as module
from fused_lwlr.training.best import Best
from fused_lwlr.training.evaluate import Evaluation


def images(**top1):
    return {name: Evaluation(value, value, 1.0, 10) for name, value in top1.items()}


def text(**loss):
    return {name: Evaluation(None, None, value, 10) for name, value in loss.items()}


class Fake:
    """A trainer whose weight is its step, or with averages the negative."""

    def __init__(self, target=None):
        self.recipe = SimpleNamespace(target_top1=target)
        self.model = nn.Linear(1, 1, bias=False)

    def at(self, step):
        self.model.weight.data.fill_(step)

    @contextmanager
    def averaged(self):
        self.model.weight.data.neg_()
        yield
        self.model.weight.data.neg_()


@pytest.mark.parametrize(
    ("results", "kept", "score"),
    [
        ([images(model=0.5), images(model=0.7), images(model=0.6)], 2, 0.7),
        ([images(model=0.5), images(model=0.5)], 1, 0.5),
        ([images(model=0.5), images(model=0.4, ema=0.6)], -2, 0.6),
        ([images(model=0.0)], 1, 0.0),
        ([text(model=2.0), text(model=1.0), text(model=1.5)], 2, -1.0),
        ([text(model=2.0), text(model=math.nan)], 1, -2.0),
        ([text(model=math.nan), text(model=3.0)], 2, -3.0),
        ([text(model=math.nan, ema=3.0)], -1, -3.0),
    ],
    ids=str,
)
def test_the_weights_of_the_best_validation_are_kept(results, kept, score, tmp_path):
    best, trainer = Best(tmp_path / "model_best.pt"), Fake()
    for step, tested in enumerate(results, start=1):
        trainer.at(step)
        best.compare(trainer, tested, pytest.fail)
    assert (best.score, best.reached) == (score, False)
    assert torch.load(best.path, weights_only=True)["weight"].item() == kept
    again = Best(None)
    again.restore(best.state())
    again.compare(trainer, tested, pytest.fail)
    assert again.score == score


@pytest.mark.parametrize(
    ("tested", "reached"),
    [(images(model=0.75), True), (images(model=0.7499), False), (images(model=0.1, ema=0.8), True)],
    ids=str,
)
def test_the_target_is_reached_by_weights_or_averages(tested, reached):
    best = Best(None)
    best.compare(Fake(target=0.75), tested, pytest.fail)
    assert best.reached == reached
    again = Best(None)
    again.restore(best.state())
    assert again.reached == reached


def test_a_full_disk_keeps_the_former_best(tmp_path, monkeypatch):
    best, trainer, told = Best(tmp_path / "model_best.pt"), Fake(), []
    trainer.at(1)
    best.compare(trainer, images(model=0.5), told.append)
    save = module.save_weights

    def full(model, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_weights", full)
    trainer.at(2)
    best.compare(trainer, images(model=0.8), told.append)
    assert best.score == 0.8
    [line] = told
    assert line.startswith("The best weights could not be written ([Errno 28] No space left on device). Training")
    monkeypatch.setattr(module, "save_weights", save)
    trainer.at(3)
    best.compare(trainer, images(model=0.6), told.append)
    assert torch.load(best.path, weights_only=True)["weight"].item() == 3
