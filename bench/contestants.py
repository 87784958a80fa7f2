"""Contestants: our optimizers, torch.optim's, compositions of torch's multi-tensor calls, and other libraries'."""

import importlib.util
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fused_lwlr
from bench.parameter_sets import Named
from fused_lwlr.backends import Backend
from fused_lwlr.integrations.extras import import_beside_torchvision
from fused_lwlr.measure.layers import named_layers
from fused_lwlr.measure.statistics import StatisticsPass
from fused_lwlr.scaling import everything

MOMENTUM, BETAS, EPS = 0.9, (0.9, 0.999), 1e-8
DECAY = {"sgd": 1e-4, "adamw": 1e-2}
# these numbers keep all methods different: ELR of a direction with a goal of 1 would be LAMB
GOAL, ELR_EPS = 0.5, 1e-5
TRUST, LARS_EPS = 0.1, 1e-8
MAX_NORM = 1.0
MULTIPLIER = 0.5
"""Numbers that all contestants share."""

METHODS = {
    "sgd": ("plain", "multipliers", "ELR", "LARS", "LARC", "NG", "clip"),
    "adamw": ("plain", "multipliers", "ELR", "LAMB", "clip"),
    "statistics": ("statistics",),
}
"""Rule -> methods of a step."""
ALL: dict[str, Any] = {"select": everything}
SCALINGS: dict[str, Any] = {
    "ELR": fused_lwlr.ELR(GOAL, ELR_EPS, **ALL),
    "LARS": fused_lwlr.LARS(TRUST, LARS_EPS, **ALL),
    "LARC": fused_lwlr.LARC(TRUST, LARS_EPS, **ALL),
    "NG": fused_lwlr.NormalizedGradient(**ALL),
    "LAMB": fused_lwlr.LAMB(**ALL),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": MOMENTUM, "weight_decay": DECAY["sgd"]},
    "adamw": {"betas": BETAS, "eps": EPS, "weight_decay": DECAY["adamw"]},
}
"""Options of optimizers, ours and others', without lr."""
LARS = {**OPTIONS["sgd"], "trust_coeff": TRUST, "eps": LARS_EPS}
EXACT = {"quantize": False, "master_weight_bits": None}
PEERS: list[tuple[str, str, str, str, str, dict[str, Any]]] = [
    ("timm", "sgd", "LARS", "timm.optim.lars", "Lars", LARS),
    ("timm", "adamw", "LAMB", "timm.optim.lamb", "Lamb", {**OPTIONS["adamw"], "max_grad_norm": None}),
    ("apex", "sgd", "plain", "apex.optimizers", "FusedSGD", OPTIONS["sgd"]),
    ("apex", "adamw", "plain", "apex.optimizers", "FusedAdam", OPTIONS["adamw"]),
    ("apex", "adamw", "LAMB", "apex.optimizers", "FusedLAMB", {**OPTIONS["adamw"], "max_grad_norm": 1e30}),
    ("flashoptim", "sgd", "plain", "flashoptim", "FlashSGD", {**OPTIONS["sgd"], **EXACT}),
    ("flashoptim", "adamw", "plain", "flashoptim", "FlashAdamW", {**OPTIONS["adamw"], **EXACT}),
    ("bitsandbytes", "adamw", "plain", "bitsandbytes.optim", "AdamW32bit", OPTIONS["adamw"]),
    ("bitsandbytes", "adamw", "LAMB", "bitsandbytes.optim", "LAMB32bit", {**OPTIONS["adamw"], "max_unorm": 0.0}),
    ("torchao", "adamw", "plain", "torchao.optim", "_AdamW", OPTIONS["adamw"]),
    ("heavyball", "adamw", "plain", "heavyball", "AdamW", OPTIONS["adamw"]),
]
"""Package, rule, method, module, class and options of other libraries' optimizers."""


class Contestant(NamedTuple):
    """An implementation of a step.

    Attributes:
        rule, method: a key and an entry of `METHODS`.
        library: its name, such as "torch fused".
        build: (named parameters, lr, capturable) -> an object with `step()`.
        passes: how often a step reads or writes an element, from the implementation; None if unknown. For ours the
            launcher counts.
        graph: whether a step can be captured in a CUDA graph.
        mutates: whether a step changes `.grad`.
    """

    rule: str
    method: str
    library: str
    build: Callable[[Named, float, bool], Any]
    passes: float | None = None
    graph: bool = True
    mutates: bool = False

    @property
    def name(self) -> str:
        """The name in the report."""
        step = "statistics" if self.rule == "statistics" else f"{self.rule} {self.method}"
        return f"{step}, {self.library}"


def ours(rule: str, method: str) -> Contestant:
    """Our optimizer; on a CPU its reference backend."""

    def build(named: Named, lr: float, capturable: bool) -> Any:
        more: dict[str, Any] = {"scaling": SCALINGS.get(method)}
        if method == "multipliers":
            more["layers"] = {name: MULTIPLIER for name, _ in named}
        if method == "clip":
            more["clip_global_norm"] = MAX_NORM
        cls = {"sgd": fused_lwlr.SGD, "adamw": fused_lwlr.AdamW}[rule]
        backend = "triton" if named[0][1].is_cuda else "auto"
        return cls(named, lr=lr, capturable=capturable, backend=backend, **more, **OPTIONS[rule])

    return Contestant(rule, method, "ours", build)


