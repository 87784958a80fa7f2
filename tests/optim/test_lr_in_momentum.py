"""SGD with the learning rate in the momentum buffer, against the reference of MLPerf written out in float64."""

import copy

import pytest
import torch
from cases import every_backend, long
from steps import gradients, identical, parameters, snapshot, uniform
from tolerances import EPS
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fused_lwlr
from fused_lwlr import ELR, LAMB, LARC, LARS, SGD, BalancedLR, ClipByLayer

SHAPES = [(6, 5), (), (1030,), (0,), (4, 3)]
NUMBERS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "lr_in_momentum": True}
MODES = {
    "none": (None, {}),
    "lars": (LARS(0.02, eps=0.0), {}),
    "nesterov": (LARS(0.02, eps=0.0), {"nesterov": True}),
    "maximize": (None, {"maximize": True}),
    "no decay": (LARS(0.02, eps=0.0), {"weight_decay": 0.0}),
    "skip": (LARS(0.02, eps=0.0), {"nonfinite": "skip"}),
    "ema": (None, {"ema": 0.9}),
}


class MLPerf:
    """The LARS of MLPerf's TensorFlow reference, one rate for all:

    scaled_lr = lr · eeta · ‖w‖ / (‖g‖ + weight_decay · ‖w‖)
    m ← μ · m + scaled_lr · (g + weight_decay · w)
    w ← w − m

    with scaled_lr = lr for the vectors that it leaves out, and w ← w − (scaled_lr · g + μ · m) with Nesterov momentum.
    """

    def __init__(self, named, eeta=None, momentum=0.9, weight_decay=0.05, nesterov=False, maximize=False, etas=None):
        self.weights = [p.detach().double().clone() for _, p in named]
        self.momenta = [torch.zeros_like(w) for w in self.weights]
        self.eeta, self.momentum, self.weight_decay, self.nesterov = eeta, momentum, weight_decay, nesterov
        self.sign, self.etas = -1 if maximize else 1, etas or [1.0] * len(named)

    def step(self, grads, lr):
        for i, (g, w, m) in enumerate(zip(grads, self.weights, self.momenta, strict=True)):
            if g is None:
                continue
            g, scaled_lr = self.sign * g.double(), lr
            if self.eeta is not None and w.dim() >= 2 and w.numel():
                scaled_lr = lr * self.eeta * w.norm() / (g.norm() + self.weight_decay * w.norm())
            g = scaled_lr * (g + self.weight_decay * w)
            self.momenta[i] = self.momentum * m + g
            moved = g + self.momentum * self.momenta[i] if self.nesterov else self.momenta[i]
            self.weights[i] = w - self.etas[i] * moved


def rounded(weights, dtype):
    return [w.to(dtype).double() for w in weights]


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [*((dtype, "torch") for dtype in EPS), (torch.float32, "triton"), long(torch.bfloat16, "triton")],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_against_the_reference_of_mlperf(mode, dtype, backend, device):
    """The rate rises and falls, through zero; some gradients are missing; each step starts from the stored values."""
    scaling, options = MODES[mode]
    named = parameters(SHAPES, dtype, device)
    etas = {"p0": 0.5, "p2": 2.0}
    optimizer = SGD(named, **{**NUMBERS, **options}, scaling=scaling, layers=etas, backend=backend)
    plain = {name: value for name, value in options.items() if name not in ("nonfinite", "ema")}
    mlperf = MLPerf(named, eeta=scaling and 0.02, etas=[0.5, 1, 2, 1, 1], **plain)
    for step, lr in enumerate([0.02, 0.3, 1.0, 0.0, 0.1, 0.7]):
        grads = [None if step == i + 1 else uniform(p.shape, dtype, device) for i, (_, p) in enumerate(named)]
        for (_, p), g in zip(named, grads, strict=True):
            p.grad = g
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        mlperf.step(grads, lr)
        for i, (_, p) in enumerate(named):
            buffer = optimizer.state[p]["momentum_buffer"] if p in optimizer.state else torch.zeros_like(p)
            for ours, theirs in ((p.detach(), mlperf.weights[i]), (buffer, mlperf.momenta[i])):
                torch.testing.assert_close(ours.double(), theirs, rtol=EPS[dtype], atol=8 * EPS[min_float(dtype)])
            # so that a half is rounded once in each step
            mlperf.weights[i], mlperf.momenta[i] = p.detach().double().clone(), buffer.double().clone()


