"""Every option of `fused-lwlr train` with its default, its bounds and its help."""

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from fused_lwlr.training.defaults import implied_defaults, is_pretrained
from fused_lwlr.training.recipe_rules import ONLY, OTHER_WORDS, check, flag, place, readable


def _split(value: Any) -> Any:
    """Splits text, such as numbers of the command line, at commas."""
    return value.split(",") if isinstance(value, str) else value


def _patterns(value: Any) -> Any:
    """Names and patterns; "none" stands for no pattern."""
    value = _split(value)
    return () if isinstance(value, (list, tuple)) and list(value) == ["none"] else value


def _known_augmentation(value: str) -> str:
    # timm ignores parts without a number
    if value not in ("none", "basic", "strong", "three") and not re.fullmatch(r"rand(-([a-z]+\d[\d.]*|t\w+))+", value):
        raise ValueError("must be none, basic, strong, three, or a policy of timm such as rand-m7-mstd0.5")
    return value


Count = Annotated[int, Field(ge=1, le=10**12)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Side = Annotated[int, Field(ge=4, le=10**6)]
Pair = Annotated[tuple[FractionBelowOne, FractionBelowOne], BeforeValidator(_split)]
Channels = Annotated[tuple[float, float, float], BeforeValidator(_split)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns)]
Scalings = Literal["none", "elr", "lars", "larc", "lamb", "ng", "hyperball", "floor", "brake", "clip", "balanced"]
Augmentation = Annotated[str, AfterValidator(_known_augmentation)]


def _option(group: str, default: Any, help: str, *, shown: str | None = None, metavar: str | None = None) -> Any:
    """A field.

    Args:
        shown: the default in words, if it depends on other fields.
        metavar: the placeholder of the value, if it does not follow from the type.
    """
    return Field(default, description=help, json_schema_extra={"group": group, "shown": shown, "metavar": metavar})


