"""What to train and how: every option of `fused-lwlr train`, its default and its bounds."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fused_lwlr.ops import Backend

FREE = (
    "device",
    "out",
    "workers",
    "prefetch",
    "checkpoint_minutes",
    "log_every",
    "tensorboard",
    "stats_every",
    "corrupt",
)
"""Fields that a run may go on with others of. They change no bit of a training; but devices of another kind do, and by
`corrupt` it goes on past an image that ended it."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training, whole: the same recipe, machine and number of processes give the same bits.

    What each field is, `fused_lwlr.training.recipe_help` says, which the command line shows.

    Raises:
        ValueError: a field that is out of bounds, or that another one rules out.
    """

    # model
    model: str = "resnet"
    model_args: tuple[str, ...] = ()
    init: Literal["lwlr", "gradinit", "model"] = "lwlr"
    gradinit_steps: int = 390
    channels_last: bool = False
    compile: bool = False

    # data
    data: str = "digits"
    image_size: int | None = None
    augmentation: Literal["none", "basic", "strong"] = "none"
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    corrupt: Literal["refuse", "skip"] = "refuse"
    workers: int | None = None
    prefetch: int = 2

    # optimizer
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    lr_batch_size: int = 256
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay: Literal["all", "matrices"] = "all"
    scaling: Literal["none", "elr", "lars", "larc", "lamb", "ng"] = "none"
    goal: float | None = None
    trust_coefficient: float = 0.001
    clip_global_norm: float | None = None
    rates: str = "layerwise"
    calibration_steps: int | None = None
    ema: float | None = None

    # schedule
    epochs: float = 20.0
    steps: int | None = None
    warmup_epochs: float = 0.0
    schedule: Literal["cosine", "polynomial"] = "cosine"
    batch_size: int = 64
    micro_batch: int | None = None
    amp: Literal["none", "bf16", "fp16"] = "none"
    fsdp: bool = False

    # run
    seed: int = 0
    deterministic: bool = True
    device: str = "auto"
    backend: Backend = "auto"
    out: str = "runs/train"
    checkpoint_minutes: float = 10.0
    log_every: int | None = None
    stats_every: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, hint in hints.items():
            value = getattr(self, name)
            if hint in (float, float | None) and isinstance(value, int):
                object.__setattr__(self, name, float(value))
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            if choices and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, not {value}")
        for name, low in LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, not {value}")
        for name in ("goal", "clip_global_norm", "epochs", "trust_coefficient", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        for name in ("random_erasing", "label_smoothing", "momentum", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if (self.scaling == "elr") != (self.goal is not None):
            raise ValueError(
                "scaling elr needs a goal: the effective learning rate of every layer, which lr multiplies"
                if self.goal is None
                else f"goal {self.goal:g} is for scaling elr, not {self.scaling}"
            )
        if self.scaling == "lamb" and self.optimizer != "adamw":
            raise ValueError("scaling lamb goes with optimizer adamw")
        if self.scaling in ("lars", "larc") and self.optimizer != "sgd":
            raise ValueError(f"scaling {self.scaling} goes with optimizer sgd; with adamw take lamb")
        if self.model_args and not self.model.startswith("timm:"):
            raise ValueError(f"model_args {' '.join(self.model_args)} are for models of timm (timm:NAME)")
        if self.init == "gradinit" and self.amp == "fp16":
            raise ValueError("init gradinit computes in float32: choose amp bf16 or none, or another init")

    @property
    def side(self) -> int:
        """The side of images in pixels: what was asked for, or what suits models of timm, or the data."""
        if self.image_size is not None:
            return self.image_size
        return 224 if self.model.startswith("timm:") else 8 if self.data == "digits" else 64

    def to_dict(self) -> dict[str, Any]:
        """Field -> value, as JSON has it."""
        found = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field that there is not, or a bad value.
        """
        unknown = sorted(set(values) - {item.name for item in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"a recipe has no {', '.join(unknown)}")
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**fields)


LOWEST: dict[str, float] = {
    "gradinit_steps": 1,
    "image_size": 4,
    "mixup": 0,
    "cutmix": 0,
    "workers": 0,
    "prefetch": 1,
    "lr": 0,
    "lr_batch_size": 1,
    "weight_decay": 0,
    "calibration_steps": 1,
    "steps": 1,
    "warmup_epochs": 0,
    "batch_size": 1,
    "micro_batch": 1,
    "seed": 0,
    "log_every": 1,
    "stats_every": 0,
}