def torchs(rule: str, method: str, passes: float | None = None, which: str = "fused") -> Contestant:
    """torch.optim's, fused, foreach or as a loop; with a param group for each tensor, or after clip_grad_norm_."""

    def build(named: Named, lr: float, capturable: bool) -> Any:
        params: list[Any] = [param for _, param in named]
        groups = [{"params": [p], "lr": lr * MULTIPLIER} for p in params] if method == "multipliers" else params
        more: dict[str, Any] = {"foreach": False} if which == "for-loop" else {which: True}
        more |= {"capturable": capturable} if rule == "adamw" else {}
        optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[rule](groups, lr=lr, **more, **OPTIONS[rule])
        if method != "clip":
            return optimizer
        clip = partial(torch.nn.utils.clip_grad_norm_, params, MAX_NORM, foreach=True)
        return SimpleNamespace(step=lambda: (clip(), optimizer.step()))

    return Contestant(rule, method, f"torch {which}", build, passes, mutates=method == "clip")


def composed(method: str, passes: float) -> Contestant:
    """Scaled gradients by few multi-tensor calls, and torch's fused SGD on them; `.grad` does not change."""
    decay = DECAY["sgd"]

    def scaled(params: list[Any], grads: list[Any], norms: Tensor, weight_norms: Tensor) -> Any:
        # factors are read back once: with a list of numbers the scaling needs few launches, and with tensors one each
        if method == "ELR":
            return torch._foreach_mul(grads, (GOAL / (norms / weight_norms + ELR_EPS)).tolist())
        factors = TRUST * weight_norms / (norms + decay * weight_norms + LARS_EPS)
        return torch._foreach_mul(torch._foreach_add(grads, params, alpha=decay), factors.tolist())

    def build(named: Named, lr: float, capturable: bool) -> Any:
        params: list[Any] = [param for _, param in named]
        left = decay if method == "ELR" else 0.0
        optimizer = torch.optim.SGD(params, lr=lr, momentum=MOMENTUM, weight_decay=left, fused=True)

        @torch.no_grad()
        def step() -> None:
            grads = [param.grad for param in params]
            norms = torch.stack(torch._foreach_norm([*grads, *params])).float()
            for param, grad in zip(params, scaled(params, grads, *norms.chunk(2)), strict=True):
                param.grad = grad
            optimizer.step()
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad

        return SimpleNamespace(step=step)

    return Contestant("sgd", method, "foreach", build, passes, graph=False)


def our_statistics(named: Named, backend: Backend = "auto") -> SimpleNamespace:
    """Σ|g|, Σg², max|g|, Σw², Σg·w, non-finite elements of each layer, by a `step()` whose tables are kept."""
    measure = StatisticsPass(named_layers(named), backend)
    return SimpleNamespace(step=lambda: measure().values)


def foreach_norms(named: Named) -> SimpleNamespace:
    """Σ|g|, ‖g‖, max|g| and ‖w‖ of every tensor, [4, tensors], by four calls; the other statistics are left out."""
    params: list[Any] = [param.detach() for _, param in named]

    def step() -> Tensor:
        grads: list[Any] = [param.grad for _, param in named]
        norms = [torch._foreach_norm(grads, order) for order in (1, 2, float("inf"))]
        return torch.stack([torch.stack(found) for found in (*norms, torch._foreach_norm(params))])

    return SimpleNamespace(step=step)


def contestants() -> list[Contestant]:
    """Ours and torch's; the baselines of ratios come first."""
    found = []
    for rule, fused in (("sgd", 5), ("adamw", 7)):
        found += [torchs(rule, "plain", fused), *(ours(rule, method) for method in METHODS[rule])]
        found += [torchs(rule, "plain", None, which) for which in ("foreach", "for-loop")]
        found += [torchs(rule, "multipliers", fused)]
        # the norm reads, the scaling reads and writes
        found += [torchs(rule, "clip", fused + 3)]
    # two norms, one scaled copy, and the fused step; LARS adds the weight decay and scales in two calls
    found += [composed("ELR", 2 + 2 + 5), composed("LARS", 2 + 3 + 2 + 5)]
    statistics = partial(Contestant, "statistics", "statistics", graph=False)
    found += [statistics("ours", lambda named, *_: our_statistics(named))]
    found += [statistics("foreach", lambda named, *_: foreach_norms(named), 4)]
    return found


def peers() -> tuple[list[Contestant], dict[str, str]]:
    """Contestants from the installed packages, and package -> the reason why it is missing."""
    found, absent = [], {}
    for package, rule, method, module, name, options in PEERS:
        if importlib.util.find_spec(package) is None:
            absent[package] = "not installed"
            continue
        try:
            cls = getattr(import_beside_torchvision(module), name)
        except (ImportError, RuntimeError) as error:
            # for example a package that was built for another torch
            absent[package] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue

        def build(named: Named, lr: float, _: bool, cls: Any = cls, options: Any = options) -> Any:
            return cls([param for _, param in named], lr=lr, **options)

        # some releases of some packages change `.grad`
        found.append(Contestant(rule, method, package, build, graph=False, mutates=True))
    return found, absent
