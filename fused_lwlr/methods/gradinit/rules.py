"""Update rules of the scales: Adam with two first moments (the official code), or gradient descent (the paper).

A rule maps scales and gradients to new scales: one number for each parameter, in float64. A parameter without a scale
has the gradient None.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from fused_lwlr.methods.checks import Array

Branch = Literal["objective", "constraint"]


class Descent:
    """Algorithm 1 as printed: m - τ·∇, clamped from below after steps on the objective only (lines 7, 11, 12)."""

    def __init__(self, tau: float, min_scale: float) -> None:
        self.tau, self.min_scale = tau, min_scale

    def step(self, scales: Array, gradients: Sequence[float | None], branch: Branch) -> Array:
        moved = scales - self.tau * np.array([gradient or 0.0 for gradient in gradients])
        return np.asarray(np.maximum(moved, self.min_scale) if branch == "objective" else moved)


class RescaleAdam:
    """Adam as in the official code, `RescaleAdam` of github.com/zhuchen03/gradinit.

    Each branch has a separate first moment and step count; the second moment is shared, and its bias correction
    counts steps of both. The objective is divided by η, and then each gradient clipped to ±1. Both branches clamp the
    scales. A scale without a gradient, or a bias's scale that reached 0, does not change, nor do its moments and
    counts; a parameter of zeros has a gradient of 0, so its scale stays as well.

    Args:
        names: the parameters.
        min_scale: the lowest scale of parameters other than biases, whose lowest scale is 0.
        lr: η, the learning rate of the optimizer.
    """

    beta1, beta2, eps, clip = 0.9, 0.999, 1e-8, 1.0

    def __init__(self, tau: float, names: Iterable[str], min_scale: float, lr: float) -> None:
        self.tau, self.lr = tau, lr
        self.floor = np.array([0.0 if "bias" in name.rpartition(".")[2] else min_scale for name in names])
        zeros = np.zeros_like(self.floor)
        self.exp_avg: dict[Branch, Array] = {"objective": zeros.copy(), "constraint": zeros.copy()}
        self.steps: dict[Branch, Array] = {"objective": zeros.copy(), "constraint": zeros.copy()}
        self.exp_avg_sq = zeros

    def step(self, scales: Array, gradients: Sequence[float | None], branch: Branch) -> Array:
        on = np.array([gradient is not None for gradient in gradients]) & (scales != 0)
        gradient = np.array([value or 0.0 for value in gradients])[on]
        gradient = np.clip(gradient / self.lr if branch == "objective" else gradient, -self.clip, self.clip)
        exp_avg, steps = self.exp_avg[branch], self.steps[branch]
        steps[on] += 1
        exp_avg[on] = self.beta1 * exp_avg[on] + (1 - self.beta1) * gradient
        self.exp_avg_sq[on] = self.beta2 * self.exp_avg_sq[on] + (1 - self.beta2) * gradient**2
        both = self.steps["objective"][on] + self.steps["constraint"][on]
        mean = exp_avg[on] / (1 - self.beta1 ** steps[on])
        root = np.sqrt(self.exp_avg_sq[on] / (1 - self.beta2**both))
        moved: Array = scales.copy()
        moved[on] = np.maximum(scales[on] - self.tau * mean / (root + self.eps), self.floor[on])
        return moved
