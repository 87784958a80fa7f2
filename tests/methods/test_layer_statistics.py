"""Public statistics of models and named tensors."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fused_lwlr import layer_statistics
from fused_lwlr.measure.layers import named_layers
from fused_lwlr.measure.statistics import StatisticsPass


def model_with_gradients(device):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(7, 5),
            "low": nn.Linear(5, 3).bfloat16(),
            "idle": nn.Linear(2, 2),
            "last": nn.Linear(3, 1, bias=False),
        }
    )
    model.to(device)
    for name in ("linear", "low", "last"):
        for p in model[name].parameters():
            p.grad = torch.randn_like(p)
    model["linear"].bias.grad[1] = float("inf")
    return model


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("form", ["model", "pairs", "mapping"])
def test_against_torch(form, backend, device):
    model = model_with_gradients(device)
    source = {"model": model, "pairs": model.named_parameters(), "mapping": dict(model.named_parameters())}[form]
    stats = layer_statistics(source, backend=backend)
    assert stats.names == ("linear.weight", "linear.bias", "low.weight", "low.bias", "last.weight")
    assert stats.numel == (35, 5, 15, 3, 3)
    for i, name in enumerate(stats.names):
        w, g = model.get_parameter(name).detach().double(), model.get_parameter(name).grad.double()
        expected = [g.abs().sum(), g.norm(), g.abs().max(), w.norm(), (g * w).sum(), (~g.isfinite()).sum()]
        columns = ("abs_sum", "grad_norm", "abs_max", "weight_norm", "dot", "nonfinite")
        found = [getattr(stats, column)[i] for column in columns]
        torch.testing.assert_close(torch.stack(found), torch.stack(expected).to(found[0]), rtol=1e-6, atol=1e-6)
        assert list(stats.to_dict()[name]) == ["numel", *columns]
    assert len(str(stats).splitlines()) == 6


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (nn.Linear(2, 2).parameters(), "Parameter containing: tensor"), ({"w": 1}, r"\('w', 1\)"), (None, "None"),
        ([("w",)], r"\('w',\)"), (enumerate(nn.Linear(2, 2).parameters()), r"\(0, Parameter containing"),
    ],
)  # fmt: skip
def test_sources_that_have_no_named_tensors(source, message):
    what = r"source= must be the model, or named tensors such as model\.named_parameters\(\), not"
    with pytest.raises(ValueError, match=f"{what} {message}"):
        layer_statistics(source)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("which", ["weight", "gradient"])
def test_freed_memory(which, backend):
    """To read it would end the process. It is refused in the first call, and in a later one."""
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    passes = [StatisticsPass(named_layers(layer), backend) for layer in layers]
    for layer in layers:
        layer(torch.ones(1, 3)).sum().backward()
    passes[1]()
    for layer, measure in zip(layers, passes, strict=True):
        tensor = layer.weight if which == "weight" else layer.weight.grad
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"the storage of .*{'weight' if which == 'weight' else 'gradient of'}"):
            measure()


def test_refused():
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        layer_statistics({})
    model = nn.Embedding(4, 3, sparse=True)
    for without in (model, nn.ReLU()):
        with pytest.raises(ValueError, match="no parameter has a gradient"):
            layer_statistics(without)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"'weight' is torch\.sparse_coo"):
        layer_statistics(model)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_parameters_that_are_elsewhere(backend, device):
    model = nn.Linear(3, 2).to(device)
    measure = StatisticsPass(named_layers(model), backend)
    for change in (lambda w: w, lambda w: 2 * w, lambda w: w.bfloat16(), lambda w: w.T.contiguous().T):
        model.weight.data = change(model.weight.data)
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        measured = measure().weight_norm.square()
        expected = torch.stack([param.detach().double().square().sum() for param in model.parameters()])
        torch.testing.assert_close(measured, expected, rtol=1e-6, atol=0)


def test_tensors_that_kernels_cannot_reach(device):
    """They are measured in successive calls, too."""
    weight = nn.Parameter(TwoTensor(*(torch.ones(3, device=device) for _ in range(2))))
    measure = StatisticsPass(named_layers({"weight": weight}), "auto")
    for value in (1.0, 2.0):
        weight.grad = TwoTensor(*(torch.full((3,), value, device=device) for _ in range(2)))
        assert measure().abs_sum.tolist() == [3 * value]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradients_of_other_dtypes_and_strides(backend, device):
    """Successive calls with other gradients."""
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16, device=device))
    measure = StatisticsPass(named_layers({"weight": weight}), backend)
    for change in (torch.Tensor.float, torch.clone, lambda g: g.T.contiguous().T, torch.clone, torch.Tensor.float):
        grad = change(torch.arange(12.0, device=device).reshape(3, 4).bfloat16())
        weight.grad = None
        # `.grad` requires the parameter's dtype when it is assigned, but its data may have another one
        weight.grad = torch.zeros_like(weight)
        weight.grad.data = grad
        assert measure().abs_sum[0] == 66


@pytest.mark.parametrize(
    ("dtype", "backend", "refused"),
    [
        (torch.float64, "auto", None),
        (torch.float64, "torch", None),
        (torch.float64, "triton", r"backend='triton' cannot work on torch\.float64"),
        (torch.float8_e4m3fn, "auto", r"backend='auto' cannot work on torch\.float8_e4m3fn"),
    ],
)
def test_gradients_that_kernels_do_not_take(dtype, backend, refused, device):
    weight = nn.Parameter(torch.ones(3, 4, device=device))
    weight.grad = torch.zeros_like(weight)
    weight.grad.data = torch.full_like(weight, 0.5).to(dtype)
    if refused is None:
        assert layer_statistics({"weight": weight}, backend=backend).abs_sum.tolist() == [6]
    else:
        with pytest.raises(ValueError, match=refused):
            layer_statistics({"weight": weight}, backend=backend)
