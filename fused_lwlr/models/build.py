"""Models by name: small ones, deep ones, models of text, and all models of timm."""

import difflib
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from torch import nn

from fused_lwlr.integrations.extras import import_timm
from fused_lwlr.models.blocks import Arguments
from fused_lwlr.models.deep import NAME, VGG19, DeepNet, DenseNet, ToyNet
from fused_lwlr.models.gpt import GPT, Seq2Seq
from fused_lwlr.models.hub import language_model
from fused_lwlr.models.small import DavidNet, NoShort, ResNet, Short, ViT

HUB = "hf:"
TEXT = re.compile(r"(gpt|postln|seq2seq)([1-9]\d*)")
LARGEST = 9999
"""The largest depth or width in a name."""
MODELS: tuple[tuple[str, Callable[..., nn.Module]], ...] = (
    ("resnet", lambda m, **sizes: ResNet(**sizes)),
    ("vit", lambda m, **sizes: ViT(**sizes)),
    ("noshort", lambda m, **sizes: NoShort(**sizes)),
    ("short", lambda m, **sizes: Short(**sizes)),
    (r"vit(\d+)x(\d+)(?:p(\d+))?", lambda m, **sizes: ViT(int(m[1]), int(m[2]), patch=m[3] and int(m[3]), **sizes)),
    (r"davidnet(\d+)?", lambda m, **sizes: DavidNet(int(m[1] or 64), **sizes)),
    (r"toynet([1-9]\d*)x([1-9]\d*)", lambda m, image_size, **sizes: ToyNet(depth=int(m[1]), width=int(m[2]), **sizes)),
    (NAME.pattern, lambda m, **sizes: DeepNet(int(m[2]), int(m[3] or 16), m[1] == "resnet", m[4] or "", **sizes)),
    (r"vgg19(?:x(\d+))?(-nobn)?", lambda m, **sizes: VGG19(int(m[1] or 64), m[2] or "", **sizes)),
    (
        r"densenet(\d+)(?:x(\d+))?(-nobn)?",
        lambda m, **sizes: DenseNet(int(m[1]), int(m[2] or 12), m[3] or "", **sizes),
    ),
)
"""Patterns of names, each with a function of the match and of sizes: resnet56, noshort32x8-nobn, vgg19x16, ..."""


def build(
    name: str, *, classes: int, image_size: int = 0, channels: int = 0, context: int | None = None,
    pairs: bool = False, **arguments: Any,
) -> nn.Module:  # fmt: skip
    """A new model: a name that a pattern of `MODELS` matches, or "timm:NAME" for a model of timm.

    For text it is gptN, postlnN, or "hf:NAME" for a model of transformers (see `language_model`); for pairs seq2seqN.

    Args:
        context: tokens of a sequence; None for a model of images.
        pairs: sequences are pairs of a source and a target.
        arguments: for a model of timm, such as drop_path_rate=0.1, or of text, such as width=128 (see `GPT`).

    Raises:
        ValueError: the model does not exist, or does not accept images of this size or these arguments.
        ImportError: the model needs timm or transformers, which cannot be imported.
    """
    numbers = [] if name.startswith(("timm:", HUB)) else map(int, re.findall(r"\d+", name))
    if any(number > LARGEST for number in numbers):
        raise ValueError(f"model={name} is too large: numbers in a name must be at most {LARGEST:,}")
    if context is not None:
        return _of_text(name, context, classes, pairs, arguments)
    named = TEXT.fullmatch(name)
    if named is not None or name.startswith(HUB):
        of_pairs = named is not None and named[1] == "seq2seq"
        kind = "pairs: give data=pairs:FILE" if of_pairs else "text: give data=python-docs or data=text:FILE"
        raise ValueError(f"model={name} is for {kind}, or another model")
    if name.startswith("timm:"):
        check_name(name)
        return _timm(name.removeprefix("timm:"), image_size, channels, classes, arguments)
    match, make = _matched(name)
    return make(match, image_size=image_size, channels=channels, classes=classes)


def check_name(name: str) -> None:
    """Raise ValueError if there is no model of images with this name."""
    if name.startswith("timm:"):
        timm, of_timm = import_timm(name), name.removeprefix("timm:")
        if not timm.is_model(of_timm):
            close = difflib.get_close_matches(of_timm, timm.list_models(), n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ValueError(f"timm has no model {of_timm!r}{hint}")
    else:
        _matched(name)


def _matched(name: str) -> tuple[re.Match[str], Callable[..., nn.Module]]:
    """The match of a name with its pattern in `MODELS`, and the function of the pattern."""
    for pattern, make in MODELS:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match, make
    raise ValueError(
        f"there is no model {name!r}: choose from resnet, vit, noshort, short, vit6x64, davidnet, a deep one such "
        "as resnet56, vgg19-nobn or densenet100, or timm:NAME (such as timm:resnet50)"
    )


def _of_text(name: str, context: int, classes: int, pairs: bool, arguments: dict[str, Any]) -> nn.Module:
    named = TEXT.fullmatch(name)
    if named is None or (named[1] == "seq2seq") != pairs:
        if name.startswith(HUB) and not pairs:
            return language_model(name.removeprefix(HUB), context=context, classes=classes, arguments=arguments)
        wanted, fit = ("pairs", "seq2seqN with N blocks a side") if pairs else ("text", "gptN or postlnN with N blocks")
        raise ValueError(f"model={name} is not for {wanted}: give {fit}, such as {'seq2seq3' if pairs else 'gpt6'}")
    kinds = get_type_hints(Arguments)
    for argument, value in arguments.items():
        if argument not in kinds:
            raise ValueError(f"{name} does not take {argument}: choose from {', '.join(kinds)}")
        kind = kinds[argument]
        # a bool is an int, and an int serves as a float
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{name} takes {argument} as {getattr(kind, '__name__', kind)}, and not {value!r}")
    if pairs:
        return Seq2Seq(int(named[2]), context=context, classes=classes, **arguments)
    return GPT(int(named[2]), named[1] == "postln", context=context, classes=classes, **arguments)


def _timm(name: str, image_size: int, channels: int, classes: int, arguments: dict[str, Any]) -> nn.Module:
    timm = import_timm(f"timm:{name}")
    config = timm.get_pretrained_cfg(name)
    fixed = {"img_size": image_size} if config is not None and config.fixed_input_size else {}
    try:
        model: nn.Module = timm.create_model(name, num_classes=classes, in_chans=channels, **{**fixed, **arguments})
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        if not arguments:
            raise
        raise ValueError(f"timm:{name} does not take {', '.join(arguments)}: {error!r:.300}") from error
    except (OSError, RuntimeError) as error:
        if not arguments.get("pretrained"):
            raise
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(
            f"the pretrained weights of timm:{name} cannot be loaded: leave --pretrained out, or give --weights FILE "
            f"({reason})"
        ) from error
    return model
