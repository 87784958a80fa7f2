"""Steps with scalings as the papers define them: one layer, in float64, without code of the library."""

import math
from typing import Any

import torch
from steps import Named
from torch import Tensor

from fused_lwlr import (
    ELR,
    LAMB,
    LARC,
    LARS,
    ClipByLayer,
    Hyperball,
    NormalizedGradient,
    NormalizedGradientAdaptive,
    RadialBrake,
    UpdateFloor,
)

State = dict[str, Any]


def local_rate(scaling: Any, w: Tensor, g: Tensor, weight_decay: float) -> Tensor:
    """λ of LARS, Algorithm 1."""
    return scaling.trust_coefficient * w.norm() / (g.norm() + weight_decay * w.norm() + scaling.eps)


def trust_ratio(scaling: Any, w: Tensor, d: Tensor) -> float:
    """φ(‖w‖) / ‖d‖ of LAMB, Algorithm 2."""
    phi = min(max(float(w.norm()), scaling.min_norm), scaling.max_norm)
    return min(phi / float(d.norm()), scaling.max_ratio) if d.numel() else 1.0


def bounded(scaling: Any, w: Tensor, d: Tensor) -> float:
    """The factor of UpdateFloor, which puts ‖d‖ between two multiples of ‖w‖."""
    length = min(max(float(d.norm()), scaling.ratio * float(w.norm())), scaling.ceiling * float(w.norm()))
    return length / float(d.norm()) if d.numel() else 1.0


def braked(scaling: Any, w: Tensor, moved: Tensor) -> Tensor:
    """The new weight of RadialBrake, which lets a part of the change of the norm remain."""
    before, after = float(w.norm()), float(moved.norm())
    part = scaling.outward if after > before else scaling.inward
    return moved * ((before + part * (after - before)) / after) if before and after != before else moved


def on_sphere(scaling: Any, w: Tensor, d: Tensor, state: State, lr: float) -> Tensor:
    """The new weight of Hyperball, Algorithm 1, or of ELR on the direction, then scaled back to the norm that w had."""
    radius = state.setdefault("radius", w.norm().float().reshape(1)).double()[0]
    if radius == 0 or d.norm() == 0:
        return w - lr * d
    if isinstance(scaling, ELR):
        moved = w - lr * scaling.goal / (d.norm() / radius + scaling.eps) * d
    else:
        moved = w - lr * radius * (d / d.norm())
    return radius * (moved / moved.norm())


def sgd(
    scaling: Any, w: Tensor, g: Tensor, state: State, *, lr: float, momentum: float = 0.0, dampening: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False,
) -> Tensor:  # fmt: skip
    """The new weight."""
    spheres = isinstance(scaling, (ELR, Hyperball)) and scaling.retraction is not None
    sign, decay = -1.0 if maximize else 1.0, 0.0 if spheres else weight_decay * w
    match scaling:
        case ELR(retract="none"):
            g = sign * g * scaling.goal / (g.norm() / w.norm() + scaling.eps) + decay
        case LARC():
            g = torch.clamp(local_rate(scaling, w, g, weight_decay) / lr, max=1.0) * (sign * g + decay)
        case LARS():
            g = local_rate(scaling, w, g, weight_decay) * (sign * g + decay)
        case NormalizedGradient():
            g = sign * g / g.norm() + decay
        case NormalizedGradientAdaptive():
            g = sign * g * w.norm() / g.norm() + decay
        case ClipByLayer():
            g = sign * g * torch.clamp(scaling.max_norm / (g.norm() + 1e-6), max=1.0) + decay
        case _:
            g = sign * g + decay
    d = g
    if momentum:
        b = state.get("momentum_buffer")
        b = state["momentum_buffer"] = g if b is None else momentum * b + (1 - dampening) * g
        d = g + momentum * b if nesterov else b
    if spheres:
        return on_sphere(scaling, w, d, state, lr)
    match scaling:
        case LAMB():
            d = trust_ratio(scaling, w, d) * d
        case UpdateFloor():
            d = bounded(scaling, w, d) * d
    return braked(scaling, w, w - lr * d) if isinstance(scaling, RadialBrake) else w - lr * d


def adamw(
    scaling: Any, w: Tensor, g: Tensor, state: State, *, lr: float, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, weight_decay: float = 0.01, amsgrad: bool = False, maximize: bool = False, correct: bool = True,
) -> Tensor:  # fmt: skip
    """The new weight."""
    match scaling:
        case LARC():
            g = torch.clamp(local_rate(scaling, w, g, weight_decay) / lr, max=1.0) * g
        case LARS():
            g = local_rate(scaling, w, g, weight_decay) * g
        case NormalizedGradient():
            g = g / g.norm()
        case NormalizedGradientAdaptive():
            g = g * w.norm() / g.norm()
        case ClipByLayer():
            g = g * torch.clamp(scaling.max_norm / (g.norm() + 1e-6), max=1.0)
    g = -g if maximize else g
    t = state["step"] = state.get("step", 0) + 1
    m = state["exp_avg"] = betas[0] * state.get("exp_avg", 0 * w) + (1 - betas[0]) * g
    v = state["exp_avg_sq"] = betas[1] * state.get("exp_avg_sq", 0 * w) + (1 - betas[1]) * g * g
    if amsgrad:
        v = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", 0 * w), v)
    correction1, correction2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if correct else (1.0, 1.0)
    d = (m / correction1) / (v.sqrt() / math.sqrt(correction2) + eps)
    if isinstance(scaling, (ELR, Hyperball)) and scaling.retraction is not None:
        return on_sphere(scaling, w, d, state, lr)
    d = d + weight_decay * w
    match scaling:
        case LAMB():
            d = trust_ratio(scaling, w, d) * d
        case UpdateFloor():
            d = bounded(scaling, w, d) * d
        case ELR():
            d = scaling.goal / (d.norm() / w.norm() + scaling.eps) * d
    return braked(scaling, w, w - lr * d) if isinstance(scaling, RadialBrake) else w - lr * d


RULES = {"sgd": sgd, "adamw": adamw}


class Paper:
    """An optimizer over float64 copies of named parameters; each has separate options.

    `scaling` applies to the parameters that it selects.
    """

    def __init__(self, name: str, scaling: Any, named: Named, options: list[dict[str, Any]]):
        self.rule = RULES[name]
        self.of = [scaling if scaling is not None and scaling.selects(key, p) else None for key, p in named]
        # the correction is left out for all layers, constrained or not
        correct = {} if name == "sgd" else {"correct": getattr(scaling, "bias_correction", True)}
        self.options = [{**o, **correct} for o in options]
        self.weights = [p.detach().clone().double() for _, p in named]
        self.states: list[State] = [{} for _ in named]

    def step(self, named: Named, clip: float = 1.0) -> None:
        for i, (_, p) in enumerate(named):
            if p.grad is not None:
                g = p.grad.double() * clip
                self.weights[i] = self.rule(self.of[i], self.weights[i], g, self.states[i], **self.options[i])

    @staticmethod
    def plain(name: str, w: Tensor, g: Tensor, state: State, **options: Any) -> Tensor:
        """The new weight without a scaling."""
        return RULES[name](None, w, g, state, **options)

    def take(self, optimizer: torch.optim.Optimizer, named: Named) -> None:
        """Continue from the rounded parameters and state of an optimizer."""
        for i, (_, p) in enumerate(named):
            self.weights[i] = p.detach().double()
            self.states[i] = {
                key: value.double() if key != "step" else int(value)
                for key, value in optimizer.state.get(p, {}).items()
            }
