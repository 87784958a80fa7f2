"""The options of `fused-lwlr train` that choose the model and the data."""

from functools import partial
from typing import Literal

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from fused_lwlr.training.fields import (
    Augmentation,
    Channels,
    Count,
    Part,
    Share,
    Side,
    option,
)

CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)

_model, _data = partial(option, "Model"), partial(option, "Data")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Inputs:
    """The first fields of a `Recipe`."""

    model: str = _model(
        "resnet",
        "resnet, vit, vit6x64, resnet56, noshort110-nobn, vgg19, densenet100, ... (small ones of our own), or "
        "timm:NAME; of text gptN or postlnN, with N blocks, or hf:NAME, of transformers and untrained; of pairs "
        "seq2seqN.",
        metavar="NAME",
    )
    model_args: tuple[str, ...] = _model(
        (),
        "NAME=VALUE for a model of timm, such as drop_path_rate=0.1, or of text, such as width=128; may be repeated.",
        metavar="NAME=VALUE",
    )
    pretrained: bool = _model(False, "Start from the pretrained weights of timm, as they are.")
    weights: str | None = _model(
        None, "Start from the weights in this file, such as model.pt of a run with the same model.", metavar="FILE"
    )
    init: Literal["lwlr", "gradinit", "model"] = _model(
        "lwlr",
        "Weights to start from: the LWLR paper's, those scaled by GradInit, or what the model comes with.",
        shown="lwlr; model with pretrained weights, with --weights, and with --rates single for a model of timm",
    )
    gradinit_steps: Count = _model(390, "Steps of GradInit (--init gradinit).")
    gradinit_gamma: PositiveFloat | None = _model(
        None,
        "Bound of the gradient norm in GradInit, relative to the norm at first; 0.8 suits post-LN Transformers.",
        shown="the paper's rule, which depends on --lr alone",
    )
    gradinit_tau: PositiveFloat = _model(0.01, "Learning rate of the scales in GradInit.")
    channels_last: bool = _model(False, "Keep images and weights of convolutions with channels last.")
    compile: bool = _model(False, "Compile the model with torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = _model(
        "default",
        "With --compile: default, max-autotune, max-autotune-no-cudagraphs, or reduce-overhead, which needs a GPU.",
        metavar="MODE",
    )
    grad_checkpointing: bool = _model(
        False, "Compute the activations within each block again in the backward pass, which saves their memory."
    )
    sync_bn: bool = _model(False, "With several GPUs: batch normalization over the images of all of them.")

    data: str = _data(
        "digits",
        "Folder with train/ and val/ and a folder for each class in them, digits (of scikit-learn), glyphs (of the "
        "fonts of matplotlib and the system), fashion-mnist (of "
        "Debian's package dataset-fashion-mnist, or of torchvision), idx:FOLDER, of files in the IDX format, or tar "
        "files of WebDataset, 'train-{000..146}.tar'. Text is python-docs (of the Python that runs), text:PATH, of a "
        "file or a folder of *.txt, hf:NAME of the Hugging Face hub, or pairs:FILE, with SOURCE, tab, TARGET in each "
        "line.",
        metavar="NAME|FOLDER|idx:FOLDER|FILES|text:PATH|hf:NAME|pairs:FILE",
    )
    context: Count = _data(64, "Tokens of a sequence of text; of pairs the most that a sentence has, with its end.")
    vocabulary: Literal["bytes", "characters"] = _data("bytes", "Tokens of text.")
    tokenizer: str | None = _data(
        None, "Tokenizer of text, in place of --vocabulary: tokenizer.json, or a name of the hub.", metavar="FILE|NAME"
    )
    val_data: str | None = _data(
        None,
        "With tar files or pairs: those to test on. Without, every fifth image of a class, or the last 8 % of pairs.",
        metavar="FILES",
    )
    loader: str | None = _data(
        None,
        "Function that opens the data with another loader (DALI, FFCV, ...), in place of open_data.",
        metavar="MODULE:FUNCTION",
    )
    image_size: Side | None = _data(
        None, "Side of images in pixels.", shown="224 for timm, 8 for digits, of IDX files their own, else 64"
    )
    test_size: Side | None = _data(None, "Side of validation images in pixels.", shown="--image-size")
    augmentation: Augmentation = _data(
        "none",
        "basic: random crops and flips (of IDX files: shifts and flips); strong: RandAugment as well; three: the "
        "three-augment of DeiT III as well; or a policy of timm, such as rand-m7-mstd0.5.",
        shown="none; basic with fashion-mnist",
        metavar="none|basic|strong|three|rand-...",
    )
    crop_scale: Share = _data(0.08, "Smallest part of an image that a random crop keeps.")
    color_jitter: NonNegativeFloat = _data(0.0, "Strength of random brightness, contrast and saturation.")
    interpolation: Literal["bicubic", "bilinear", "random"] = _data(
        "bicubic", "How images are resized; random draws one for each training image, and tests with bilinear."
    )
    random_erasing: Part = _data(0.0, "Part of the training images in which a rectangle is erased.")
    repeats: Count = _data(
        1,
        "Repeated augmentation: so many differently augmented copies of an image in a batch; epochs stay as long.",
    )
    mixup: NonNegativeFloat = _data(0.0, "Strength of Mixup, α of its beta distribution; 0 for none.")
    cutmix: NonNegativeFloat = _data(0.0, "Strength of CutMix; 0 for none.")
    crop_pct: Share = _data(0.875, "Part of a side that the crop of validation keeps.")
    mean: Channels = _data((0.485, 0.456, 0.406), "Mean of the channels, which is taken out.", metavar="R,G,B")
    std: Channels = _data(
        (0.229, 0.224, 0.225), "Standard deviation of the channels, which is divided by.", metavar="R,G,B"
    )
    corrupt: Literal["refuse", "skip"] = _data(
        "refuse", "An image that cannot be read: refuse to go on, or skip and count it."
    )
    workers: NonNegativeInt | None = _data(
        None,
        "Processes that load data, for each process that trains.",
        shown="the cores of the machine by the processes that train on it, at most 8; none for data in memory and text",
    )
    prefetch: Count = _data(2, "Passes that each of them loads ahead; --dry-run shows the memory that this takes.")