_model, _data, _loss, _optimizer, _schedule, _run = (
    partial(_option, group) for group in ("Model", "Data", "Loss", "Optimizer", "Schedule", "Run")
)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Recipe:
    """A complete training: the same recipe, machine and number of processes give the same bits.

    Raises:
        ValueError: a field is out of bounds, or excluded by another field.
    """

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
        None,
        "Side of images in pixels.",
        shown="224 for timm, 8 for digits, 16 for glyphs, the files' own size for IDX files, else 64",
    )
    test_size: Side | None = _data(None, "Side of validation images in pixels.", shown="--image-size")
    augmentation: Augmentation = _data(
        "none",
        "basic: random crops and flips (of IDX files: shifts and flips); strong: RandAugment as well; three: the "
        "three-augment of DeiT III as well; or a policy of timm, such as rand-m7-mstd0.5.",
        shown="none; basic with fashion-mnist",
        metavar="none|basic|strong|three|rand-...",
    )
    crop_scale: PositiveFraction = _data(0.08, "Smallest part of an image that a random crop keeps.")
    color_jitter: NonNegativeFloat = _data(0.0, "Strength of random brightness, contrast and saturation.")
    interpolation: Literal["bicubic", "bilinear", "random"] = _data(
        "bicubic", "How images are resized; random draws one for each training image, and tests with bilinear."
    )
    random_erasing: FractionBelowOne = _data(0.0, "Part of the training images in which a rectangle is erased.")
    repeats: Count = _data(
        1, "Repeated augmentation: copies of an image in a batch, each augmented differently. Epochs stay as long."
    )
    mixup: NonNegativeFloat = _data(0.0, "Strength of Mixup, α of its beta distribution; 0 for none.")
    cutmix: NonNegativeFloat = _data(0.0, "Strength of CutMix; 0 for none.")
    crop_pct: PositiveFraction = _data(0.875, "Part of a side that the validation crop keeps.")
    mean: Channels = _data((0.485, 0.456, 0.406), "Mean of each channel, of pixels from 0 to 1.", metavar="R,G,B")
    std: Channels = _data((0.229, 0.224, 0.225), "Standard deviation of each channel, to divide by.", metavar="R,G,B")
    corrupt: Literal["refuse", "skip"] = _data(
        "refuse", "An image that cannot be read: end the run, or skip and count it."
    )
    workers: Annotated[int, Field(ge=0, le=1024)] | None = _data(
        None,
        "Processes that load data, for each process that trains.",
        shown="cores divided by the training processes of the machine, at most 8; none for data in memory and text",
    )
    prefetch: Annotated[int, Field(ge=1, le=1024)] = _data(
        2, "Passes that each worker loads ahead; --dry-run shows the memory that this takes."
    )

    loss: Literal["ce", "bce"] = _loss("ce", "Cross entropy, or the mean of a binary cross entropy for each class.")
    bce_threshold: FractionBelowOne | None = _loss(
        None, "Targets of mixed images above this become 1, and the others 0.", shown="none: targets stay fractions"
    )
    label_smoothing: FractionBelowOne = _loss(0.0, "Part of each label that is spread over all classes.")

    optimizer: Literal["sgd", "adamw", "lion"] = _optimizer("sgd", "SGD with momentum, AdamW, or Lion.")
    lr: NonNegativeFloat = _optimizer(
        0.1,
        "Peak learning rate. If you give it, it is not scaled with the batch size, unless you also give --lr-scaling.",
        shown="depends on the model and the optimizer",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = _optimizer(
        "none", "How --lr changes from --lr-batch-size to --batch-size."
    )
    lr_batch_size: Count = _optimizer(256, "With --lr-scaling: the batch size to which --lr belongs.")
    momentum: FractionBelowOne = _optimizer(0.9, "Momentum of SGD.")
    nesterov: bool = _optimizer(False, "Nesterov momentum of SGD.")
    lr_in_momentum: bool = _optimizer(False, "Keep the learning rate in the momentum buffer, as MLPerf does.")
    rescale_weights: bool = _optimizer(
        False,
        "With sgd: divide scale-invariant weights by the largest of their norms in every step, so that effective "
        "learning rates do not fall. Which weights these are is measured on one batch first.",
    )
    betas: Pair = _optimizer(
        (0.9, 0.999),
        "Decay of the two moments of AdamW; of Lion β₁ of the direction and β₂ of the moment.",
        shown="0.9,0.999 for adamw, 0.9,0.99 for lion",
        metavar="X,X",
    )
    eps: NonNegativeFloat = _optimizer(1e-8, "Added to the denominator of AdamW.")
    weight_decay: NonNegativeFloat = _optimizer(1e-4, "Weight decay.", shown="1e-4 for sgd, 0.1 for adamw, 1 for lion")
    cautious_decay: bool = _optimizer(
        False, "Decay only the elements that the step does not move away from zero (Cautious Weight Decay)."
    )
    decay: Literal["all", "matrices"] = _optimizer(
        "all", "Decay all parameters, or only those of two or more dimensions that are not of a normalization."
    )
    exclude: Names = _optimizer(
        (),
        "Names of parameters, or patterns with * and ?, without weight decay and --scaling; may be repeated.",
        metavar="PATTERN",
    )
    scaling: Scalings = _optimizer(
        "none",
        "Scale the step of each layer by the norms of its gradient, step or weights. hyperball keeps the norms of "
        "weights constant, and brake slows their change. Nesterov momentum and Adam were reported to match LARS and "
        "LAMB.",
    )
    select: Names = _optimizer(
        (),
        "With --scaling: names of parameters, or patterns with * and ?, that it acts on; may be repeated.",
        shown="weights of two or more dimensions; with ng and clip all",
        metavar="PATTERN",
    )
    goal: PositiveFloat | None = _optimizer(None, "With --scaling elr: the value of ‖g‖ / ‖w‖ of every layer.")
    trust_coefficient: PositiveFloat = _optimizer(0.001, "With --scaling lars or larc.")
    ratio: PositiveFloat | None = _optimizer(
        None, "With --scaling floor: the least ‖Δw‖ / ‖w‖ of a layer, in units of --lr."
    )
    ceiling: PositiveFloat | None = _optimizer(
        None, "With --scaling floor: the largest ‖Δw‖ / ‖w‖ of a layer, in units of --lr."
    )
    outward: NonNegativeFloat = _optimizer(0.5, "With --scaling brake: the part of an increase of ‖w‖ that remains.")
    inward: NonNegativeFloat = _optimizer(1.0, "With --scaling brake: the part of a decrease of ‖w‖ that remains.")
    max_norm: PositiveFloat | None = _optimizer(None, "With --scaling clip: the largest ‖g‖ of a layer.")
    clip_global_norm: PositiveFloat | None = _optimizer(None, "The largest norm of all gradients together.")
    nonfinite: Literal["propagate", "skip", "raise"] = _optimizer(
        "propagate", "A gradient that is NaN or infinite: take the step, skip it, or end the training before it."
    )
    master_weights: bool = _optimizer(
        False,
        "With --amp bf16: linear and convolutional layers have weights and gradients in bfloat16, and the optimizer "
        "keeps master weights in float32.",
    )
    rates: str = _optimizer(
        "layerwise",
        "layerwise measures multipliers first (LWLR), single has none; or a file that calibrate wrote.",
        shown="layerwise, or single with --scaling or --layer-decay",
        metavar="layerwise|single|FILE",
    )
    calibration_steps: Count | None = _optimizer(
        None, "With --rates layerwise: batches to measure multipliers on.", shown="an epoch, at most 100"
    )
    rates_exclude: Patterns | None = _optimizer(
        None,
        "Names of layers, or patterns with * and ?, that layer-wise rates leave out (η = 1); may be repeated. none "
        "leaves no layer out, as in the LWLR paper.",
        shown="class token and position embedding, if they start at zero",
        metavar="PATTERN",
    )
    layer_decay: PositiveFraction | None = _optimizer(
        None, "Multiply the rate by this from each block to the one before it, to fine-tune."
    )
    ema: FractionBelowOne | None = _optimizer(
        None,
        "Decay of a moving average of the weights (EMA), which the optimizer's step updates. Evaluations test it too.",
    )

    epochs: Annotated[float, Field(gt=0, le=1e9)] = _schedule(20.0, "Passes over the training data.")
    steps: Count | None = _schedule(
        None, "Steps of the optimizer, in place of --epochs; warm-up and steps of the schedule keep their share."
    )
    warmup_epochs: NonNegativeFloat = _schedule(
        0.0, "Epochs in which the learning rate rises.", shown="a tenth of the epochs"
    )
    warmup_bound: PositiveFraction | None = _schedule(
        None,
        "With sgd: in the warm-up, lr is this fraction of √2 / E, at most --lr. E, the largest ‖g‖ / ‖w‖ of the "
        "scale-invariant weights, is measured in each step.",
        shown="none: the rate rises by equal steps",
    )
    schedule: Literal["cosine", "polynomial", "step"] = _schedule(
        "cosine", "How the learning rate falls after the warm-up."
    )
    power: PositiveFloat = _schedule(2.0, "With --schedule polynomial.")
    step_epochs: PositiveFloat = _schedule(30.0, "With --schedule step: epochs from each step to the next.")
    step_factor: Annotated[float, Field(gt=0, lt=1)] = _schedule(
        0.1, "With --schedule step: factor of the rate at each step."
    )
    min_lr: NonNegativeFloat = _schedule(0.0, "Learning rate that the schedule ends at.")
    batch_size: Count = _schedule(64, "Images, or sequences of text, in a step, of all processes together.")
    micro_batch: Count | None = _schedule(
        None,
        "Images or sequences that a process takes at a time, at most; their gradients are accumulated.",
        shown="all of a process's part",
    )
    amp: Literal["none", "bf16", "fp16"] = _schedule("none", "Mixed precision.")
    fsdp: bool = _schedule(False, "Shard the model over processes (FSDP2), where DDP copies it.")

    seed: Annotated[int, Field(ge=0, lt=2**63)] = _run(0, "Seed of weights, order of data, augmentation and dropout.")
    deterministic: bool | None = _run(
        None,
        "Only algorithms that give the same bits each time; on a GPU they are slower.",
        shown="on a CPU, where it costs nothing; not on a GPU",
    )
    device: str = _run("auto", "cpu, cuda, cuda:1, ...; auto takes the GPU where there is one.", metavar="NAME")
    backend: Literal["auto", "triton", "torch"] = _run(
        "auto",
        "Implementation of the fused steps: auto takes Triton on a GPU and the same kernels compiled for the CPU "
        "elsewhere, or PyTorch if there is no compiler.",
    )
    out: str = _run("runs/train", "Folder of the run. The same command resumes the run in it.", metavar="FOLDER")
    checkpoint_minutes: PositiveFloat = _run(10.0, "Minutes between checkpoints.")
    log_every: Count | None = _run(None, "Steps between two lines of metrics.", shown="50, but at least once an epoch")
    eval_every: Count | None = _run(
        None, "Steps between two evaluations on the validation data; the last step has one as well.", shown="an epoch"
    )
    eval_epochs: Count | None = _run(None, "Epochs between two evaluations, in place of --eval-every.", shown="1")
    keep_best: bool = _run(
        False,
        "Keep the weights, or their averages, with the best validation as model_best.pt: with the highest top-1 "
        "accuracy, or of text with the lowest loss.",
    )
    target_top1: PositiveFraction | None = _run(
        None,
        "End the training after the first evaluation with this top-1 accuracy, such as 0.759; exit with 3 if none "
        "has it.",
    )
    stats_every: NonNegativeInt = _run(0, "Steps between two records of all layers; 0 for one each epoch.")
    tensorboard: bool = _run(False, "Write curves and layers for TensorBoard.")
    wandb: bool = _run(False, "Log the same to Weights & Biases, to the project WANDB_PROJECT or fused_lwlr.")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: ArgsKwargs) -> ArgsKwargs:
        values = given.kwargs or {}
        return ArgsKwargs(given.args, {**implied_defaults(values), **values})

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        check(self, DEFAULTS, without_effect(dataclasses.asdict(self)))
        return self

    @property
    def peak_lr(self) -> float:
        """The highest learning rate: `lr`, scaled from `lr_batch_size` to `batch_size`.

        Linear scaling is from Accurate, Large Minibatch SGD (Section 2.1), the square root from Large Batch
        Optimization for Deep Learning (LAMB, Section 4.2).
        """
        ratio = self.batch_size / self.lr_batch_size
        return self.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]

    @property
    def is_text(self) -> bool:
        """Whether the data are text."""
        return is_text(self.data)

    @property
    def side(self) -> int | None:
        """The side of images in pixels: `image_size`, or a side for the model; None for the side that the data have."""
        if self.image_size is not None:
            return self.image_size
        if self.model.startswith("timm:"):
            return 224
        return 8 if self.data == "digits" else None if is_in_memory(self.data) else 64

    @property
    def has_pretrained_weights(self) -> bool:
        """Whether the model comes with weights that were trained."""
        return is_pretrained(self.pretrained, self.model_args)

    def to_dict(self) -> dict[str, Any]:
        """Field -> value, as JSON values."""
        found = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def to_toml(self) -> str:
        """A file for `--config`. Fields with the value None are left out, since TOML cannot express it."""
        lines = [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in self.to_dict().items() if v is not None]
        # the one character that JSON may have and TOML not
        return "\n".join(lines).replace("\x7f", "\\u007f") + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: Mapping[str, str] | None = None) -> "Recipe":
        """The inverse of `to_dict`; numbers may be strings.

        Args:
            where: for fields of a file, the name of the file. The others are from the command line.

        Raises:
            ValueError: an unknown field, or a bad value, in the spelling of the user.
        """
        for name in values:
            if name not in FIELDS:
                here = OTHER_WORDS.get(flag(name), "").lstrip("-").replace("-", "_")
                close = [here] if here else difflib.get_close_matches(name, FIELDS, n=1)
                # eval_only, for evaluate, is no field
                hint = f"; did you mean {close[0]}?" if close and close[0] in FIELDS else ""
                raise ValueError(f"{place(name, where)}: there is no such option{hint}")
        for name, value in values.items():
            if isinstance(value, bool) and not isinstance(DEFAULTS[name], bool) and name != "deterministic":
                raise ValueError(f"{place(name, where)} {str(value).lower()}: must not be true or false")
        try:
            return cls(**values)
        except ValidationError as error:
            # a list that is too short lacks several numbers
            messages = dict.fromkeys(readable(dict(one), where) for one in error.errors())
            raise ValueError("; ".join(messages)) from None


FIELDS = Recipe.__pydantic_fields__  # type: ignore[attr-defined]
"""Name -> field, whose `json_schema_extra` has the arguments of `option`."""
DEFAULTS: dict[str, Any] = {name: field.default for name, field in FIELDS.items()}


def without_effect(values: Mapping[str, Any]) -> list[str]:
    """The fields that differ from their defaults and have no effect with the choices of the others, see `ONLY`."""
    whole = {**DEFAULTS, **values}
    return [
        name for name, (other, choices) in ONLY.items()
        if whole[name] != DEFAULTS[name] and whole[other] not in choices
    ]  # fmt: skip


def is_text(data: str) -> bool:
    """Whether data, by their name, are text."""
    return data == "python-docs" or data.startswith(("text:", "hf:", "pairs:"))


def is_in_memory(data: str) -> bool:
    """Whether data, by their name, are images that are loaded whole."""
    return data in ("digits", "glyphs", "fashion-mnist") or data.startswith("idx:")


def is_path(data: str) -> bool:
    """Whether data, by their name, are a folder or tar files of images."""
    return not (is_text(data) or is_in_memory(data) or data == "synthetic")
