"""Random numbers that depend on the place of their use, not on earlier draws."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# one for each use, so that no two draw the same numbers from the same seed
ORDER, IMAGE, SYNTHETIC, MIXING, DROPOUT, SHIFT = range(6)


def sequence(use: int, seed: int, *where: int) -> np.random.SeedSequence:
    """The seeds for one use, at one place such as (epoch, index); all of them at least 0."""
    # not one tuple of entropy, in which (1,) and (1, 0) would be equal
    return np.random.SeedSequence(seed, spawn_key=(use, *where))


def seed_globals(source: np.random.SeedSequence) -> None:
    """Seed Python's, numpy's and torch's global generators, which timm and torchvision draw from.

    Unlike `torch.manual_seed`, this does not change the generators of a GPU.
    """
    words = source.generate_state(8)  # uint32
    random.seed(words[:4].tobytes())
    np.random.seed(words[:4])
    torch.default_generator.manual_seed(int(words[4]) << 32 | int(words[5]))


@contextmanager
def globals_restored() -> Iterator[None]:
    """Restore the three global generators on exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
