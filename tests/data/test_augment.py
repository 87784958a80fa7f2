"""Transforms of training and validation images, compared with timm's transforms and a literal transcription."""

import math
import random
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from fused_lwlr.data import MicroBatch, open_data
from fused_lwlr.data.augment import training_transform, validation_transform
from fused_lwlr.data.decode import RGB_MEAN, RGB_STD, normalized
from fused_lwlr.data.randomness import globals_restored, seed_globals, sequence
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.setup import load_data


def photo(width, height):
    return Image.fromarray(load_sample_image("flower.jpg")).crop((0, 0, width, height))


def drawn(transform, image, *where):
    with globals_restored():
        seed_globals(sequence(*where))
        return transform(image)


def transform_of(augmentation, size, erasing=0.0):
    options = {"crop_scale": 0.08, "color_jitter": 0.0, "interpolation": "bicubic", "mean": RGB_MEAN, "std": RGB_STD}
    return training_transform(augmentation, size, erasing, **options)


@pytest.mark.parametrize("crop_pct", [0.875, 0.95, 1.0])
@pytest.mark.parametrize("size", [(100, 80), (77, 131), (64, 64), (20, 300), (9, 10)])
def test_validation_is_timms_to_the_bit(size, crop_pct, timm):
    image = photo(*size)
    theirs = timm.data.create_transform(32, is_training=False, crop_pct=crop_pct, interpolation="bicubic")(image)
    assert torch.equal(normalized(validation_transform(32, crop_pct, "bicubic")(image), RGB_MEAN, RGB_STD), theirs)


def inception_crop(image, size):
    """A crop of 8 to 100 % of the area and of an aspect ratio of 3/4 to 4/3, resized; flipped half of the time."""
    for _ in range(10):
        area = random.uniform(0.08, 1) * image.width * image.height
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if width <= image.width and height <= image.height:
            top = random.randint(0, image.height - height)
            left = random.randint(0, image.width - width)
            break
    else:
        raise AssertionError("a crop that fits is found at once, for an image that is nearly square")
    image = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BICUBIC)
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return ((torch.tensor(np.array(image)) / 255 - RGB_MEAN) / RGB_STD).permute(2, 0, 1)


@pytest.mark.parametrize("where", [(1, 0, 0, 0), (1, 5, 2, 7), (1, 5, 3, 7), (1, 2**40, 0, 1_281_166)])
def test_basic_is_inceptions_crop_and_a_flip(where, timm):
    image = photo(90, 80)
    ours = normalized(drawn(transform_of("basic", 24), image, *where), RGB_MEAN, RGB_STD)
    assert torch.equal(ours, drawn(lambda image: inception_crop(image, 24), image, *where))


def test_strong_adds_randaugment_of_two_layers_and_magnitude_ten(timm):
    basic, strong = (transform_of(name, 24).transforms for name in ("basic", "strong"))
    added = [step for step in strong if type(step) not in map(type, basic)]
    assert [type(step) for step in strong if step not in added] == [type(step) for step in basic]
    (augment,) = added
    assert isinstance(augment, timm.data.auto_augment.RandAugment)
    assert augment.num_layers == 2
    assert {(op.magnitude, op.magnitude_std, op.prob) for op in augment.ops} == {(10, 0, 0.5)}
    assert {"Rotate", "Equalize", "Solarize", "ShearX"} < {op.name for op in augment.ops}


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_random_erasing_is_timms_in_8_bits(probability, timm):
    """The same rectangles with the same noise, up to rounding and clamping to the range of pixels."""
    image = photo(90, 80)
    theirs = timm.data.create_transform(
        32, is_training=True, color_jitter=None, auto_augment=None, interpolation="bicubic", re_prob=probability,
        re_mode="pixel",
    )  # fmt: skip
    mean, std = RGB_MEAN[:, None, None], RGB_STD[:, None, None]
    erased = 0
    for index in range(8):
        ours = drawn(transform_of("basic", 32, probability), image, 1, 0, 0, index)
        wanted = drawn(theirs, image, 1, 0, 0, index) * std + mean
        assert (ours / 255 - wanted.clamp(0, 1)).abs().max() <= 0.5001 / 255
        erased += bool((wanted < 0).any())
    assert erased == 8 if probability == 1 else 0 < erased < 8


def test_a_policy_that_timm_does_not_know_is_refused(timm):
    with pytest.raises(ValueError, match=r"^augmentation='rand-q7' is not a policy of timm .*: give one such"):
        transform_of("rand-q7", 8)


def test_augmentation_needs_timm_and_the_rest_does_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    options = {"image_size": 8, "synthetic": (9, 9, 2)}
    assert len(open_data("synthetic", augmentation="none", **options).train) == 9
    with pytest.raises(
        ImportError,
        match=r"^augmentation='strong' needs timm .*pip install '\.\[timm\]'",
    ):
        open_data("synthetic", augmentation="strong", **options)


def test_pillow_is_missed_at_once_and_not_in_a_worker(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError) as info:
        open_data("synthetic", augmentation="none", image_size=8)
    assert info.value.name == "PIL"  # the command line uses this name to tell the package to install


@pytest.mark.parametrize("other", [(0, 4, 1), (1, 3, 1), (1, 4, 2), (1, 4), (1, 4, 1, 0)])
def test_no_two_places_draw_the_same(other):
    draws = [tuple(sequence(use, *where).generate_state(4)) for use in range(4) for where in ((1, 4, 1), other)]
    assert len(set(draws)) == 8


@pytest.mark.parametrize("scale", [0.08, 0.5])
def test_a_crop_has_the_part_of_the_area_that_a_recipe_asks_for(scale, tmp_path, timm):
    """Red is the column and green the row of a pixel: their ranges over a crop tell its sides."""
    side = 120
    row, column = np.mgrid[:side, :side].astype(np.uint8)
    for split in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / split).mkdir(parents=True)
        Image.fromarray(np.stack([column, row, row], axis=-1)).save(tmp_path / split / "0.png")
    recipe = Recipe(data=str(tmp_path), augmentation="basic", crop_scale=scale, image_size=side, device="cpu")
    train = load_data(recipe).train
    parts = []
    for step in range(60):
        pixels = train[MicroBatch(0, step, 0, 0, (0,))].inputs[0].double()
        columns, rows = (channel.max() - channel.min() for channel in pixels[:2])
        parts.append(float(columns * rows) / (side - 1) ** 2)
    assert scale - 0.02 < min(parts) < scale + 0.15
    assert max(parts) > 0.8
