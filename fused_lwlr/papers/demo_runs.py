"""Finished trainings of the demo, and ways to group them."""

from collections.abc import Sequence
from dataclasses import dataclass

from fused_lwlr import LayerRates
from fused_lwlr.training.small_loop import Config, Epoch

NAMES = {"single": "single", "layerwise": "layer-wise"}
"""The kinds of rates that are compared, and what tables call them."""


@dataclass(frozen=True)
class Run:
    """One training: what was trained, how it went, and the rates it used (None for a single rate)."""

    config: Config
    history: tuple[Epoch, ...]
    rates: LayerRates | None
    seconds: float

    @property
    def final(self) -> Epoch:
        return self.history[-1]


def cells(runs: Sequence[Run]) -> dict[tuple[str, str, float], dict[str, list[Run]]]:
    """Runs by (model, optimizer, learning rate) and by kind of rates, in the order of their seeds."""
    found: dict[tuple[str, str, float], dict[str, list[Run]]] = {}
    for run in runs:
        cell = found.setdefault((run.config.model, run.config.optimizer, run.config.lr), {})
        cell.setdefault(run.config.rates, []).append(run)
    return found


def rates_of(runs: Sequence[Run]) -> dict[str, list[LayerRates]]:
    """The calibrated rates of each model, one for each seed: they do not depend on the optimizer."""
    found: dict[str, dict[int, LayerRates]] = {}
    for run in runs:
        if run.rates is not None:
            found.setdefault(run.config.model, {})[run.config.seed] = run.rates
    return {model: list(by_seed.values()) for model, by_seed in found.items()}
