"""Shapes of the parameters of real networks, and of two extremes; and parameters of these shapes.

    python -m bench.parameter_sets

writes shapes.json, of networks of timm on the meta device; nothing else needs timm.
"""

import json
import math
from itertools import groupby
from pathlib import Path

import torch
from torch import nn

Shapes = list[tuple[int, ...]]
Named = list[tuple[str, nn.Parameter]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

FILE = Path(__file__).with_name("shapes.json")
NETWORKS = {
    "ResNet-50": "resnet50",
    "ViT-S/16": "vit_small_patch16_224",
    "ConvNeXt-T": "convnext_tiny",
    "Swin-T": "swin_tiny_patch4_window7_224",
    "ViT-L/16": "vit_large_patch16_224",
}
"""Name -> timm's name."""


def decoder(layers: int = 24) -> Shapes:
    """A decoder like GPT-3 XL (Language Models are Few-Shot Learners, Table 2.1), with input and output tied."""
    width, vocabulary, context = 2048, 50257, 2048
    block: Shapes = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def tiny(count: int) -> Shapes:
    """Tensors of 64 elements, as in a model of many small layers."""
    return [(8, 8)] * count


FORMULAS: dict[str, Shapes] = {"decoder 1.3B": decoder(), "2,000 tiny": tiny(2000), "one of 2^28": [(1 << 14, 1 << 14)]}
SETS = (*NETWORKS, *FORMULAS)


def shapes_of(name: str) -> Shapes:
    """The shapes of a set, in the order of the network.

    Raises:
        ValueError: no such set.
    """
    if name not in SETS:
        raise ValueError(f"no parameter set {name!r}: choose from {', '.join(SETS)}")
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    return FORMULAS.get(name) or [tuple(shape) for count, shape in stored[name] for _ in range(count)]


def numel(shapes: Shapes) -> int:
    """Elements of all of them."""
    return sum(map(math.prod, shapes))


def parameters(shapes: Shapes, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Named:
    """Named parameters in [-1, 1] with gradients in [-scale, scale]."""
    named = []
    for i, shape in enumerate(shapes):
        param = nn.Parameter(torch.rand(shape, dtype=dtype, device=device) * 2 - 1)
        param.grad = (torch.rand(shape, dtype=dtype, device=device) * 2 - 1) * scale
        named.append((f"layer{i}.weight", param))
    return named


def main() -> None:
    """Write the shapes of timm's networks, equal neighbours counted once."""
    import timm

    rows = []
    for name, network in NETWORKS.items():
        with torch.device("meta"):
            shapes = [list(p.shape) for p in timm.create_model(network).parameters()]
        rows.append(f'  "{name}": {json.dumps([[len(list(run)), shape] for shape, run in groupby(shapes)])}')
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
