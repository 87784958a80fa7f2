"""Steps of the PyTorch reference without float64, as on MPS: a CPU on which an operation must not return float64."""

import importlib

import pytest
import torch
from cases import SCALINGS, name_of
from steps import ALL, OPTIONS, parameters, train
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fused_lwlr

USE_SUMS = (
    "kernels.step_arguments", "kernels.reference.step", "kernels.reference.statistics", "kernels.rules.adamw",
    "optim.members",
)  # fmt: skip


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_leaves(results)):
            raise TypeError(f"{func} returned float64")
        return results


@pytest.fixture(autouse=True)
def sums_as_on_mps(monkeypatch):
    precision = importlib.import_module("fused_lwlr.kernels.tensors")
    assert precision.sum_dtype(torch.device("mps")) == torch.float32
    for name in USE_SUMS:
        monkeypatch.setattr(importlib.import_module(f"fused_lwlr.{name}"), "sum_dtype", lambda device: torch.float32)


def run(name, dtype=torch.float32, scaler=False, **options):
    named = parameters([(6, 5), (5,)], dtype, torch.device("cpu"))
    optimizer = ALL[name](named, **OPTIONS[name], **options, backend="torch")
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for _, p in named]
    with NoFloat64():
        for _ in range(2):
            if scaler:
                grad_scaler.scale(sum(p.square().sum() for _, p in named)).backward()
                grad_scaler.step(optimizer)
                grad_scaler.update()
            else:
                train([optimizer], [named], 1)
    assert all(
        p.isfinite().all() and not torch.equal(p.detach(), old) for (_, p), old in zip(named, before, strict=True)
    )


OPTIONS_OF_STEPS = [
    {}, {"layers": {"p0": {"lr": 2.0, "weight_decay": 0}}}, {"ema": 0.9}, {"clip_global_norm": 1.0}, {"scaler": True},
    {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "master_weights": True},
    *({"scaling": scaling} for scaling in SCALINGS),
    # counted on the device
    {"nonfinite": "skip"}, {"nonfinite": "raise"}, {"capturable": True},
    {"dtype": torch.bfloat16, "stochastic_rounding": True},
]  # fmt: skip


@pytest.mark.parametrize(
    "options", OPTIONS_OF_STEPS, ids=lambda options: "-".join([*options, *map(name_of, options.values())]) or "plain"
)
@pytest.mark.parametrize("name", ALL)
def test_steps(name, options):
    run(name, **options)


def test_statistics():
    model = torch.nn.Linear(3, 2)
    with NoFloat64():
        model(torch.ones(4, 3)).square().mean().backward()
        found = fused_lwlr.layer_statistics(model, backend="torch")
    torch.testing.assert_close(found.grad_norm, torch.stack([p.grad.norm() for p in model.parameters()]))
