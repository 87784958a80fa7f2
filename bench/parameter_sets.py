"""Shapes of the parameters of real networks, and of two extremes.

    python -m bench.parameter_sets

writes shapes.json, of networks of timm on the meta device; nothing else needs timm.
"""

import json
import math
from collections.abc import Callable
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

Shapes = list[tuple[int, ...]]

FILE = Path(__file__).with_name("shapes.json")
NETWORKS = {
    "ResNet-50": "resnet50",
    "ViT-S/16": "vit_small_patch16_224",
    "ConvNeXt-T": "convnext_tiny",
    "Swin-T": "swin_tiny_patch4_window7_224",
    "ViT-L/16": "vit_large_patch16_224",
}
"""Name -> timm's name."""


def decoder(layers: int = 24, width: int = 2048, vocabulary: int = 50257, context: int = 2048) -> Shapes:
    """A decoder like GPT-3 XL (Language Models are Few-Shot Learners, Table 2.1), with input and output tied."""
    block: Shapes = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def tiny(count: int) -> Shapes:
    """Tensors of 64 elements, as in a model of many small layers."""
    return [(8, 8)] * count


FORMULAS: dict[str, Callable[[], Shapes]] = {
    "decoder 1.3B": decoder,
    "2,000 tiny": lambda: tiny(2000),
    "one of 2^28": lambda: [(1 << 14, 1 << 14)],
}
SETS = (*NETWORKS, *FORMULAS)


@cache
def _stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(FILE.read_text())
    return stored


def shapes_of(name: str) -> Shapes:
    """The shapes of a set, in the order of `parameters()`.

    Raises:
        ValueError: no such set.
    """
    if name in FORMULAS:
        return FORMULAS[name]()
    if name not in NETWORKS:
        raise ValueError(f"no parameter set {name!r}: choose from {', '.join(SETS)}")
    return [tuple(shape) for count, shape in _stored()[name] for _ in range(count)]


def numel(shapes: Shapes) -> int:
    """Elements of all of them."""
    return sum(map(math.prod, shapes))


def main() -> None:
    """Write the shapes of timm's networks, equal neighbours counted once."""
    import timm
    import torch

    found = {}
    for name, network in NETWORKS.items():
        with torch.device("meta"):
            shapes = [list(p.shape) for p in timm.create_model(network).parameters()]
        found[name] = [[len(list(run)), shape] for shape, run in groupby(shapes)]
    rows = ",\n".join(f'  "{name}": {json.dumps(runs)}' for name, runs in found.items())
    FILE.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
