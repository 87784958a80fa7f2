"""SGD whose matrices stay on spheres, one tensor at a time, as in the paper (arXiv:2606.16899)."""

import torch
from torch import Tensor


def norm(x: Tensor) -> Tensor:
    """The norm from squares in single precision; infinite if these overflow."""
    x = x if x.dtype == torch.float64 else x.float()
    return x.square().sum(dtype=torch.float64).sqrt()


class PlainHyperball(torch.optim.SGD):
    """Has the same state as our optimizer; its radii stay float32."""

    def __init__(self, params, *, scaling=None, **options):
        super().__init__(params, **options)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for param, key in zip(params, keys, strict=True):
            if "radius" in state_dict["state"].get(key, {}):
                self.state[param]["radius"] = state_dict["state"][key]["radius"].clone()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    self._step(group, w)

    def _step(self, group, w):
        g, lr, matrix = -w.grad if group["maximize"] else w.grad, group["lr"], w.dim() >= 2
        if group["weight_decay"] and not matrix:
            g = g + group["weight_decay"] * w
        u = g
        if group["momentum"]:
            b = self.state[w].get("momentum_buffer")
            if b is None:
                b = self.state[w]["momentum_buffer"] = torch.zeros_like(w).add_(g)
            else:
                b.mul_(group["momentum"]).add_(g, alpha=1 - group["dampening"])
            u = g + group["momentum"] * b if group["nesterov"] else b
        if not matrix:
            w.sub_(lr * u)
            return
        radius = self.state[w].setdefault("radius", norm(w).float().reshape(1))[0].double()
        if not (radius > 0 and norm(u) > 0):
            w.sub_(lr * u)
            return
        moved = w.double() - lr * radius / norm(u) * u.double()
        # elements that are not finite do not change the scale of the others
        if norm(u).isfinite() and norm(moved) > 0:
            moved = moved * (radius / norm(moved))
        w.copy_(moved)
