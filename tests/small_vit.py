"""A small ViT of timm."""

import importlib
from copy import deepcopy


def load(timm):
    """Imports the parts of timm that tests of optimizers use."""
    for name in ("optim", "scheduler", "models.vision_transformer"):
        importlib.import_module(f"timm.{name}")


def vit_twins(timm, device, *, depth):
    """Returns a small ViT and its copy."""
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 4, "depth": depth, "num_heads": 2, "mlp_ratio": 1}
    model = timm.models.vision_transformer.VisionTransformer(**sizes, num_classes=3).to(device)
    return model, deepcopy(model)
