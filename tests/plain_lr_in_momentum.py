"""SGD with the learning rate in the momentum buffer, one tensor at a time."""

import torch


class PlainLRInMomentum(torch.optim.SGD):
    """Has the param groups of ours."""

    def __init__(self, params, *, lr_in_momentum, **options):
        assert lr_in_momentum
        super().__init__(params, **options)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["lr_in_momentum"] = True

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                g = -w.grad if group["maximize"] else w.grad
                if group["weight_decay"]:
                    g = g.add(w, alpha=group["weight_decay"])
                g = g * group["lr"]
                b = self.state[w].setdefault("momentum_buffer", torch.zeros_like(w))
                b.mul_(group["momentum"]).add_(g)
                w.sub_(g.add(b, alpha=group["momentum"]) if group["nesterov"] else b)
