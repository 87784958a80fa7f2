"""One effective learning rate for all layers, in a deep net without shortcuts; each with warm-up and without.

Spreads in Effective Learning Rates: the three setups of Section 4, over some rates as in Figure 8 (ResNet-110), with
and without warm-up as in Figures 9 and 12.
"""

from typing import Any

from fused_lwlr.models.deep import NAME
from fused_lwlr.papers.elr_constrained_report import report
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.from_he import FromHe
from fused_lwlr.training.loop import DivergedError
from fused_lwlr.training.small_loop import Config

MODEL = "noshort"
WARMUP = 0.1
"""Part of training; a cosine follows."""

BOTH, NEITHER = {"momentum": 0.9, "weight_decay": 1e-4}, {"momentum": 0.0, "weight_decay": 0.0}
SETUPS: dict[str, list[dict[str, Any]]] = {
    "momentum, decay": [{**BOTH, "lr": lr, "goal": None} for lr in (0.01, 0.003, 0.03, 0.1)],
    "neither": [{**NEITHER, "lr": lr, "goal": None} for lr in (0.1, 0.03, 0.3)],
    "constrained": [{**NEITHER, "lr": 0.3, "goal": goal} for goal in (0.05, 0.03, 0.1)],
}
"""Rates around those that were best on held-out images (`recipes`), which come first."""


def nets(model: str | None) -> list[str]:
    """Without shortcuts, and the same net with them where there is one."""
    name = model or MODEL
    found = NAME.fullmatch(name)
    if found is not None:
        rest = name.removeprefix(found[1])
        return [f"noshort{rest}", f"resnet{rest}"]
    return ["noshort", "short"] if name in ("noshort", "short") else [name]


def jobs(settings: Settings) -> list[Job]:
    """Every setup at every rate without warm-up; with warm-up without shortcuts only."""
    models = nets(settings.model)
    common = {"data": settings.data, "epochs": settings.epochs, "device": settings.device}
    cells = [(models[0], 0.0), (models[0], WARMUP), *((model, 0.0) for model in models[1:])]
    return [
        Job(
            f"{model.replace(':', '-')}-{setup.replace(', ', '+')}-lr{of['lr']:g}-goal{of['goal'] or 0:g}"
            f"-warmup{warmup:g}-seed{seed}",
            train,
            {"model": model, "setup": setup, "warmup": warmup, "seed": seed} | of | common,
        )
        for model, warmup in cells[: 2 if settings.quick else None]
        for setup, rates in SETUPS.items()
        for of in rates[: 1 if settings.quick else None]
        for seed in range(settings.seeds)
    ]


def train(
    model: str, setup: str, lr: float, goal: float | None, momentum: float, weight_decay: float, warmup: float,
    seed: int, data: str, epochs: int, device: str,
) -> dict[str, Any]:  # fmt: skip
    """Accuracy and training loss after every epoch; None for what diverges."""
    config = Config(
        model=model, data=data, rates="single", lr=lr, momentum=momentum, weight_decay=weight_decay, warmup=warmup,
        scaling=None if goal is None else "elr", goal=goal, epochs=epochs, seed=seed, device=device,
    )  # fmt: skip
    training = FromHe(config)
    try:
        for _ in range(epochs):
            training.run_epoch()
    except DivergedError:
        return {"test_accuracy": None, "train_loss": None, "accuracies": None}
    return {
        "test_accuracy": 100 * training.history[-1].test_accuracy,
        "train_loss": training.history[-1].train_loss,
        "accuracies": [100 * epoch.test_accuracy for epoch in training.history],
    }


STUDY = Study(
    name="elr-constrained",
    doc="Test accuracy with every layer held at one effective learning rate, with and without warm-up and shortcuts "
    "(Spreads in Effective Learning Rates, Figures 8, 9 and 12).",
    jobs=jobs,
    report=report,
    epochs=10,
)