def min_float(dtype):
    """The dtype that is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def trained(named, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for _, p in named:
            p.grad = torch.rand(p.shape, generator=generator).to(p) - 0.5
        optimizer.param_groups[0]["lr"] = 0.1 * (step + 1)
        optimizer.step()


@every_backend
def test_corrected_decay_follows_a_rate_that_is_a_tensor(backend, device):
    """The rate is in the buffer, and not in the row that a replay would read."""
    rates, found = (0.1, 0.05), []
    for number in (float, lambda lr: torch.tensor(lr, device=device)):
        p = nn.Parameter(torch.ones(3, 2, device=device))
        group = {"params": [("w", p)], "capturable": True, "layers": {"w": {"corrected_decay": True}}}
        optimizer = SGD([group], **{**NUMBERS, "lr": number(rates[0])}, backend=backend)
        for lr in rates:
            optimizer.param_groups[0]["lr"] = number(lr)
            p.grad = torch.zeros_like(p)
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)
    w, m = 1.0, 0.0
    for lr in rates:
        m = 0.9 * m + lr * (0.05 * lr / rates[0]) * w
        w -= m
    torch.testing.assert_close(found[0], torch.full_like(found[0], w))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [({**NUMBERS}, {"momentum": 0.9}), ({"momentum": 0.9}, {**NUMBERS})],
    ids=["torch's dict", "ours in plain SGD"],
)
def test_a_state_dict_of_the_other_placement_is_refused(mine, theirs, device):
    named, other = (parameters(SHAPES[:2], torch.float32, device) for _ in range(2))
    optimizer, source = SGD(named, **mine), SGD(other, **theirs)
    trained(other, source, range(2))
    before = snapshot(optimizer, named)
    with pytest.raises(ValueError, match="'lr_in_momentum' of parameter group 0 of the state dict is"):
        optimizer.load_state_dict(source.state_dict())
    assert identical(before, snapshot(optimizer, named))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
def test_a_distributed_state_dict_of_the_other_placement_is_refused(options, held, device):
    """torch drops the keys of groups that the optimizer lacks, and takes the keys that the dict lacks from it."""
    options = StateDictOptions(**options)
    models = [nn.Linear(3, 2, device=device) for _ in range(2)]
    source, other = (
        SGD(model.parameters(), **{**NUMBERS, "lr_in_momentum": is_in})
        for model, is_in in zip(models, (held, not held), strict=True)
    )
    # the groups of torch's dict lack the key
    (other if held else source).load_state_dict(torch.optim.SGD(models[0].parameters(), momentum=0.9).state_dict())
    found = get_optimizer_state_dict(models[0], source, options=options)
    with pytest.raises(ValueError, match="'lr_in_momentum' of parameter group 0 of the state dict is"):
        set_optimizer_state_dict(models[1], other, found, options=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 0.0}, "needs momentum above 0 and dampening 0, not momentum=0.0 and dampening=0"),
        ({"dampening": 0.1}, "needs momentum above 0 and dampening 0, not momentum=0.9 and dampening=0.1"),
        ({"scaling": LARC()}, "does not go with lr_in_momentum=True"),
        ({"scaling": LAMB()}, "does not go with lr_in_momentum=True"),
        ({"capturable": True}, "lr_in_momentum=True and capturable=True exclude each other"),
        ({"lr_in_momentum": "yes"}, "lr_in_momentum='yes' must be True or False"),
    ],
    ids=["momentum 0", "dampening", "LARC", "LAMB", "capturable", "not a bool"],
)
def test_where_it_has_no_meaning_it_is_refused(options, message, device):
    with pytest.raises(ValueError, match=message):
        SGD(parameters(SHAPES, torch.float32, device), **{**NUMBERS, **options})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"momentum": 0.0}, "needs momentum above 0 and dampening 0, not .*momentum=0.0"),
        ({"dampening": 0.1}, "needs momentum above 0 and dampening 0, not .*dampening=0.1"),
        ({"lr": 0.2, "momentum": "x"}, "'momentum' of a param group must be a finite number"),
    ],
    ids=str,
)
def test_edits_where_it_has_no_meaning(edit, message, device):
    named = parameters(SHAPES, torch.float32, device)
    optimizer = SGD(named, **NUMBERS)
    [group] = optimizer.param_groups
    for _ in range(2):
        right, before = {option: group[option] for option in edit}, snapshot(optimizer, named)
        group.update(edit)
        gradients(named)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        group.update(right)
        assert identical(snapshot(optimizer, named), before)
        optimizer.step()


def test_groups_agree(device):
    (_, p), (_, q) = parameters(SHAPES[:2], torch.float32, device)
    with pytest.raises(ValueError, match="has lr_in_momentum=False, but all param groups share"):
        SGD([{"params": [p]}, {"params": [q], "lr_in_momentum": False}], **NUMBERS)
    optimizer = SGD([p], **NUMBERS)
    with pytest.raises(ValueError, match="needs momentum above 0"):
        optimizer.add_param_group({"params": [q], "momentum": 0.0})
    with pytest.raises(ValueError, match="momentum=None must be a finite number"):
        optimizer.add_param_group({"params": [q], "momentum": None})
    with pytest.raises(ValueError, match="does not go with lr_in_momentum"):
        optimizer.scaling = LAMB()


SCALINGS = [None, ELR(0.1), ClipByLayer(0.5), BalancedLR()]
OPTIONS = [{}, {"master_weights": True}, {"stochastic_rounding": True}, {"ema": 0.9}]


# each compiles a kernel
@pytest.mark.parametrize(
    ("scaling", "options"),
    [(None, {}), *(long(*row) for row in zip(SCALINGS[1:], OPTIONS[1:], strict=True))],
    ids=str,
)
def test_both_backends_agree(options, scaling, device):
    dtype = torch.bfloat16 if {"master_weights", "stochastic_rounding"} & options.keys() else torch.float32
    named = parameters(SHAPES, dtype, device)
    twins = copy.deepcopy(named)
    pairs = [
        (n, SGD(n, **NUMBERS, **options, scaling=scaling, clip_global_norm=1.0, backend=backend))
        for n, backend in ((named, "torch"), (twins, "triton"))
    ]
    for step in range(4):
        for n, optimizer in pairs:
            trained(n, optimizer, [step])
    for (_, p), (_, q) in zip(named, twins, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=2 * EPS[dtype], atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", long("triton")])
def test_rescaled_weights_keep_the_function(backend, device):
    """Weights are divided by Ŵ together with their buffers, so only the scale of the training changes."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6, eps=0.0), nn.Linear(6, 2)).to(device)
    batch = (torch.rand(8, 4, device=device), torch.randint(2, (8,), device=device))
    loss_fn = nn.functional.cross_entropy
    layers = fused_lwlr.scale_invariant(model, batch, loss_fn)
    twin = copy.deepcopy(model)
    options = {**NUMBERS, "weight_decay": 0.0, "scaling": ELR(0.1, select="0.weight"), "backend": backend}
    ours = SGD(model.named_parameters(), rescale_weights=layers, **options)
    other = SGD(twin.named_parameters(), **options)
    for step in range(5):
        for net, optimizer in ((model, ours), (twin, other)):
            optimizer.zero_grad()
            loss_fn(net(batch[0]), batch[1]).backward()
            optimizer.param_groups[0]["lr"] = 0.1 * (step + 1)
            optimizer.step()
    torch.testing.assert_close(model(batch[0]), twin(batch[0]), rtol=1e-4, atol=1e-5)
