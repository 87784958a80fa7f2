"""Corrected weight decay, which follows lr, and cautious weight decay, which does not act against the step."""

import pickle
from functools import partial

import pytest
import torch
from cases import every_backend, long
from pairs import compare_weights, twin_parameters
from plain_lion import PlainLion
from steps import ALL, OPTIONS, SHAPES, TORCH, compare, gradients, parameters, saved, train, twin
from tolerances import EPS, close, same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

import fused_lwlr
from fused_lwlr import multipliers

PLAIN = {**TORCH, "lion": PlainLion}
CORRECTED = {"p0": {"corrected_decay": True}, "p2": {"corrected_decay": True, "weight_decay": 2.0, "lr": 0.5}}
RATES = [0.01, 0.05, 0.1, 0.025]
every_rule = pytest.mark.parametrize("name", ALL)
every_decoupled = pytest.mark.parametrize("name", ["adamw", "lion"])


@every_backend
@every_rule
def test_corrected_decay_is_decay_times_lr_over_its_maximum(name, backend, device):
    """Against torch param groups whose weight decay is set before every step; bit for bit with the reference."""
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    options = {**OPTIONS[name], "lr": 0.1}
    ours = ALL[name](named, **options, layers=CORRECTED, backend=backend)
    theirs = PLAIN[name]([{"params": [pair]} for pair in expected], **options, foreach=False)
    assert ours.param_groups[0]["max_lr"] == 0.1
    for lr in RATES:
        ours.param_groups[0]["lr"] = lr
        for i, group in enumerate(theirs.param_groups):
            group.update(lr=lr * (0.5 if i == 2 else 1.0), weight_decay=options["weight_decay"])
        decays = {0: 0.1 * (lr / 0.1), 2: 0.1 * (2.0 * lr / 0.1)}
        for i, decay in decays.items():
            theirs.param_groups[i]["weight_decay"] = decay
        train((ours, theirs), (named, expected), 1)
        assert ours.layers()["p2"]["weight_decay"] == pytest.approx(decays[2])
    check = same if backend == "torch" and name != "lion" else partial(close, steps=8)
    compare_weights(check, named, expected)


@every_rule
def test_max_lr_is_saved(name, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ALL[name](named, **{**OPTIONS[name], "lr": 0.1}, layers=CORRECTED, backend="torch")
    lr_scheduler.LinearLR(ours, 0.1, total_iters=4)
    train((ours,), (named,), 2)
    again = ALL[name](expected := twin(named), **{**OPTIONS[name], "lr": 0.7}, backend="torch")
    assert "max_lr" not in again.param_groups[0]
    again.load_state_dict(saved(ours.state_dict()))
    assert again.param_groups[0]["max_lr"] == 0.1
    train((ours, again), (named, expected), 2)
    compare(same, ours, again, named, expected)


def test_where_max_lr_is_from(device):
    """max_lr is the group's lr at construction, the group's own entry, or the peak that a scheduler writes."""
    named = parameters([(2,), (2,)], torch.float32, device)
    layers = {"*": {"corrected_decay": True}}
    sgd = fused_lwlr.SGD(
        [{"params": named[:1]}, {"params": named[1:], "lr": 0.5, "max_lr": 2.0}], lr=0.1, layers=layers
    )
    assert [group["max_lr"] for group in sgd.param_groups] == [0.1, 2.0]
    lr_scheduler.OneCycleLR(sgd, max_lr=[1.0, 3.0], total_steps=4)
    assert [group["max_lr"] for group in sgd.param_groups] == [1.0, 3.0]
    assert "max_lr" not in fused_lwlr.SGD(named, lr=0.1, layers={"p0": 0.5}).param_groups[0]
    later = fused_lwlr.SGD(named, lr=0.1, layers={"p0": 0.5}, backend="torch")
    later.param_groups[0].update(lr=0.01)
    later.param_groups[0]["layers"] = [{"corrected_decay": True}, 1.0]
    gradients(named)
    with pytest.raises(ValueError, match="max_lr=None must be a finite number above 0"):
        later.step()
    later.param_groups[0]["max_lr"] = 0.1
    later.step()


@pytest.mark.parametrize("max_lr", [0.0, -1.0, float("inf"), None, "fast"])
def test_max_lr_that_is_none(max_lr, device):
    named = parameters([(2,)], torch.float32, device)
    layers = {"p0": {"corrected_decay": True}}
    with pytest.raises(ValueError, match=r"max_lr=.* must be a finite number above 0"):
        fused_lwlr.AdamW([{"params": named, "layers": layers, "max_lr": max_lr}])
    optimizer = fused_lwlr.AdamW(named, layers=layers)
    train((optimizer,), (named,), 1)
    before = named[0][1].detach().clone()
    optimizer.param_groups[0]["max_lr"] = max_lr
    gradients(named)
    with pytest.raises(ValueError, match=r"max_lr=.* must be a finite number above 0"):
        optimizer.step()
    same(named[0][1].detach(), before)


@pytest.mark.parametrize("max_lr", [0, "x", float("nan"), torch.ones(2)], ids=str)
def test_a_state_dict_whose_max_lr_is_none(max_lr, device):
    """It is refused as a whole: no step could be taken with it."""
    named = parameters([(2,)], torch.float32, device)
    optimizer = fused_lwlr.AdamW(named, lr=0.1, layers={"p0": {"corrected_decay": True}})
    train((optimizer,), (named,), 1)
    checkpoint = saved(optimizer.state_dict())
    checkpoint["param_groups"][0].update(lr=0.5, max_lr=max_lr)
    with pytest.raises(ValueError, match=r"max_lr=.* must be a finite number above 0"):
        optimizer.load_state_dict(checkpoint)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["max_lr"]) == (0.1, 0.1)


