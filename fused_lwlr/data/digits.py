"""scikit-learn's handwritten digits, which need no download."""

import functools

import torch

from fused_lwlr.data.sources import Tensors


@functools.lru_cache(maxsize=1)
def digits(image_size: int = 8) -> tuple[Tensors, Tensors]:
    """1797 real scans of 8 x 8 pixels, without mean and deviation; a fifth of them, the second, for validation."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, targets = load_digits(return_X_y=True)
    split = train_test_split(images, targets, test_size=0.2, stratify=targets, random_state=0)
    train, val = (torch.from_numpy(part).float().reshape(-1, 1, 8, 8) for part in split[:2])
    std, mean = torch.std_mean(train)
    sets = []
    for part, labels in zip((train, val), split[2:], strict=True):
        part = (part - mean) / std
        if image_size != 8:
            part = torch.nn.functional.interpolate(part, size=(image_size, image_size), mode="bilinear")
        sets.append(Tensors(part, torch.from_numpy(labels).long()))
    return sets[0], sets[1]
