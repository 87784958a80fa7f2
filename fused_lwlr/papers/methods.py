"""Layer-wise methods over learning rates and sizes of a net: what is trained, and the jobs.

Initializing the Layer-wise Learning Rate: training losses of Figure 7, beside the accuracies of Table 2 and Figure 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fused_lwlr import LAMB, LARC, LARS, SGD, AdamW, NormalizedGradient, NormalizedGradientAdaptive, multipliers
from fused_lwlr.data.datasets import Data, load
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.methods_report import report
from fused_lwlr.papers.mlp import MLP, drawn, drawn_for_mup
from fused_lwlr.scaling import Scaling
from fused_lwlr.training.defaults import WEIGHT_DECAY, image_size
from fused_lwlr.training.loop import DivergedError
from fused_lwlr.training.small_loop import Config, Training

SIZES = ((2, 32), (2, 128), (2, 512), (6, 128))
"""(depth, width) of the perceptrons; the paper's have depth 2."""
BASE_WIDTH = 32
"""At which μP is the same as a single rate, but for the weights that it starts from."""
FACTORS = (1 / 16, 1 / 4, 1, 4, 16)
"""Multiples of a method's middle rate."""


@dataclass(frozen=True)
class Method:
    """How a method differs from SGD or AdamW at a single rate.

    Args:
        optimizer: "sgd" or "adamw".
        lr: the middle of its grid of rates, on a logarithmic scale.
        multipliers: what it multiplies rates with, by the model.
        calibrated: whether multipliers are those of LWLR.
        scaling: its scaling, if it has one.
    """

    optimizer: str
    lr: float
    multipliers: Callable[[nn.Module], dict[str, float]] | None = None
    calibrated: bool = False
    scaling: Scaling | None = None


METHODS = {
    "single": Method("sgd", 0.1),
    "LWLR": Method("sgd", 0.1, calibrated=True),
    "depth-increasing": Method("sgd", 0.1, multipliers.depth_increasing),
    "depth-decreasing": Method("sgd", 0.1, multipliers.depth_decreasing),
    "SGD-NG": Method("sgd", 0.08, scaling=NormalizedGradient()),
    "SGD-NG_adap": Method("sgd", 0.005, scaling=NormalizedGradientAdaptive()),
    "LARS": Method("sgd", 5.0, scaling=LARS(trust_coefficient=0.001)),
    "LARC": Method("sgd", 0.2, scaling=LARC(trust_coefficient=0.001)),
    "mup": Method("sgd", 0.1),
    "AdamW": Method("adamw", 0.02),
    "AdamW-LWLR": Method("adamw", 0.02, calibrated=True),
    "Adam-NG": Method("adamw", 0.02, scaling=NormalizedGradient()),
    "LAMB": Method("adamw", 0.02, scaling=LAMB()),
    "AdamW-mup": Method("adamw", 0.02),
}
"""Trust coefficients, and the rate of LARC, are of the appendix. Each grid has the best rate of a 2x128 net inside."""
MUP = ("mup", "AdamW-mup")


def _jobs(settings: Settings) -> list[Job]:
    sizes: list[tuple[int, int] | None] = [None] if settings.model else list(SIZES[:1] if settings.quick else SIZES)
    names = [name for name in METHODS if not (settings.model and name in MUP)]
    names = ["single", "LWLR", "mup", "LAMB"] if settings.quick and not settings.model else names
    common = {"model": settings.model, "data": settings.data, "epochs": settings.epochs, "device": settings.device}
    return [
        Job(
            f"{name}-{f'{size[0]}x{size[1]}' if size else 'model'}-lr{lr:g}-seed{seed}",
            measure,
            {"method": name, "size": "x".join(map(str, size)) if size else settings.model, "lr": lr, "seed": seed}
            | common,
        )
        for name in names
        for size in sizes
        for lr in rates_of(name, settings.quick)
        for seed in range(settings.seeds)
    ]


def rates_of(name: str, quick: bool) -> list[float]:
    """The grid of learning rates of a method."""
    return [float(f"{METHODS[name].lr * factor:.3g}") for factor in (FACTORS[1:4:2] if quick else FACTORS)]


def measure(
    method: str, size: str, lr: float, seed: int, model: str | None, data: str, epochs: int, device: str
) -> dict[str, Any]:
    """Train a perceptron of `size` "DEPTHxWIDTH", or a model; the last training loss, and test accuracy in %."""
    chosen = METHODS[method]
    config = Config(
        model=model or "resnet", data=data, image_size=image_size(model or ""), optimizer=chosen.optimizer, lr=lr,
        rates="layerwise" if chosen.calibrated else "single", epochs=epochs, seed=seed, device=device,
        # the perceptrons are to overfit
        weight_decay=WEIGHT_DECAY[chosen.optimizer] if model else 0.0,
    )  # fmt: skip
    network, found = None, None
    if model is None:
        depth, width = map(int, size.split("x"))
        network, found = _network(method, load(data), depth, width, seed)
    training = Training(config, model=network, optimizer=partial(_optimizer, method=method, mup=found))
    try:
        for _ in range(epochs):
            training.run_epoch()
    except DivergedError:
        return {"train_loss": None, "test_accuracy": None}
    last = training.history[-1]
    return {"train_loss": last.train_loss, "test_accuracy": 100 * last.test_accuracy}


def _network(name: str, data: Data, depth: int, width: int, seed: int) -> tuple[MLP, dict[str, float] | None]:
    if name not in MUP:
        return drawn(data, depth, width, seed), None
    model = drawn_for_mup(data, depth, width, BASE_WIDTH, seed)
    rule: Any = METHODS[name].optimizer
    return model, multipliers.mup(model, MLP(data, depth, BASE_WIDTH), rule)


def _optimizer(training: Training, method: str, mup: dict[str, float] | None) -> SGD | AdamW:
    chosen, config = METHODS[method], training.config
    by_depth = chosen.multipliers(training.model) if chosen.multipliers is not None else None
    common: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "multipliers": mup or by_depth or training.rates,
        "scaling": chosen.scaling,
        "backend": config.backend,
    }
    params = training.model.named_parameters()
    return SGD(params, momentum=config.momentum, **common) if chosen.optimizer == "sgd" else AdamW(params, **common)


STUDY = Study(
    name="methods",
    doc="Training loss of layer-wise methods over learning rates and sizes of a net (Initializing the Layer-wise "
    "Learning Rate, Figure 7, Table 2 and Figure 1).",
    jobs=_jobs,
    report=report,
    epochs=10,
)
