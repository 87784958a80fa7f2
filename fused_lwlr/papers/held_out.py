"""Training images, or text, that are held out to choose learning rates by."""

from dataclasses import replace

from fused_lwlr.data import Splits, Stream, Text
from fused_lwlr.data.sampler import MicroBatch, permutation
from fused_lwlr.data.sequences import Sequences
from fused_lwlr.data.sources import Loaded, Split

PART = 5
"""One image in so many is held out."""


class Selected(Split):
    """Some images of a split, by their index."""

    def __init__(self, images: Split, indices: tuple[int, ...]) -> None:
        self.images, self.indices, self.statistics = images, indices, images.statistics

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, wanted: MicroBatch) -> Loaded:
        indices = tuple(self.indices[i] if i >= 0 else -1 for i in wanted.indices)  # -1 is padding
        return self.images[wanted._replace(indices=indices)]


def hold_out(data: Splits | Text) -> tuple[Splits | Text, Split]:
    """The data with four fifths of the training images, and the other fifth; test images stay as they are.

    Of text, the data with the second half of what it is tested on, and the first half; the rest is trained on.

    The same fifth, drawn at random, for every seed of a training. It has the transform of training images.

    Raises:
        ValueError: images come from another loader, which has its own order; or text is too short, or of pairs.
    """
    if isinstance(data, Text) and isinstance(data.val, Sequences) and len(data.val) > 1:
        first, second = data.val.halves()
        return replace(data, val=second), first
    if isinstance(data, Text) or isinstance(data.train, Stream):
        raise ValueError(f"a part of {data.name} cannot be held out by index, to choose learning rates by")
    order = tuple(permutation(len(data.train), 0, 0).tolist())
    count = len(order) // PART
    return replace(data, train=Selected(data.train, order[count:])), Selected(data.train, order[:count])
