"""Small data sets in the IDX format, written byte by byte."""

import gzip

import numpy as np

SIDE, CLASSES = 16, 3
CODES = {"u1": 8, ">i4": 12, ">f4": 13}
NAMES = {("train", "images"): "train-images-idx3-ubyte", ("train", "labels"): "train-labels-idx1-ubyte"}
NAMES |= {("test", "images"): "t10k-images-idx3-ubyte", ("test", "labels"): "t10k-labels-idx1-ubyte"}


def written(array, dtype="u1"):
    """An array in the format, byte by byte as its description has it."""
    head = bytes([0, 0, CODES[dtype], array.ndim])
    return head + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.astype(dtype).tobytes()


def arrays(train=60, test=12):
    """Images of random pixels, and their labels."""
    draw = np.random.default_rng(0)
    sizes = {"train": train, "test": test}
    found = {(part, "images"): draw.integers(0, 256, (n, SIDE, SIDE), np.uint8) for part, n in sizes.items()}
    return found | {(part, "labels"): np.arange(n) % CLASSES for part, n in sizes.items()}


def save(folder, content, *, compressed=False, dtypes=None):
    """The four files."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, array in content.items():
        data = written(array, (dtypes or {}).get(key, "u1"))
        path = folder / (NAMES[key] + ".gz" * compressed)
        path.write_bytes(gzip.compress(data) if compressed else data)
    return content
