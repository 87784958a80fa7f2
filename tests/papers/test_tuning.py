"""Learning rates chosen on held-out images."""

import math
from dataclasses import replace

import pandas
import pytest
import torch
from quick import COMMON
from torch.nn.functional import cross_entropy

from fused_lwlr.data import MicroBatch, Splits, Stream, open_data, open_text
from fused_lwlr.data.digits import digits
from fused_lwlr.data.sequences import Sequences
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.held_out import hold_out
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.setup import new_model, new_optimizer


def every(images):
    """All images of a split, and their classes."""
    loaded = images[MicroBatch(0, 0, 0, 0, tuple(range(len(images))))]
    return loaded.inputs, loaded.targets


def test_held_out_images():
    whole = open_data("digits", image_size=8, augmentation="none")
    data, held = hold_out(whole)
    assert (len(data.train), len(held)) == (1150, 287)
    assert data.val is whole.val
    together = torch.cat([every(data.train)[0], every(held)[0]]).flatten(1)
    # the same images, each once
    assert sorted(together.tolist()) == sorted(every(whole.train)[0].flatten(1).tolist())
    counts = every(held)[1].bincount(minlength=10)
    assert counts.min() > 15
    again = hold_out(whole)[1]
    torch.testing.assert_close(every(again), every(held), rtol=0, atol=0)
    padded = held[MicroBatch(0, 0, 0, 0, (0, -1))]
    assert padded.targets.tolist() == [int(every(held)[1][0]), -1]


def test_data_that_cannot_be_held_out():
    stream = Stream(10, lambda part: [])
    with pytest.raises(ValueError, match="part of dali cannot be held out"):
        hold_out(Splits("dali", stream, stream, ("a", "b"), channels=3, image_size=8))


def test_of_text_the_first_half_of_validation_is_held_out():
    whole = open_text("python-docs", context=64)
    fit, held = hold_out(whole)
    assert fit.train is whole.train
    assert len(held) + len(fit.val) == len(whole.val)
    assert abs(len(held) - len(fit.val)) <= 1
    first = MicroBatch(0, 0, 0, 0, (0,))
    torch.testing.assert_close(held[first].inputs, whole.val[first].inputs, rtol=0, atol=0)
    later = MicroBatch(0, 0, 0, 0, (len(held),))
    torch.testing.assert_close(fit.val[first].inputs, whole.val[later].inputs, rtol=0, atol=0)
    too_short = Sequences(whole.val.tokens, whole.val.begin, whole.val.begin + 60, 64, shifted=False)
    with pytest.raises(ValueError, match="has 1 sequences for validation, but two are needed"):
        hold_out(replace(whole, val=too_short))


def test_a_tuned_training_is_tested_on_both():
    """By hand, from the final model: loss on the held-out images, accuracy on the test images."""
    trainers = []

    def optimizer(trainer):
        trainers.append(trainer)
        return new_optimizer(trainer.recipe, trainer.model, None)

    found = train(recipe_of(model="resnet8x2", lr=0.1, seed=3, **COMMON), optimizer=optimizer, tuned=True)
    [trainer] = trainers
    assert trainer.steps_per_epoch == 1150 // 64
    held = hold_out(open_data("digits", image_size=8, augmentation="none"))[1]
    with torch.no_grad():
        inputs, targets = every(held)
        assert found.val_loss == pytest.approx(cross_entropy(trainer.model.eval()(inputs), targets).item(), rel=1e-5)
        test = digits()[1]
        right = (trainer.model(test.inputs).argmax(1) == test.targets).double().mean().item()
    assert found.accuracies == [pytest.approx(100 * right)]
    assert train(recipe_of(model="resnet8x2", seed=3, **COMMON)).val_loss is None


NAN = math.nan


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ({0.1: [1.0, 3.0], 0.3: [1.5, 1.5]}, 0.3),
        ({0.1: [1.0, 1.0], 0.3: [1.5, 0.6]}, 0.1),
        ({0.1: [2.0, 2.0], 0.3: [0.1, NAN]}, 0.1),  # one seed diverged
        ({0.1: [NAN, NAN], 0.3: [2.0, 2.0]}, 0.3),
        ({0.1: [NAN, 0.1], 0.3: [None, 2.0]}, 0.3),  # one seed was not validated
        ({0.1: [None, None]}, 0.1),  # nothing was held out
    ],
)
def test_best(losses, rate):
    """Another arm, at another best rate, changes nothing."""
    rows = [("a", lr, i, loss, NAN if loss is NAN else 1.0) for lr, of in losses.items() for i, loss in enumerate(of)]
    other = [("b", lr, i, 1 / lr, 1.0) for lr in (0.1, 0.3, 1.0) for i in range(2)]
    results = pandas.DataFrame(rows + other, columns=["arm", "lr", "seed", "val_loss", "train_loss"])
    found = Grid({"arm": "arm"}).best(results)
    assert [(row.arm, row.lr, row.seed) for row in found.itertuples()] == [
        ("a", rate, 0), ("a", rate, 1), ("b", 1.0, 0), ("b", 1.0, 1),
    ]  # fmt: skip


def test_more_seeds_at_the_chosen_rate_do_not_change_the_choice():
    losses = {0.1: [1.0, 1.0, 9.0, 9.0], 0.3: [2.0, 2.0]}
    rows = [("a", lr, i, loss, 1.0) for lr, of in losses.items() for i, loss in enumerate(of)]
    results = pandas.DataFrame(rows, columns=["arm", "lr", "seed", "val_loss", "train_loss"])
    assert set(Grid({"arm": "arm"}).best(results).lr) == {0.3}
    found = Grid({"arm": "arm"}, choosing=2).best(results)
    assert [(row.lr, row.seed) for row in found.itertuples()] == [(0.1, seed) for seed in range(4)]


def test_arguments_of_the_model_are_added_to_the_ones_of_the_study():
    """The last width counts; options without a model of the study are checked without them."""
    given = {"model_args": ["width=16", "dropout=0.1"]}
    text = recipe_of(
        training=given, model="gpt2", model_args=["width=32", "layernorm=every"], steps=3, data="python-docs"
    )
    assert text.model_args == ("width=32", "layernorm=every", "width=16", "dropout=0.1")
    model = new_model(text, classes=7, context=64)
    assert model.blocks[0].fc1.in_features == 16
    assert model.blocks[0].dropout.p == 0.1
    timm = {"training": {"model_args": ["drop_path_rate=0.1"]}, "data": "photos", "epochs": 1}
    assert recipe_of(**timm).model_args == ()
    assert recipe_of(model="timm:resnet18", **timm).model_args == ("drop_path_rate=0.1",)
    with pytest.raises(ValueError, match="--model-args is for models of timm"):
        recipe_of(model="resnet", **timm)
