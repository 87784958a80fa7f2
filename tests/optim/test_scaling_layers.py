"""The layers of a scaling: a tensor or a slice of one, of any size and dtype, with its η."""

import pytest
import torch
from cases import VARIANTS, every_case
from steps import OPTIONS, OURS, gradients, parameters, train
from tolerances import close

from fused_lwlr import ELR


@pytest.mark.parametrize(
    ("name", "backend", "scaling"),
    [("sgd", "torch", s) for s in VARIANTS]
    + [("adamw", "torch", s) for s in VARIANTS]
    + [("sgd", "triton", VARIANTS[2]), ("adamw", "triton", VARIANTS[0])],
)
def test_slices_are_layers(name, backend, scaling, device):
    """Slices have separate norms and factors, also at block boundaries and where rows are not aligned."""
    inner = 700 if backend == "torch" else 9
    ((key, param),) = named = parameters([(10, inner)], torch.float32, device)
    cuts = [(0, 4, 0.5), (4, 5, 1.0), (5, 9, 3.0), (9, 10, 1.0)]
    multipliers = {f"{key}[{a}:{b}]": eta for a, b, eta in cuts if eta != 1}
    options = {**OPTIONS[name], "scaling": scaling, "backend": backend}
    ours = OURS[name](named, **options, layers=multipliers)
    pieces = [(str(a), torch.nn.Parameter(param.detach()[a:b].clone())) for a, b, _ in cuts]
    groups = [{"params": [pair], "lr": options["lr"] * eta} for pair, (*_, eta) in zip(pieces, cuts, strict=True)]
    others = OURS[name](groups, **options)
    for _ in range(2):
        gradients(named)
        for (_, piece), (a, b, _) in zip(pieces, cuts, strict=True):
            piece.grad = param.grad[a:b].clone()
        ours.step()
        others.step()
    close(param.detach(), torch.cat([piece.detach() for _, piece in pieces]), 3)
    stats = ours.layer_stats()
    assert stats.names == tuple(f"{key}[{a}:{b}]" for a, b, _ in cuts)
    torch.testing.assert_close(stats.trust_ratio, others.layer_stats().trust_ratio, rtol=1e-6, atol=0)


@every_case
def test_nothing_but_empty_tensors(name, backend, device):
    named = parameters([(0, 3), (0,)], torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], scaling=ELR(0.1), clip_global_norm=1.0, backend=backend)
    train((optimizer,), (named,), 2)
    stats = optimizer.layer_stats()
    assert stats.grad_norm.tolist() == [0, 0]
    assert stats.trust_ratio.tolist() == [1, 1]
