"""Train one configuration: with a single learning rate, calibrated layer-wise ones, or one effective rate."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from fused_lwlr import ELR, SGD, AdamW, LayerRates, calibrate, lwlr_init_
from fused_lwlr.data.datasets import Batches, Data, load
from fused_lwlr.models.build import build
from fused_lwlr.ops import Backend
from fused_lwlr.training.loop import DivergedError
from fused_lwlr.training.processes import pick_device

OPTIMIZERS = ("sgd", "adamw")
SCALINGS = ("elr",)


@dataclass(frozen=True)
class Config:
    """What to train and how.

    `rates` is "single", "layerwise" (calibrated over the first epoch's minibatches, at the weights that
    training starts from) or the path of a JSON file with rates. `warmup` is the part of training in which
    the learning rate rises linearly to `lr`; a cosine takes it to 0 from there. `momentum` is that of SGD.
    `scaling` is None or "elr": every layer's weight at one effective learning rate, `goal` (`fused_lwlr.ELR`).
    """

    model: str = "resnet"
    data: str = "digits"
    image_size: int | None = None
    optimizer: str = "sgd"
    rates: str = "layerwise"
    lr: float = 0.1
    weight_decay: float = 1e-4
    momentum: float = 0.9
    scaling: str | None = None
    goal: float | None = None
    epochs: int = 20
    warmup: float = 0.1
    batch_size: int = 64
    seed: int = 0
    device: str = "auto"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        checks = {
            f"optimizer must be one of {', '.join(OPTIMIZERS)}": self.optimizer in OPTIMIZERS,
            f"scaling must be one of {', '.join(SCALINGS)}, or None": self.scaling in (*SCALINGS, None),
            "epochs must be at least 1": self.epochs >= 1,
            "batch_size must be at least 2": self.batch_size >= 2,
            "warmup must be a part of training, at least 0 and below 1": 0 <= self.warmup < 1,
            "seed must not be negative": self.seed >= 0,
            "goal must be a finite number above 0": self.goal is None or 0 < self.goal < math.inf,
        }
        for rule, held in checks.items():
            if not held:
                raise ValueError(f"{rule}, not {getattr(self, rule.split()[0])!r}")
        if (self.scaling is None) != (self.goal is None):
            raise ValueError(
                f"scaling {self.scaling} needs a goal: the effective learning rate of every layer, which lr multiplies"
                if self.goal is None
                else f"goal {self.goal:g} is for scaling {SCALINGS[0]}, which was not chosen"
            )


@dataclass(frozen=True)
class Epoch:
    """Mean training loss over an epoch, test accuracy after it (0 to 1), and the seconds that both took."""

    train_loss: float
    test_accuracy: float
    seconds: float


class Training:
    """A model on its way: parameters, optimizer, schedule and history.

    The initial weights and the order of minibatches depend on the seed alone, not on the optimizer or the
    rates: runs that differ in these start from the same weights.

    Args:
        config: what to train and how.
        rates: layer-wise rates to take instead of calibrating or reading them.
        progress: show a progress bar while calibrating.
        model: a network to train, with the weights that it has, instead of the one that `config` names.
        optimizer: makes the optimizer, from this training with its model and rates, instead of what `config` says.
    """

    def __init__(
        self,
        config: Config,
        *,
        rates: LayerRates | None = None,
        progress: bool = False,
        model: nn.Module | None = None,
        optimizer: "Callable[[Training], SGD | AdamW] | None" = None,
    ) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self.data = load(config.data, config.image_size)
        self.model = (model or initial_model(config.model, self.data, config.seed)).to(self.device)
        self.rates = rates or self._find_rates(progress)
        self.optimizer = optimizer(self) if optimizer is not None else self._new_optimizer()
        self.scheduler = self._new_scheduler()
        self.history: list[Epoch] = []

    def _find_rates(self, progress: bool) -> LayerRates | None:
        if self.config.rates == "single":
            return None
        if self.config.rates != "layerwise":
            if not Path(self.config.rates).is_file():
                raise FileNotFoundError(
                    f"rates must be single, layerwise or a file of rates, not {self.config.rates!r}"
                )
            return LayerRates.from_json(self.config.rates)
        # not drawn anew: the weights are those of the paper's initialization, and training starts from them
        batches = self._batches(epoch=0)
        return calibrate(self.model, batches, cross_entropy, init=False, progress=progress, backend=self.config.backend)

    def _new_optimizer(self) -> SGD | AdamW:
        config, params = self.config, self.model.named_parameters()
        common: dict[str, Any] = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "multipliers": self.rates,
            "scaling": ELR(config.goal) if config.goal is not None else None,
            "backend": config.backend,
        }
        return SGD(params, momentum=config.momentum, **common) if config.optimizer == "sgd" else AdamW(params, **common)

    def _new_scheduler(self) -> LRScheduler:
        steps = self.config.epochs * len(self._batches(epoch=0))
        warmup = int(self.config.warmup * steps)
        cosine = CosineAnnealingLR(self.optimizer, T_max=steps - warmup)
        if warmup == 0:
            return cosine
        linear = LinearLR(self.optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        return SequentialLR(self.optimizer, [linear, cosine], milestones=[warmup])

    def _batches(self, epoch: int) -> Batches:
        return Batches(self.data.train, self.config.batch_size, self.device, seed=self.config.seed, epoch=epoch)

    def run_epoch(self) -> Epoch:
        """Train for one epoch, test, and add both to the history.

        Raises:
            DivergedError: the training loss is not finite.
        """
        start = time.perf_counter()
        self.model.train()
        batches = self._batches(len(self.history))
        # summed on the device: reading every loss would make a GPU wait for the CPU at each step
        total = torch.zeros((), device=self.device)
        for inputs, targets in batches:
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            total += loss.detach()
        mean = total.item() / len(batches)
        if not math.isfinite(mean):
            raise DivergedError(
                f"the training loss became {mean} in epoch {len(self.history) + 1} "
                f"({self.config.optimizer}, lr {self.config.lr:g}): try a lower learning rate, or a longer warm-up"
            )
        accuracy = self.test()
        self.history.append(Epoch(mean, accuracy, time.perf_counter() - start))
        return self.history[-1]

    @torch.no_grad()
    def test(self) -> float:
        """The part of the test images that the model classifies correctly, 0 to 1."""
        self.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        count = 0
        for inputs, targets in Batches(self.data.test, 512, self.device):
            right += (self.model(inputs).argmax(1) == targets).sum()
            count += len(targets)
        return right.item() / count


def initial_model(name: str, data: Data, seed: int) -> nn.Module:
    """A model for a data set with the paper's initialization, drawn from `seed` on the CPU."""
    torch.manual_seed(seed)
    model = build(name, image_size=data.image_size, channels=data.channels, classes=len(data.classes))
    lwlr_init_(model)
    return model
