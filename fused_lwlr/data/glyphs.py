"""Letters and digits in the fonts of matplotlib and of the system, drawn when they are asked for."""

import functools
from pathlib import Path

import numpy as np
import torch

from fused_lwlr.data.idx import Labeled, splits_of
from fused_lwlr.data.sources import Splits

GLYPHS = "glyphs"
CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"
"""Without I and O, which many fonts draw like 1 and 0."""
COPIES = 3
"""Images of each character in each font, which differ in angle, size and place."""
SYMBOLS = ("cmex", "cmmi", "cmsy")
"""Start of the names of matplotlib's fonts whose letters or digits are symbols."""
LARGEST = 1024
"""Side of the images in pixels; fonts have a largest size, and all images are in memory."""
FEWEST = 5
"""Fonts; every fifth one is for validation."""


def open_glyphs(image_size: int | None) -> Splits:
    """The data set "glyphs": 34 characters in every font, white on black; every fifth font is for validation.

    The same fonts and version of Pillow give the same bits. Other fonts change `Splits.fingerprint`.

    Args:
        image_size: the side of the images in pixels; None for 16.
    """
    side = 16 if image_size is None else image_size
    if not 8 <= side <= LARGEST:
        raise ValueError(f"image_size={side} is out of the range of {GLYPHS}: give 8 to {LARGEST}")
    return splits_of(GLYPHS, *drawn(side), tuple(CHARACTERS), side)


def fonts() -> list[Path]:
    """The files of all fonts that have the characters, each name and style once, in the order of their names.

    A font must draw each character in its own way: Unicode's Last Resort has one picture for all Latin letters.
    """
    from matplotlib import get_data_path
    from matplotlib.font_manager import findSystemFonts
    from matplotlib.ft2font import FT2Font

    by_name: dict[tuple[str, str], Path] = {}
    for path in [*Path(get_data_path(), "fonts", "ttf").glob("*.ttf"), *map(Path, findSystemFonts())]:
        try:
            font = FT2Font(str(path))
        except RuntimeError:  # not a font
            continue
        pictures = {font.get_char_index(ord(character)) for character in CHARACTERS}  # 0 for a missing one
        if 0 not in pictures and len(pictures) == len(CHARACTERS) and not font.family_name.startswith(SYMBOLS):
            # a copy of a font may be in several folders
            by_name.setdefault((font.family_name, font.style_name), path)
    return [by_name[name] for name in sorted(by_name)]


@functools.lru_cache(maxsize=1)
def drawn(side: int) -> tuple[Labeled, Labeled]:
    """Images for training and for validation."""
    every = fonts()
    if len(every) < FEWEST:
        raise ValueError(
            f"data={GLYPHS} needs {FEWEST} fonts with letters and digits, but matplotlib and the system have "
            f"{len(every)}: install fonts"
        )
    parts: list[tuple[list[np.ndarray], list[int]]] = [([], []), ([], [])]
    for number, path in enumerate(every):
        pixels, classes = parts[number % FEWEST == FEWEST - 1]
        for target, character in enumerate(CHARACTERS):
            rng = np.random.default_rng([number, target])
            for _ in range(COPIES):
                pixels.append(_draw(path, character, side, rng))
                classes.append(target)
    train, val = ((torch.from_numpy(np.stack(pixels))[:, None], torch.tensor(classes)) for pixels, classes in parts)
    return train, val


def _draw(path: Path, character: str, side: int, rng: np.random.Generator) -> np.ndarray:
    """One image of a character, turned by up to 10 degrees, at 60 to 80 % of the side, moved by up to a sixteenth."""
    from PIL import Image, ImageDraw, ImageFont

    size, angle, *move = rng.uniform([0.6, -10, -1, -1], [0.8, 10, 1, 1])
    canvas = 4 * side  # drawn larger, for smooth edges
    font = ImageFont.truetype(str(path), round(size * canvas * 1.2))
    image = Image.new("L", (canvas, canvas))
    left, top, right, bottom = font.getbbox(character)
    middle = (canvas - left - right) / 2, (canvas - top - bottom) / 2
    at = tuple(place + shift * canvas / 16 for place, shift in zip(middle, move, strict=True))
    ImageDraw.Draw(image).text(at, character, fill=255, font=font)
    turned = image.rotate(angle, Image.Resampling.BILINEAR).resize((side, side), Image.Resampling.BOX)
    return np.asarray(turned)
