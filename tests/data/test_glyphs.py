"""Letters and digits in fonts: the same each time, of fonts that have them, and split by font."""

import pytest
import torch
from matplotlib.ft2font import FT2Font

from fused_lwlr.data import glyphs, open_data
from fused_lwlr.data.glyphs import CHARACTERS, COPIES, drawn, fonts


@pytest.mark.long
def test_every_fifth_font_is_for_testing():
    every = fonts()
    found = open_data("glyphs", image_size=16, augmentation="none")
    held = len(every) // 5
    assert held >= 1
    assert len(found.val) == held * 34 * COPIES
    assert len(found.train) == (len(every) - held) * 34 * COPIES
    assert found.classes == tuple(CHARACTERS)
    assert (found.channels, found.image_size, len(set(CHARACTERS))) == (1, 16, 34)
    counts = found.train.targets.bincount(minlength=34)
    assert counts.tolist() == [(len(every) - held) * COPIES] * 34


def test_fonts_have_the_characters_and_come_once():
    names = [(font.family_name, font.style_name) for font in map(FT2Font, map(str, fonts()))]
    assert len(set(names)) == len(names)
    assert ("DejaVu Sans", "Book") in names
    assert not [name for name, _ in names if name.startswith(("cmsy", "Last Resort")) or "SizeOneSym" in name]


@pytest.mark.long
def test_images_are_the_same_each_time_and_differ_from_each_other(monkeypatch):
    first = drawn(16)[0][0]
    monkeypatch.setattr(glyphs, "fonts", lambda: fonts()[:10])
    again = drawn.__wrapped__(16)[0][0]
    # every fifth font is for validation
    assert len(again) == 8 * 34 * COPIES
    torch.testing.assert_close(again, first[: len(again)], rtol=0, atol=0)
    assert len(first.flatten(1).unique(dim=0)) == len(first)
    # characters are inside: the border is mostly black, and each image has some white
    assert first.flatten(1).amax(1).min() > 100
    border = torch.cat([first[..., 0, :], first[..., -1, :], first[..., 0], first[..., -1]], dim=-1)
    assert border.float().mean() < 10
    assert drawn.__wrapped__(24)[0][0].shape[-2:] == (24, 24)


@pytest.mark.long
def test_a_character_is_nearest_to_itself_in_other_fonts():
    """By the mean image of each class in the fonts for training."""
    (pixels, classes), (tests, expected) = drawn(16)
    flat = pixels.flatten(1).double()
    means = torch.stack([flat[classes == k].mean(0) for k in range(34)])
    found = torch.cdist(tests.flatten(1).double(), means).argmin(1)
    assert (found == expected).double().mean() > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 4}, "image_size=4 is out of the range of glyphs: give 8 to 1024"),
        ({"image_size": 16, "augmentation": "basic"}, "augmentation='basic' is for photographs: the glyphs take"),
        ({"image_size": 16, "test_size": 20}, "test_size=20 is for photographs"),
    ],
)
def test_refused(options, message, monkeypatch):
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(glyphs, "drawn", lambda side: (images, images))
    with pytest.raises(ValueError, match=message):
        open_data("glyphs", **{"augmentation": "none", **options})


def test_too_few_fonts(monkeypatch):
    monkeypatch.setattr(glyphs, "fonts", lambda: [])
    with pytest.raises(ValueError, match=r"data=glyphs needs 5 fonts with letters and digits, but .* have 0"):
        drawn.__wrapped__(16)
