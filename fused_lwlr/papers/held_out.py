"""The held-out part of the data, on which learning rates are chosen."""

from collections.abc import Sequence
from dataclasses import replace

from fused_lwlr.data import Splits, Stream, Text
from fused_lwlr.data.sampler import MicroBatch, permutation
from fused_lwlr.data.sources import Loaded, Split

ONE_IN = 5
MOST = 5000
"""One image in `ONE_IN` is held out, but at most `MOST`."""


class Selected(Split):
    """Some examples of a split, by their index."""

    def __init__(self, images: Split, indices: Sequence[int]) -> None:
        self.images, self.indices, self.statistics = images, indices, images.statistics

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, wanted: MicroBatch) -> Loaded:
        indices = tuple(self.indices[i] if i >= 0 else -1 for i in wanted.indices)  # -1 is padding
        return self.images[wanted._replace(indices=indices)]


def hold_out(data: Splits | Text) -> tuple[Splits | Text, Split]:
    """Returns the data without the part on which learning rates are chosen, and this part.

    For images it is a random fifth of the training images, at most 5,000, the same for every seed of a training, and
    without augmentation. For text it is the first half of the validation text, or of the validation pairs.

    Raises:
        ValueError: there are fewer than two sequences or pairs for validation, or the data come from a loader with its
            own order.
    """
    if isinstance(data, Text):
        count = len(data.val)
        if count < 2:
            raise ValueError(f"{data.name} has {count} {data.example} for validation, but two are needed")
        first, second = range(count // 2), range(count // 2, count)
        return replace(data, val=Selected(data.val, second)), Selected(data.val, first)
    if isinstance(data.train, Stream):
        raise ValueError(f"a part of {data.name} cannot be held out by index, to choose learning rates by")
    order = tuple(permutation(len(data.train), 0, 0).tolist())
    count = min(len(order) // ONE_IN, MOST)
    plain = data.plain or data.train
    return replace(data, train=Selected(data.train, order[count:])), Selected(plain, order[:count])
