"""One step of every method in float64, a tensor at a time, from the formulas: contestants must agree with it.

SGD: torch.optim.SGD with momentum; AdamW: Decoupled Weight Decay Regularization, Algorithm 2; ELR: Spreads in Effective
Learning Rates, Eq. 14; LARS: Large Batch Training of Convolutional Networks, Algorithm 1; LAMB: Large Batch
Optimization for Deep Learning, Algorithm 2; NG: Block-Normalized Gradient Method, Algorithm 1.
"""

from torch import Tensor

MOMENTUM, BETAS, EPS = 0.9, (0.9, 0.999), 1e-8
DECAY = {"sgd": 1e-4, "adamw": 1e-2}
# these numbers keep all methods different: ELR of a direction with a goal of 1 would be LAMB
GOAL, ELR_EPS = 0.5, 1e-5
TRUST, LARS_EPS = 0.1, 1e-8
MAX_NORM = 1.0
MULTIPLIER = 0.5
"""Numbers that all contestants share."""


def step(
    rule: str, method: str, lr: float, weights: list[Tensor], grads: list[Tensor], state: list[dict[str, Tensor]]
) -> None:
    """One step, in place; `state` begins with empty dicts."""
    total = sum(g.square().sum() for g in grads) ** 0.5
    clip = min(1.0, float(MAX_NORM / (total + 1e-6))) if method == "clip" else 1.0
    rate = lr * MULTIPLIER if method == "multipliers" else lr
    for w, g, memory in zip(weights, grads, state, strict=True):
        w -= rate * (_sgd if rule == "sgd" else _adamw)(method, rate, w, g * clip, memory)


def _sgd(method: str, lr: float, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
    decay = DECAY["sgd"]
    trust = TRUST * w.norm() / (g.norm() + decay * w.norm() + LARS_EPS)
    factor = {"LARS": float(trust), "LARC": min(float(trust) / lr, 1.0)}.get(method, 1.0)
    if method == "ELR":
        g = g * GOAL / (g.norm() / w.norm() + ELR_EPS)
    elif method == "NG":
        g = g / g.norm()
    d = factor * (g + decay * w)
    # the first step uses the gradient itself
    memory["momentum"] = MOMENTUM * memory["momentum"] + d if "momentum" in memory else d
    return memory["momentum"]


def _adamw(method: str, lr: float, w: Tensor, g: Tensor, memory: dict[str, Tensor]) -> Tensor:
    t = memory["t"] = memory.get("t", g.new_zeros(())) + 1
    m = memory["m"] = BETAS[0] * memory.get("m", g * 0) + (1 - BETAS[0]) * g
    v = memory["v"] = BETAS[1] * memory.get("v", g * 0) + (1 - BETAS[1]) * g * g
    d = m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS) + DECAY["adamw"] * w
    if method == "LAMB":
        return d * w.norm() / d.norm()
    return d * GOAL / (d.norm() / w.norm() + ELR_EPS) if method == "ELR" else d
