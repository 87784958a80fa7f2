"""Arguments of scale_invariant, its result, and that it leaves the model unchanged."""

import random
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from steps import saved, through_pickle
from torch import nn
from torch.nn.functional import cross_entropy
from unchanged import unchanged
from zoo import build, conv_bias
from zoo_parts import conv, data, found, of

from fused_lwlr.methods.elr import scale_invariant


def test_mapping_outputs_and_extra_tensors():
    """A mapping with a tensor of another first size; outputs in a mapping; no gradient mode; an odd number."""

    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = conv_bias()[0]

        def forward(self, x, y, weight, note):
            output = self.net(x)
            return {"loss": cross_entropy(output, y, weight), "more": [{"logits": output}], "note": note}

    model = Keyed()
    x, y = data(9)
    batch = {"weight": torch.rand(4), "x": x, "y": y, "note": "as it is"}
    with torch.no_grad():
        result = scale_invariant(model, batch, lambda output, batch: output["loss"])
    assert found(model, result) == (["net.conv.weight"], of("net.conv.bias"), of("net.bn"))


def test_backends_agree(device):
    model, *expected = build("dropout")
    model.to(device)
    for backend in ("torch", "triton"):
        assert found(model, scale_invariant(model, data(), cross_entropy, backend=backend)) == tuple(expected)


def test_table_and_membership():
    model, *_ = build("conv_bias")
    result = scale_invariant(model, data(), cross_entropy)
    assert len(result) == 1
    assert "conv.weight" in result
    assert "head.weight" not in result
    lines = str(result).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["layer", "conv.weight", "head.weight"]
    assert lines[1].endswith("yes")
    assert lines[2].endswith("it is not perpendicular to its gradient")
    assert lines[3] == "1 of 2; 1 biases and the running statistics of 1 normalizations are rescaled with them"


@pytest.mark.parametrize("copied", [deepcopy, through_pickle, partial(saved, weights_only=False)])
def test_copies_stay_together(copied):
    model, *_ = build("resnet")
    model.conv = conv(3, 16, bias=True)
    result = scale_invariant(model, data(), cross_entropy)
    other, its_result = copied((model, result))
    assert found(other, its_result) == found(model, result)
    assert its_result.biases[0][0] is other.conv.bias
    assert (its_result.cosines, its_result.reasons) == (result.cosines, result.reasons)


@pytest.mark.parametrize("fails_at", [None, 1, 2, 3, 4, 6, 9])
def test_model_and_generators_are_as_before(fails_at):
    model, *_ = build("dropout")
    model(data()[0])
    model.eval()
    model.bn.train()
    model.conv.weight.grad = torch.randn_like(model.conv.weight)
    inner, calls = model.function, []

    def forward(m, x):
        calls.append(0)
        random.random()
        np.random.rand()
        output = inner(m, x)
        if len(calls) == fails_at:
            raise KeyboardInterrupt
        return output

    model.function = forward
    with unchanged(model), pytest.raises(KeyboardInterrupt) if fails_at else nullcontext():
        scale_invariant(model, data(), cross_entropy, tolerance=1.0)
    # halves, base in both modes, three weights alone, two together in both modes
    assert len(calls) == (fails_at or 9)


@pytest.mark.parametrize(
    ("batch", "loss_fn", "message"),
    [
        (data(3), cross_entropy, "3 samples: at least 4"),
        ((1, 2), cross_entropy, "0 samples"),
        (torch.randint(0, 4, (3, 2)), cross_entropy, "3 samples: at least 4"),
        (data(), lambda output, y: cross_entropy(output, y) * float("nan"), r"'conv\.weight'.* not finite"),
    ],
)
def test_refused(batch, loss_fn, message):
    model, *_ = build("conv_bias")
    with unchanged(model), pytest.raises(ValueError, match=message):
        scale_invariant(model, batch, loss_fn)


def test_refused_models():
    model, *_ = build("conv_bias")
    inner = model.function
    model.function = lambda m, x: {inner(m, x)}  # a set is not searched for tensors
    with pytest.raises(ValueError, match="no finite"):
        scale_invariant(model, data(), lambda output, y: cross_entropy(next(iter(output)), y))
    with pytest.raises(ValueError, match="two or more dimensions"):
        scale_invariant(nn.BatchNorm1d(3), data(), cross_entropy)
    with pytest.raises(ValueError, match="tolerance='1' must be at least 0"):
        scale_invariant(nn.Linear(3, 3), data(), cross_entropy, tolerance="1")
    with pytest.raises(ValueError, match="tolerance=nan must be at least 0"):
        scale_invariant(nn.Linear(3, 3), data(), cross_entropy, tolerance=float("nan"))
