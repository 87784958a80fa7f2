"""What Python does in a step does not grow with the number of tensors: loops over them are in C."""

import sys

import pytest
import torch

import fused_lwlr
from bench.without_launch import without_launch
from fused_lwlr.kernels.triton import native

STEPS = {
    "SGD": (fused_lwlr.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD ELR": (fused_lwlr.SGD, {"lr": 0.1, "momentum": 0.9, "scaling": fused_lwlr.ELR(0.1, select="*")}),
    "AdamW": (fused_lwlr.AdamW, {"lr": 1e-3}),
    "AdamW LARS": (fused_lwlr.AdamW, {"lr": 1e-3, "scaling": fused_lwlr.LARS(select="*")}),
}


def calls(name, tensors, reallocate):
    """Calls of functions in one step, those of C among them."""
    cls, options = STEPS[name]
    named = [(f"p{i}", torch.nn.Parameter(torch.ones(8))) for i in range(tensors)]
    optimizer = cls(named, multipliers={name: 0.5 for name, _ in named}, backend="triton", **options)
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    for step in range(4):
        for _, param in named:
            if param.grad is None or reallocate:
                param.grad = torch.ones(8)
        optimizer.param_groups[0]["lr"] *= 0.9
        counted = 0
        sys.setprofile(count if step == 3 else None)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    return counted


@pytest.mark.skipif(native._compiled() is None, reason="needs torch 2.10 and a C compiler")
@pytest.mark.parametrize("reallocate", [False, True], ids=["kept", "new"])
@pytest.mark.parametrize("name", STEPS)
def test_calls_do_not_grow(name, reallocate):
    with without_launch():
        few, many = (calls(name, tensors, reallocate) for tensors in (2, 50))
    assert few == many
    assert few < 160