def test_a_distributed_state_dict_whose_max_lr_is_lost(device):
    """torch drops the keys of groups that the optimizer lacks."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = torch.nn.Linear(3, 2, device=device)
    ours = fused_lwlr.AdamW(model.named_parameters(), lr=0.1, layers={"*": {"corrected_decay": True}})
    found = get_optimizer_state_dict(model, ours, options=options)
    again = fused_lwlr.AdamW(model.named_parameters(), lr=0.7)
    with pytest.raises(ValueError, match=r"no 'max_lr'.* or set max_lr of param_groups\[0\] before"):
        set_optimizer_state_dict(model, again, found, options=options)
    again.param_groups[0]["max_lr"] = 0.7
    set_optimizer_state_dict(model, again, found, options=options)
    assert again.param_groups[0]["max_lr"] == 0.1
    assert again.layers() == ours.layers()


def test_an_lr_of_0_is_no_maximum(device):
    named = parameters([(2,)], torch.float32, device)
    with pytest.raises(ValueError, match=r"max_lr=0.0 must be a finite number above 0"):
        fused_lwlr.AdamW(named, lr=0.0, layers={"p0": {"corrected_decay": True}})
    with pytest.raises(ValueError, match="'corrected_decay' of layer 'p0' must be True or False, not 1"):
        fused_lwlr.AdamW(named, layers={"p0": {"corrected_decay": 1}})


def test_scale_invariant_layers_have_corrected_decay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    batch = torch.randn(16, 4), torch.arange(16) % 3
    invariant = fused_lwlr.scale_invariant(model, batch, torch.nn.functional.cross_entropy)
    assert multipliers.corrected_decay(invariant) == {"0.weight": {"corrected_decay": True}}


def formula(name, w, g, state, t, lr, decay):
    """One step in double precision, as the papers print it (arXiv 2510.12402, Algorithm 1)."""
    state = [s.double() for s in state]
    w, g = w.double(), g.double()
    if name == "adamw":
        m, v = 0.9 * state[0] + 0.1 * g, 0.999 * state[1] + 0.001 * g * g
        u, state = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8), (m, v)
    else:
        u, state = torch.sign(0.9 * state[0] + 0.1 * g), (0.99 * state[0] + 0.01 * g,)
    return w - lr * (u + decay * (u * w >= 0) * w), state


@pytest.mark.parametrize("backend", ["torch", "triton"])
@every_decoupled
def test_cautious_decay_is_the_formula(name, backend, device):
    named = parameters([(6, 50), (7,)], torch.float32, device)
    ours = ALL[name](named, lr=0.1, weight_decay=0.5, cautious_decay=True, backend=backend)
    keys = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}[name]
    decayed = 0
    for t in range(1, 5):
        before = [(p.detach().clone(), [ours.state[p][k].clone() for k in keys] if t > 1 else None) for _, p in named]
        train((ours,), (named,), 1)
        for (_, p), (w, state) in zip(named, before, strict=True):
            state = [torch.zeros_like(w)] * len(keys) if state is None else state
            expected, moments = formula(name, w, p.grad, state, t, 0.1, 0.5)
            torch.testing.assert_close(p.detach().double(), expected, rtol=4e-6, atol=8 * EPS[torch.float32])
            for key, moment in zip(keys, moments, strict=True):
                torch.testing.assert_close(ours.state[p][key].double(), moment, rtol=4e-6, atol=8 * EPS[torch.float32])
            always, _ = formula(name, w, p.grad, state, t, 0.1, 0.0)
            decayed += (always != expected).double().mean().item() / 8
    # with random gradients, half of the elements
    assert 0.2 < decayed < 0.8


@every_backend
@every_decoupled
def test_cautious_decay_by_sign(name, backend, device):
    """Elements whose gradient would enlarge them are not decayed; elements with a zero gradient are."""
    w = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], device=device)
    named = [("w", torch.nn.Parameter(w.clone()))]
    ours = ALL[name](named, lr=0.1, weight_decay=0.5, cautious_decay=True, backend=backend)
    named[0][1].grad = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0], device=device)
    ours.step()
    expected = torch.tensor([0.85, -1.1, 1.1, -0.85, 0.95], device=device)
    torch.testing.assert_close(named[0][1].detach(), expected)
    # 0 · ∞ would be NaN
    ours.param_groups[0]["weight_decay"] = 0.0
    named[0][1].data.fill_(float("inf"))
    ours.step()
    assert (named[0][1] == float("inf")).all()


@pytest.mark.parametrize(
    ("name", "backend"), [("adamw", "torch"), ("lion", "torch"), ("adamw", "triton"), long("lion", "triton")]
)
def test_cautious_decay_goes_with_other_options(name, backend, device):
    """It stays where options are replaced, as by a GradScaler, and in a copy; without decay it changes nothing."""
    named = parameters([(40, 3)], torch.float32, device)
    plain, more = twin(named), {"backend": backend, "lr": 0.1}
    ours = ALL[name](named, **more, weight_decay=0.5, cautious_decay=True)
    train((ours,), (named,), 1)
    ours.found_inf = torch.zeros((), device=device)
    rule = ours.options.rule
    train((ours,), (named,), 1)
    assert ours.options.uses_grad_scaler
    # one rule, since kernels are kept for each
    assert ours.options.rule is rule
    assert rule.decay_mode == "cautious"
    assert pickle.loads(pickle.dumps(ours)).options.rule.decay_mode == "cautious"
    optimizers = [
        ALL[name](t, **more, weight_decay=0.0, cautious_decay=c) for t, c in ((twin(plain), True), (plain, False))
    ]
    twins = [[(str(i), p) for i, p in enumerate(o.param_groups[0]["params"])] for o in optimizers]
    train(optimizers, twins, 2)
    compare(partial(close, steps=2), *optimizers, *twins)


def test_cautious_decay_is_refused(device):
    named = parameters([(2,)], torch.float32, device)
    for more in ({}, {"momentum": 0.9, "lr_in_momentum": True}):
        with pytest.raises(
            ValueError, match="cautious_decay=True is not for SGD, since SGD adds weight decay to the gradient"
        ):
            fused_lwlr.SGD(named, lr=0.1, cautious_decay=True, **more)
    with pytest.raises(ValueError, match="cautious_decay=1 must be True or False"):
        fused_lwlr.AdamW(named, cautious_decay=1)
