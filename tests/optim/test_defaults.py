"""The default device and the default dtype of the process: no step depends on them."""

from contextlib import contextmanager
from itertools import cycle

import pytest
import torch
from cases import long
from steps import OPTIONS, OURS, identical, snapshot, uniform
from torch import nn

from fused_lwlr import ELR, LAMB, BalancedLR, Hyperball, calibrate, layer_statistics
from fused_lwlr.methods.gradinit.metainit import gaussian_batches

ROWS = [
    {},
    {"scaling": ELR(0.1), "ema": 0.9},
    {"scaling": LAMB(), "master_weights": True},
    {"scaling": BalancedLR(), "stochastic_rounding": True},
    {"clip_global_norm": 0.5, "nonfinite": "skip", "state_dtype": torch.bfloat16},
    {"nonfinite": "raise", "layers": {"half": 0.5, "full[0:1]": 2.0}},
    {"capturable": True},
    {"scaling": Hyperball()},
]


@contextmanager
def double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def trained(name, backend, options, device):
    """A few steps on parameters of two dtypes, through a state dict; all that came of them."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def values(dtype):
        return torch.rand(4, 3, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    named = [("full", nn.Parameter(values(torch.float32))), ("half", nn.Parameter(values(torch.bfloat16)))]
    optimizer = OURS[name](named, **OPTIONS[name], **options, backend=backend)
    for i in range(4):
        for _, param in named:
            param.grad = values(param.dtype)
        if i == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    stats = layer_statistics(named, backend=backend).to_dict()
    if isinstance(options.get("scaling"), (ELR, LAMB)):
        stats |= optimizer.layer_stats().to_dict()
    if "ema" in options:
        with optimizer.averaged():
            stats["averaged"] = named[0][1].detach().clone()
    return snapshot(optimizer, named), stats


@pytest.mark.parametrize(
    ("name", "backend", "options"),
    [(name, "torch", options) for name in OURS for options in ROWS]
    # kernels of both rules, but each option with one of them
    + [("sgd", "triton", ROWS[0]), ("adamw", "triton", ROWS[5]), ("sgd", "triton", ROWS[6])]
    + [
        long(name, "triton", options)
        for i, (name, options) in enumerate(zip(cycle(OURS), ROWS, strict=False))
        if i not in (0, 5, 6)
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_steps_do_not_depend_on_defaults(name, backend, options, device):
    expected = trained(name, backend, options, device)
    with torch.device("meta"):
        assert identical(trained(name, backend, options, device), expected)
    with double():
        assert identical(trained(name, backend, options, device), expected)


def test_calibration_does_not_depend_on_the_default_device(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    batches = [(uniform((6, 4), torch.float32, device), torch.zeros(6, dtype=torch.long, device=device))]
    expected = dict(calibrate(model, batches, nn.functional.cross_entropy))
    with torch.device("meta"):
        assert dict(calibrate(model, batches, nn.functional.cross_entropy)) == expected


@pytest.mark.parametrize("default", [lambda: torch.device("meta"), double], ids=["device", "dtype"])
def test_random_minibatches_do_not_depend_on_defaults(default):
    expected = next(gaussian_batches((4, 3), 2))
    with default():
        found = next(gaussian_batches((4, 3), 2))
    assert identical(found, expected)
