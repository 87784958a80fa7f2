"""Contestants: our optimizers, torch.optim's three implementations, and compositions of torch's multi-tensor calls."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

import fused_lwlr
from bench import reference as numbers
from bench.compositions import ForeachELR, ForeachLARS, ForeachNorms
from fused_lwlr.layers import named_layers
from fused_lwlr.ops import Backend
from fused_lwlr.scaling import everything
from fused_lwlr.statistics import StatisticsPass

Named = list[tuple[str, nn.Parameter]]

METHODS = {
    "sgd": ("plain", "multipliers", "ELR", "LARS", "LARC", "NG", "clip"),
    "adamw": ("plain", "multipliers", "ELR", "LAMB", "clip"),
    "statistics": ("statistics",),
}
"""Rule -> methods of a step."""
ALL: dict[str, Any] = {"select": everything}
SCALINGS: dict[str, Any] = {
    "ELR": fused_lwlr.ELR(numbers.GOAL, numbers.ELR_EPS, **ALL),
    "LARS": fused_lwlr.LARS(numbers.TRUST, numbers.LARS_EPS, **ALL),
    "LARC": fused_lwlr.LARC(numbers.TRUST, numbers.LARS_EPS, **ALL),
    "NG": fused_lwlr.NormalizedGradient(**ALL),
    "LAMB": fused_lwlr.LAMB(**ALL),
}


class Contestant(NamedTuple):
    """An implementation of a step.

    Attributes:
        rule, method: a key and an entry of `METHODS`.
        who: the name of the library, such as "torch fused".
        build: (named parameters, lr, capturable) -> an object with `step()`.
        passes: how often a step reads or writes an element, from the implementation; None if unknown. For ours the
            launcher counts.
        graph: whether a step can be captured in a CUDA graph.
        mutates: whether a step changes `.grad`.
    """

    rule: str
    method: str
    who: str
    build: Callable[[Named, float, bool], Any]
    passes: float | None = None
    graph: bool = True
    mutates: bool = False

    @property
    def name(self) -> str:
        """The name in the report."""
        return f"{self.rule} {self.method}, {self.who}" if self.rule != "statistics" else f"statistics, {self.who}"


def options_of(rule: str) -> dict[str, Any]:
    """Options for our optimizers and torch.optim's, without lr."""
    if rule == "sgd":
        return {"momentum": numbers.MOMENTUM, "weight_decay": numbers.DECAY["sgd"]}
    return {"betas": numbers.BETAS, "eps": numbers.EPS, "weight_decay": numbers.DECAY["adamw"]}


def ours(rule: str, method: str) -> Contestant:
    """Our optimizer; on a CPU its reference backend."""

    def build(named: Named, lr: float, capturable: bool) -> Any:
        more: dict[str, Any] = {"scaling": SCALINGS.get(method)}
        if method == "multipliers":
            more["layers"] = {name: numbers.MULTIPLIER for name, _ in named}
        if method == "clip":
            more["clip_global_norm"] = numbers.MAX_NORM
        cls = {"sgd": fused_lwlr.SGD, "adamw": fused_lwlr.AdamW}[rule]
        backend = "triton" if named[0][1].is_cuda else "auto"
        return cls(named, lr=lr, capturable=capturable, backend=backend, **more, **options_of(rule))

    return Contestant(rule, method, "ours", build)


def torchs(rule: str, method: str, which: str, passes: float) -> Contestant:
    """torch.optim's: fused, foreach or for-loop; with a param group for each tensor, or after clip_grad_norm_."""
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}[which]

    def build(named: Named, lr: float, capturable: bool) -> Any:
        params: list[Any] = [param for _, param in named]
        groups = [{"params": [p], "lr": lr * numbers.MULTIPLIER} for p in params] if method == "multipliers" else params
        more = {"capturable": capturable} if rule == "adamw" else {}
        cls = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[rule]
        optimizer = cls(groups, lr=lr, **flags, **more, **options_of(rule))
        if method != "clip":
            return optimizer
        clip = partial(torch.nn.utils.clip_grad_norm_, params, numbers.MAX_NORM, foreach=True)
        return SimpleNamespace(step=lambda: (clip(), optimizer.step()))

    return Contestant(rule, method, f"torch {which}", build, passes, mutates=method == "clip")


def our_statistics(named: Named, backend: Backend = "auto") -> SimpleNamespace:
    """Σ|g|, Σg², max|g|, Σw², Σg·w, non-finite elements of each layer, by a `step()` whose tables are kept."""
    return SimpleNamespace(step=StatisticsPass(named_layers(named), backend))


# foreach and for-loop: weight decay added to a copy 3, momentum 2 + 3, parameter 3; AdamW: decay 2, lerp 3, v 2 + 3,
# √v 2, two of the denominator 2 + 2, parameter 4
PASSES = {("sgd", "fused"): 5, ("sgd", "foreach"): 11, ("adamw", "fused"): 7, ("adamw", "foreach"): 20}


def contestants() -> list[Contestant]:
    """Ours and torch's; the baselines of ratios come first."""
    found = []
    for rule in ("sgd", "adamw"):
        fused, foreach = PASSES[rule, "fused"], PASSES[rule, "foreach"]
        found += [torchs(rule, "plain", "fused", fused)]
        found += [ours(rule, method) for method in METHODS[rule]]
        found += [torchs(rule, "plain", "foreach", foreach), torchs(rule, "plain", "for-loop", foreach)]
        # the norm reads, the scaling reads and writes
        found += [torchs(rule, "clip", "fused", fused + 3), torchs(rule, "multipliers", "fused", fused)]
    # two norms, one scaled copy, and the fused step; with weight decay added before
    found += [Contestant("sgd", "ELR", "foreach", lambda named, lr, _: ForeachELR(named, lr), 2 + 2 + 5, graph=False)]
    found += [
        Contestant("sgd", "LARS", "foreach", lambda named, lr, _: ForeachLARS(named, lr), 2 + 3 + 2 + 5, graph=False)
    ]
    found += [Contestant("statistics", "statistics", "ours", lambda named, *_: our_statistics(named))]
    found += [Contestant("statistics", "statistics", "foreach", lambda named, *_: ForeachNorms(named), 4)]
    return found
