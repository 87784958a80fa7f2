"""Thirds of fused query / key / value projections: which are scale-invariant, by architecture and by doubling."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fused_lwlr import ELR, SGD
from fused_lwlr.methods.elr import scale_invariant

WIDTH, HEADS, LENGTH = 8, 2, 5


class Attention(nn.Module):
    """Causal attention with a fused projection, and a residual connection around it.

    Args:
        qk_norm: normalize query and key of each head before their product.
        out_norm: normalize after the output projection, before the residual connection.
        bias: of the fused projection.
    """

    def __init__(self, qk_norm=False, out_norm=False, bias=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=False)
        per_head = WIDTH // HEADS
        self.q_norm, self.k_norm = (nn.RMSNorm(per_head) if qk_norm else nn.Identity() for _ in "qk")
        self.out_norm = nn.LayerNorm(WIDTH) if out_norm else nn.Identity()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        return self.head(self.norm(x + self.out_norm(y)).mean(1))


class Torchs(nn.Module):
    """`torch.nn.MultiheadAttention`, normalized before anything is added."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.norm(self.attention(x, x, x, need_weights=False)[0]).mean(1))


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (8,), generator=generator)


THIRDS = {"query": (0, WIDTH), "key": (WIDTH, 2 * WIDTH), "value": (2 * WIDTH, 3 * WIDTH)}
# model, name of the fused weight, whether it is invariant as a whole, its invariant thirds
ROWS = {
    "plain": (Attention, {}, "qkv.weight", False, []),
    "norm on the output": (Attention, {"out_norm": True}, "qkv.weight", False, ["value"]),
    "no bias": (Attention, {"out_norm": True, "bias": False}, "qkv.weight", False, ["value"]),
    "norm on query and key": (Attention, {"qk_norm": True}, "qkv.weight", False, ["query", "key"]),
    "both": (Attention, {"qk_norm": True, "out_norm": True}, "qkv.weight", True, ["query", "key", "value"]),
    "torch's": (Torchs, {}, "attention.in_proj_weight", False, ["value"]),
}


def built(row):
    make, options, weight, *expected = ROWS[row]
    torch.manual_seed(0)
    model = make(**options).double()
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-12
    return model, weight, *expected


@pytest.mark.parametrize("biases", ["zero", "random"])
@pytest.mark.parametrize("row", ROWS)
def test_thirds(row, biases):
    """Eq. 2 is about a weight alone: with biases that are not zero, doubling decides."""
    model, weight, whole, thirds = built(row)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias") and (biases == "zero" or not name.startswith("attention.out")):
                param.normal_() if biases == "random" else param.zero_()
    result = scale_invariant(model, data(), cross_entropy, tolerance=1e-2 if biases == "zero" else 1.0)
    names = {f"{weight}[{start}:{stop}]" for start, stop in map(THIRDS.get, thirds)}
    assert (weight in result.names) is whole
    assert set(result.slices) == (set() if whole else names)
    examined = {name for name in result.cosines if "[" in name}
    assert examined == (set() if whole else {f"{weight}[{start}:{stop}]" for start, stop in THIRDS.values()})
    assert {name for name in result.reasons if "[" in name} == examined - names
    assert all(name in result for name in result.slices)


def test_names_and_rescaling_stay_with_whole_weights():
    """Names can be selected by a scaling, and a step that rescales leaves the thirds alone."""
    model, *_ = built("norm on the output")
    nn.init.zeros_(model.qkv.bias)
    result = scale_invariant(model, data(), cross_entropy)
    assert (result.names, result.slices) == (("out.weight",), ("qkv.weight[16:24]",))
    assert str(result).splitlines()[-1].startswith("1 and 1 slices of 6; ")
    optimizer = SGD(model.named_parameters(), lr=1e-20, scaling=ELR(1.0, select=result.names), rescale_weights=result)
    before = model.qkv.weight.detach().clone()
    x, y = data()
    output = model(x)
    cross_entropy(output, y).backward()
    optimizer.step()
    assert torch.equal(model.qkv.weight, before)
    assert model.out.weight.norm().item() == pytest.approx(1)
    torch.testing.assert_close(model(x), output)
