"""Second derivatives through `scaled_dot_product_attention`, against attention written out."""

import pytest
import torch
from torch import nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from unchanged import unchanged

from fused_lwlr import gradinit_, metainit_

BACKENDS = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled)


class Attention(nn.Module):
    """Post-LN causal attention, by `scaled_dot_product_attention` or written out, and logits of the next word."""

    def __init__(self, fused):
        super().__init__()
        self.fused, self.embed = fused, nn.Embedding(9, 8)
        self.qkv, self.out, self.norm, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y = (q @ k.mT / 4**0.5).masked_fill(future, -torch.inf).softmax(3) @ v
        return self.head(self.norm(x + self.out(y.transpose(1, 2).flatten(2))))


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 9, (4, 5), generator=generator) for _ in range(4)]


def next_word(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (gradinit_, {"lr": 0.1, "relative_gamma": 0.9, "tau": 0.05, "steps": 6}),
        (gradinit_, {"lr": 0.01, "relative_gamma": 0.9, "tau": 0.05, "steps": 6, "optimizer": "adam"}),
        (metainit_, {"steps": 3}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_second_order_through_attention(function, options, dtype):
    """The same scales as with attention written out, and an unchanged choice of kernels."""
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        model = Attention(fused).to(dtype)
        model.norm.eval()
        weights, kernels = [p.detach().clone() for p in model.parameters()], [enabled() for enabled in BACKENDS]
        with unchanged(model, weights=False):
            results.append(function(model, batches(), next_word, **options))
        assert [enabled() for enabled in BACKENDS] == kernels
        for p, w, scale in zip(model.parameters(), weights, results[-1].scales.values(), strict=True):
            assert torch.equal(p, w * scale)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]
    found, expected = (list(result.scales.values()) for result in results)
    assert found == pytest.approx(expected, rel=tolerance)
    if function is gradinit_:
        branches = [[step.branch for step in result.history] for result in results]
        assert branches[0] == branches[1]
        assert {*branches[0]} == {"constraint", "objective"}


def test_fused_attention_has_no_second_derivative_by_itself():
    """The reason why `gradinit_` chooses another kernel; if this fails, torch supports it now."""
    torch.manual_seed(1)
    model = Attention(fused=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = next_word(model(batches()[0]), batches()[0])
        (gradient,) = torch.autograd.grad(loss, model.qkv.weight, create_graph=True)
        with pytest.raises(RuntimeError, match="scaled_dot_product"):
            gradient.norm().backward()
