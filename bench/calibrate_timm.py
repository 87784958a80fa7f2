"""Calibrate models of timm and draw their rates, as in the LWLR paper's Figures 4, 5, 11 and 12.

    python -m bench.calibrate_timm [--model NAME ...] [--out FOLDER]

The images are crops of the two photographs that scikit-learn ships, the labels random: a network that has not been
trained knows no labels. Writes a JSON file and a PNG for each model, in half a minute to two minutes on two cores.
"""

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.rows import command
from fused_lwlr import LayerRates, calibrate

MODELS = {
    "vit_small_patch16_224": "ViT-S/16",
    "resnet50": "ResNet-50",
    "convnext_tiny": "ConvNeXt-T",
    "swin_tiny_patch4_window7_224": "Swin-T",
}


def photographs(steps: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Minibatches of random 224 x 224 crops, pixels in [-1, 1], with labels from 0 to 999."""
    images = load_sample_images().images
    rng = np.random.default_rng(0)
    crops = []
    for _ in range(steps * batch_size):
        image = images[rng.integers(len(images))]
        top, left = rng.integers(image.shape[0] - 224), rng.integers(image.shape[1] - 224)
        crops.append(image[top : top + 224, left : left + 224])
    inputs = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    targets = torch.from_numpy(rng.integers(1000, size=len(crops)))
    return list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))


def rates_of(name: str, steps: int, batch_size: int, *, progress: bool = False) -> LayerRates:
    """Calibrated rates of a model of timm, initialized with seed 0."""
    import timm

    torch.manual_seed(0)
    return calibrate(timm.create_model(name), photographs(steps, batch_size), cross_entropy, progress=progress)


def main() -> None:
    """Calibrate models, by default all, on four minibatches of 32."""
    parser = command(__doc__, "--out")
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; all by default")
    options = parser.parse_args()
    for name in options.model or MODELS:
        title = MODELS[name]
        rates = rates_of(name, 4, 32, progress=True)
        rates.to_json(options.out / f"{name}.json")
        about = "calibrated on 4 minibatches of 32 crops of photographs, random labels"
        rates.plot(options.out / f"{name}.png", f"{title}: {about}")
        print(f"{title}: {rates!r}")


if __name__ == "__main__":
    main()
