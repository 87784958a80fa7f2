"""A scaling of your own: adaptive gradient clipping, layer by layer, in the launch of the step.

    python own_scaling.py

    g ← min(1, clipping · max(‖w‖, floor) / ‖g‖) · g

High-Performance Large-Scale Image Recognition Without Normalization (Brock et al., 2021) clips each row of a weight
like this (Equation 3); here a whole layer is clipped.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import nn

import fused_lwlr
from fused_lwlr.kernels.formula import maximum, minimum, where
from fused_lwlr.scaling import Scaling


@dataclass(frozen=True)
class AdaptiveClip(Scaling):
    """Clips ‖g‖ of each layer to a multiple of ‖w‖."""

    clipping: float = 0.01
    floor: float = 1e-3

    targets = ("gradient",)  # the factor multiplies the gradient, before momentum

    @staticmethod
    def formula(norm, weight_norm, clipping, floor):
        """The factor of a layer. Triton compiles this function, so it has only operators and names of `formula`."""
        bound = clipping * maximum(weight_norm, floor)
        return minimum(bound / where(norm > 0, norm, 1.0), 1.0)


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--clipping", type=float, default=0.01)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
x, targets = torch.randn(64, 20), torch.randint(10, (64,))
optimizer = fused_lwlr.SGD(model.named_parameters(), lr=0.1, scaling=AdaptiveClip(args.clipping))

nn.functional.cross_entropy(model(x), targets).backward()
with torch.no_grad():  # the same step, written out
    expected = {}
    for name, w in model.named_parameters():
        bound = args.clipping * max(w.norm().item(), 1e-3)
        clipped = w.grad * min(1.0, bound / w.grad.norm().item()) if w.dim() >= 2 else w.grad
        expected[name] = w - 0.1 * clipped
optimizer.step()

print(optimizer.layer_stats())
for name, w in model.named_parameters():
    torch.testing.assert_close(w.detach(), expected[name])
print("The step is the one that was written out.")
