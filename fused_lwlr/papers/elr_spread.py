"""The spread of effective learning rates over a training, by learning rate, net and momentum.

Spreads in Effective Learning Rates, Figures 3 and 5: ResNet-56 on CIFAR-10, with shortcuts and without. Here also with
batch normalization that has no parameters, and with biases in its place.
"""

import math
from typing import Any

from fused_lwlr import ELRRecorder
from fused_lwlr.models.deep import NAME
from fused_lwlr.papers.elr_spread_report import report
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.from_he import FromHe
from fused_lwlr.training.loop import DivergedError
from fused_lwlr.training.small_loop import Config

MODEL = "resnet32x8"
LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MOMENTA = (0.5, 0.9)
"""Besides 0; with shortcuts only, as in Figure 5."""
RECORDS = 2000
"""At most so many steps of a training are recorded, and about 24 of them kept one by one."""


def nets(model: str | None) -> list[str]:
    """With shortcuts and without, in all kinds of normalization; or one model that is not of this family."""
    found = NAME.fullmatch(model or MODEL)
    if found is None:
        return [str(model)]
    size = found[2] + (f"x{found[3]}" if found[3] else "")
    return [f"{kind}{size}{norm}" for norm in ("", "-noaffine", "-nobn") for kind in ("resnet", "noshort")]


def jobs(settings: Settings) -> list[Job]:
    """Every net at every rate without momentum, and the first with momentum."""
    models = nets(settings.model)
    lrs = (LRS[1], LRS[-1]) if settings.quick else LRS
    cells = [(model, 0.0) for model in models[: 2 if settings.quick else None]]
    cells += [(models[0], momentum) for momentum in MOMENTA[-1 if settings.quick else 0 :]]
    common = {"data": settings.data, "epochs": settings.epochs, "device": settings.device}
    return [
        Job(
            f"{model.replace(':', '-')}-momentum{momentum:g}-lr{lr:g}-seed{seed}",
            measure,
            {"model": model, "momentum": momentum, "lr": lr, "seed": seed} | common,
        )
        for model, momentum in cells
        for lr in lrs
        for seed in range(settings.seeds)
    ]


def measure(model: str, momentum: float, lr: float, seed: int, data: str, epochs: int, device: str) -> dict[str, Any]:
    """Mean(E) and Std(E) over layers, averaged over a training from He's initialization, and its test accuracy.

    With momentum E is that of the buffer (Eq. 11), and `base_spread` that of the gradient. What diverges has no values.
    """
    config = Config(
        model=model, data=data, rates="single", lr=lr, momentum=momentum, weight_decay=0.0, warmup=0.0, epochs=epochs,
        seed=seed, device=device,
    )  # fmt: skip
    training = FromHe(config)
    every = math.ceil(training.steps / RECORDS)
    convolutions = [name for name, param in training.model.named_parameters() if param.dim() == 4]
    # all weights of a net that is not of convolutions: a ViT has one
    select: dict[str, Any] = {"select": convolutions} if len(convolutions) > 1 else {}
    base = ELRRecorder(training.model, every=every, **select).watch(training.optimizer)
    buffer = ELRRecorder(training.model, every=every, momentum=True, **select).watch(training.optimizer)
    try:
        for _ in range(epochs):
            training.run_epoch()
    except DivergedError:
        keys = ("test_accuracy", "train_loss", "elr_mean", "elr_spread", "base_spread", "steps", "spread")
        return dict.fromkeys(keys)
    history, found = buffer.history, buffer.history.summary()
    kept = slice(None, None, math.ceil(len(history.steps) / 24))
    return {
        "test_accuracy": 100 * training.history[-1].test_accuracy,
        "train_loss": training.history[-1].train_loss,
        "elr_mean": found["elr_mean"],
        "elr_spread": found["elr_spread"],
        "base_spread": base.history.summary()["elr_spread"],
        "steps": list(history.steps[kept]),
        "spread": history.elr_spread[kept].tolist(),
    }


STUDY = Study(
    name="elr-spread",
    doc="The spread of effective learning rates over layers and test accuracy, by learning rate, with and without "
    "shortcuts, normalization and momentum (Spreads in Effective Learning Rates, Figures 3 and 5).",
    jobs=jobs,
    report=report,
    epochs=4,
)
