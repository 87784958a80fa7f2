"""A model by its name: the small ones, deep ones, those of text, and all of timm."""

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from fused_lwlr.extras import import_timm
from fused_lwlr.models.deep import deepnet
from fused_lwlr.models.densenet import densenet
from fused_lwlr.models.gpt import ARGUMENTS, GPT, NAME
from fused_lwlr.models.small import NoShort, ResNet, Short, ViT
from fused_lwlr.models.vgg import vgg

MODELS: dict[str, Callable[..., nn.Module]] = {"resnet": ResNet, "vit": ViT, "noshort": NoShort, "short": Short}
FAMILIES = (deepnet, vgg, densenet)
"""Functions of a name and sizes, which return None where the name is none of theirs."""


def build(
    name: str, *, classes: int, image_size: int = 0, channels: int = 0, context: int | None = None, **arguments: Any
) -> nn.Module:
    """A new model: one of `MODELS`, one that `FAMILIES` know, "timm:NAME" for a model of timm; for text gptN, postlnN.

    Args:
        classes: of images, or different tokens.
        image_size, channels: of images.
        context: tokens of a sequence; None for a model of images.
        arguments: for a model of timm, such as drop_path_rate=0.1, or of text, such as width=128 (see `GPT`).

    Raises:
        ValueError: there is no such model, or it cannot take images of this size or these arguments.
        ImportError: a model of timm is asked for and timm cannot be imported.
    """
    if context is not None:
        return _of_text(name, context, classes, arguments)
    if NAME.fullmatch(name):
        raise ValueError(f"model={name} is for text: give data=python-docs or data=text:FILE, or another model")
    if name.startswith("timm:"):
        return _timm(name.removeprefix("timm:"), image_size, channels, classes, arguments)
    if name not in MODELS:
        for family in FAMILIES:
            found = family(name, image_size=image_size, channels=channels, classes=classes)
            if found is not None:
                return found
        raise ValueError(
            f"there is no model {name!r}: choose from {', '.join(MODELS)}, a deep one such as resnet56, vgg19-nobn or "
            "densenet100, or timm:NAME (such as timm:resnet50)"
        )
    return MODELS[name](image_size=image_size, channels=channels, classes=classes)


def _of_text(name: str, context: int, classes: int, arguments: dict[str, Any]) -> nn.Module:
    named = NAME.fullmatch(name)
    if named is None:
        raise ValueError(f"model={name} is not for text: give gptN or postlnN with N blocks, such as gpt6")
    for argument, value in arguments.items():
        kind = ARGUMENTS.get(argument)
        if kind is None:
            raise ValueError(f"{name} does not take {argument}: choose from {', '.join(ARGUMENTS)}")
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{name} takes {argument} as {kind.__name__}, and not {value!r}")
    return GPT(int(named[2]), named[1] == "postln", context=context, classes=classes, **arguments)


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
