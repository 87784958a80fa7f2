"""Lion, one tensor at a time, as the paper has it (Symbolic Discovery of Optimization Algorithms, Algorithm 2)."""

import torch
from torch import Tensor


def sign(x: Tensor) -> Tensor:
    """NaN of NaN, unlike `torch.sign`."""
    return torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x)).to(x.dtype)


class PlainLion(torch.optim.Optimizer):
    """Takes and ignores `foreach`, as torch's own optimizers have it."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False, foreach=None):
        own = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**own, "foreach": foreach, "fused": None, "differentiable": False})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                g = -w.grad if group["maximize"] else w.grad
                m = self.state[w].setdefault("exp_avg", torch.zeros_like(w))
                c = beta1 * m + (1 - beta1) * g
                w.mul_(1 - lr * decay).sub_(sign(c) * lr)
                m.copy_(beta2 * m + (1 - beta2) * g)
