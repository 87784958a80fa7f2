"""Optimizers of this library that timm makes by their names."""

import importlib
import sys
import unittest
from argparse import Namespace
from functools import partial

import pytest
import torch
from plain_lion import PlainLion
from small_vit import load, vit_twins
from steps import compare, train
from tolerances import close, same

import fused_lwlr
from fused_lwlr import LAMB, LARS

STEPS = 4
DECAY = 0.1
# name -> class, and what to register with timm, which gives it groups: torch's class, or ours with a scaling
CLASSES = {
    "fusedlwlrsgd": (fused_lwlr.SGD, {"opt_class": torch.optim.SGD, "defaults": {"nesterov": True, "foreach": False}}),
    "fusedlwlradamw": (fused_lwlr.AdamW, {"opt_class": torch.optim.AdamW, "defaults": {"foreach": False}}),
    "fusedlwlrlion": (fused_lwlr.Lion, {"opt_class": PlainLion}),
    "fusedlwlrlars": (
        fused_lwlr.SGD, {"opt_class": fused_lwlr.SGD, "defaults": {"scaling": LARS(), "backend": "torch"}}
    ),
    "fusedlwlrlamb": (
        fused_lwlr.AdamW, {"opt_class": fused_lwlr.AdamW, "defaults": {"scaling": LAMB(), "backend": "torch"}}
    ),
}  # fmt: skip
OPTIONS = [
    {"weight_decay": DECAY}, {"weight_decay": DECAY, "layer_decay": 0.6}, {"weight_decay": 0.0},
    {"weight_decay": DECAY, "layer_decay": 0.5, "layer_decay_min_scale": 0.2, "layer_decay_no_opt_scale": 0.3},
]  # fmt: skip


@pytest.fixture(autouse=True)
def registry(timm, monkeypatch):
    """timm's registry, as it was before."""
    load(timm)
    found = importlib.import_module("timm.optim._optim_factory").default_registry
    monkeypatch.setattr(found, "_optimizers", dict(found._optimizers))
    return found


@pytest.fixture
def twins(timm, device):
    return vit_twins(timm, device, depth=2)


def learned(model):
    return [(key, p) for key, p in model.named_parameters() if p.requires_grad]


def train_with_scheduler(timm, optimizers, twins):
    schedulers = [
        timm.scheduler.create_scheduler_v2(optimizer, "cosine", num_epochs=5, warmup_epochs=2, warmup_lr=0.001)[0]
        for optimizer in optimizers
    ]
    for epoch in range(STEPS):
        train(optimizers, [learned(model) for model in twins], 1)
        for scheduler in schedulers:
            scheduler.step(epoch + 1)


# every optimizer with layer decay, and SGD with the rest too; fast tests leave the other pairs out
@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, options, id=f"{name}-{'-'.join(options)}",
                  marks=() if name == "fusedlwlrsgd" or options is OPTIONS[1] else pytest.mark.long)
     for name in CLASSES for options in OPTIONS],
)  # fmt: skip
def test_same_bits_as_with_the_groups_of_timm(name, options, timm, registry, twins):
    """One group with layers, against the groups of timm, both with a scheduler of timm."""
    assert name in fused_lwlr.register_timm()
    cls, plain = CLASSES[name]
    registry.register(timm.optim.OptimInfo("plain", **plain, has_eps=False, has_momentum=cls is fused_lwlr.SGD))
    ours = timm.optim.create_optimizer_v2(twins[0], name, lr=0.01, backend="torch", **options)
    other = timm.optim.create_optimizer_v2(twins[1], "plain", lr=0.01, **options)
    assert type(ours) is cls
    assert len(ours.param_groups) == 1
    if "layer_decay" in options:
        assert len(other.param_groups) > 3
    train_with_scheduler(timm, (ours, other), twins)
    compare(same, ours, other, *map(learned, twins))


def test_as_train_py_makes_them(timm, twins):
    """With the arguments of timm's train.py, and with kernels."""
    fused_lwlr.register_timm()
    parsed = {
        "lr": 0.01,
        "weight_decay": DECAY,
        "momentum": 0.9,
        "layer_decay": 0.6,
        "opt_eps": None,
        "opt_betas": None,
    }
    ours, other = (
        timm.optim.create_optimizer_v2(model, **timm.optim.optimizer_kwargs(Namespace(opt=opt, **parsed)), **more)
        for model, opt, more in zip(twins, ("fusedlwlradamw", "adamw"), ({"backend": "triton"}, {}), strict=True)
    )
    train_with_scheduler(timm, (ours, other), twins)
    compare(partial(close, steps=STEPS), ours, other, *map(learned, twins))


def test_what_timm_does_with_names(timm, twins):
    """Names have no "_", options of the user replace defaults, and Lookahead is around them."""
    names = fused_lwlr.register_timm()
    assert list(CLASSES) == names
    for name in names:
        optimizer = timm.optim.create_optimizer_v2(twins[0], f"lookahead_{name}", lr=0.01)
        assert type(optimizer._base_optimizer) is CLASSES[name][0]
        assert "fused_lwlr" in timm.optim.get_optimizer_info(name).description
    plain = timm.optim.create_optimizer_v2(twins[0], names[0], lr=0.01, nesterov=False, momentum=0.5)
    assert (plain.param_groups[0]["nesterov"], plain.param_groups[0]["momentum"]) == (False, 0.5)
    named = timm.optim.create_optimizer_v2(list(twins[0].named_parameters()), names[1], lr=0.01, layers={"*bias": 0.5})
    assert named.layers()["head.bias"]["lr"] == 0.005
    groups = [{"params": [p], "lr": 0.1 / i} for i, p in enumerate(twins[0].parameters(), 1)]
    assert len(timm.optim.create_optimizer_v2(groups, names[1]).param_groups) == 1


def test_registering_twice_changes_nothing(registry):
    fused_lwlr.register_timm()
    before = dict(registry._optimizers)
    with unittest.TestCase().assertNoLogs(level="WARNING"):
        fused_lwlr.register_timm()
    assert registry._optimizers == before


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"register_timm\(\) needs timm .*: pip install '\.\[timm\]'"):
        fused_lwlr.register_timm()


def test_a_timm_without_a_registry(timm, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim._optim_factory", torch)
    with pytest.raises(ImportError, match=r"timm 1\.\S+ has no registry of optimizers: install timm 1\.0\.12 or newer"):
        fused_lwlr.register_timm()
