"""A model by its name: the small ones, deep ones, and all of timm."""

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from fused_lwlr.extras import import_timm
from fused_lwlr.models.deep import deepnet
from fused_lwlr.models.small import NoShort, ResNet, Short, ViT

MODELS: dict[str, Callable[..., nn.Module]] = {"resnet": ResNet, "vit": ViT, "noshort": NoShort, "short": Short}


def build(name: str, *, image_size: int, channels: int, classes: int, **arguments: Any) -> nn.Module:
    """A new model: one of `MODELS`, one that `deepnet` names, or "timm:NAME" for a model of timm.

    Args:
        arguments: for a model of timm, such as drop_path_rate=0.1.

    Raises:
        ValueError: there is no such model, or it cannot take images of this size or these arguments.
        ImportError: a model of timm is asked for and timm cannot be imported.
    """
    if name.startswith("timm:"):
        return _timm(name.removeprefix("timm:"), image_size, channels, classes, arguments)
    if name not in MODELS:
        deep = deepnet(name, image_size=image_size, channels=channels, classes=classes)
        if deep is not None:
            return deep
        raise ValueError(
            f"there is no model {name!r}: choose from {', '.join(MODELS)} or timm:NAME (such as timm:resnet50)"
        )
    return MODELS[name](image_size=image_size, channels=channels, classes=classes)


def _timm(name: str, image_size: int, channels: int, classes: int, arguments: dict[str, Any]) -> nn.Module:
    timm = import_timm(f"timm:{name}")
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise ValueError(f"timm has no model {name!r}{hint}")
    config = timm.get_pretrained_cfg(name)
    fixed = {"img_size": image_size} if config is not None and config.fixed_input_size else {}
    try:
        model: nn.Module = timm.create_model(name, num_classes=classes, in_chans=channels, **{**fixed, **arguments})
    except TypeError as error:
        if not arguments:
            raise
        raise ValueError(f"timm:{name} does not take {', '.join(arguments)}: {error}") from error
    return model
