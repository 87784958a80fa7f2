"""LAMB against apex's FusedLAMB, written in float64 from the formula of its kernels."""

import pytest
import torch
from steps import gradients, parameters

from fused_lwlr import LAMB, AdamW

SHAPES = [(6, 5), (5,), (3, 4, 2), (7,)]


def apex_step(weights, grads, moments, decays, step, *, bias_correction=True, grad_averaging=True, use_nvlamb=False):
    """lr=0.01, max_grad_norm=1 and adam_w_mode=True."""
    total = torch.cat([g.flatten() for g in grads]).norm()
    corrections = (1 - 0.9**step, 1 - 0.999**step) if bias_correction else (1.0, 1.0)
    for w, g, (m, v), decay in zip(weights, grads, moments, decays, strict=True):
        clipped = g / max(total.item(), 1.0)
        m.mul_(0.9).add_(clipped, alpha=0.1 if grad_averaging else 1.0)
        v.mul_(0.999).add_(0.001 * clipped.square())
        d = (m / corrections[0]) / ((v / corrections[1]).sqrt() + 1e-6) + decay * w
        # all weights here have a norm above 0
        w.sub_(0.01 * (w.norm() / d.norm() if use_nvlamb or decay else 1.0) * d)


@pytest.mark.parametrize(
    ("apex", "decays", "scaling", "factor"),
    [
        ({}, (0.1, 0.0), {}, 1.0),
        ({}, (0.1, 0.1), {"select": "*"}, 1.0),
        ({"use_nvlamb": True}, (0.1, 0.0), {"select": "*"}, 1.0),
        ({"use_nvlamb": True}, (0.0, 0.0), {"select": "*"}, 1.0),
        ({"bias_correction": False}, (0.1, 0.0), {"bias_correction": False}, 1.0),
        ({"use_nvlamb": True, "grad_averaging": False}, (0.1, 0.05), {"select": "*"}, 0.1),
    ],
)
def test_apex_fused_lamb(apex, decays, scaling, factor, device):
    """Weights and vectors with these decays; ours are multiplied by the factor. Some steps clip, and some do not."""
    named = parameters(SHAPES, torch.float64, device)
    weights = [p.detach().clone() for _, p in named]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    of_tensor = [decays[w.dim() == 1] for w in weights]
    groups = [{"params": [pair], "weight_decay": d * factor} for pair, d in zip(named, of_tensor, strict=True)]
    ours = AdamW(groups, lr=0.01, eps=1e-6, scaling=LAMB(**scaling), clip_global_norm=1.0)
    for step in range(1, 9):
        gradients(named)
        for _, p in named:
            p.grad.mul_(0.01 if step % 2 else 3.0)
        apex_step(weights, [p.grad for _, p in named], moments, of_tensor, step, **apex)
        ours.step()
    for (_, p), w in zip(named, weights, strict=True):
        # the 1e-6 in the factor of clipping
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-7)
