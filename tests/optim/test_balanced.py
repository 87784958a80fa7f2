"""BalancedLR: rates by the norms of all layers, against torch.optim with a group and a rate for each layer."""

import math

import pytest
import torch
from cases import BACKENDS, every_backend, every_name, long
from pairs import compare_weights
from steps import OPTIONS, OURS, TORCH, cost, gradients, parameters, train, twin
from tolerances import close, same

from fused_lwlr import LARS, BalancedLR

SHAPES = [(6, 5), (4,), (70, 30), (3, 3), (0, 2)]
WEIGHTS = (0, 2, 3)
STEPS = 3


def layers(device, dtype=torch.float32):
    named = parameters(SHAPES, dtype, device)
    for (_, param), factor in zip(named, (1.0, 1.0, 0.1, 3.0, 1.0), strict=True):
        param.data.mul_(factor)
    return named


def set_rates(optimizer, lr, members=WEIGHTS):
    """The formula, in float64, into the groups of a torch optimizer."""
    params = [group["params"][0] for group in optimizer.param_groups]
    norms = {i: params[i].detach().double().norm().item() for i in members}
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = lr
        if i in norms:
            group["lr"] = lr * len(norms) * (1 / norms[i]) / sum(1 / norm for norm in norms.values())


def torch_of(name, named, **options):
    return TORCH[name]([{"params": [param]} for _, param in named], foreach=False, **options)


class Tripled(BalancedLR):
    @staticmethod
    def factors(weight_norm):
        return torch.full_like(weight_norm, 3.0)


@every_backend
def test_a_subclass_uses_its_own_factors(backend, device):
    named = parameters([(5, 4), (4, 7)], torch.float32, device)
    before = [param.detach().clone() for _, param in named]
    optimizer = OURS["sgd"](named, lr=0.1, scaling=Tripled(), backend=backend)
    gradients(named)
    optimizer.step()
    for w, (_, param) in zip(before, named, strict=True):
        close(param.detach(), w - 0.3 * param.grad, 1)


def test_norms_of_zero_and_infinity():
    """They do not count, and have the factors 1 and 0."""
    for norms, factors in (
        ((0.0, math.inf, 1.0, 3.0), (1.0, 0.0, 1.5, 0.5)), ((0.0, math.inf), (1.0, 0.0)), ((math.inf,), (0.0,)),
        ((0.0,), (1.0,)),
    ):  # fmt: skip
        close(BalancedLR.factors(torch.tensor(norms)), torch.tensor(factors))


OTHERS = [
    ("sgd", {}), ("adamw", {}),
    ("sgd", {"clip_global_norm": 0.5}), ("adamw", {"clip_global_norm": 0.5, "nonfinite": "skip"}),
    ("sgd", {"nonfinite": "raise", "momentum": 0.0}), ("sgd", {"nesterov": True, "maximize": True}),
    ("adamw", {"amsgrad": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "backend"),
    [(*row, backend) for row in OTHERS[:3] + OTHERS[4:6] for backend in BACKENDS]
    + [(*row, "torch") for row in OTHERS[3::3]]
    + [long(*row, "triton") for row in OTHERS[3::3]],
)
def test_rates_equal_the_formula(name, options, backend, device):
    rounding = 3 if options else 2
    named = layers(device)
    expected = twin(named)
    options = {**OPTIONS[name], **options}
    ours = OURS[name](named, scaling=BalancedLR(), backend=backend, **options)
    clip = options.pop("clip_global_norm", math.inf)
    options.pop("nonfinite", None)
    other = torch_of(name, expected, **options)
    for step in range(STEPS):
        gradients(named, expected)
        set_rates(other, options["lr"])
        if clip < math.inf:
            torch.nn.utils.clip_grad_norm_([q for _, q in expected], clip)
        ours.step()
        other.step()
        compare_weights(close, named, expected, rounding * (step + 1))


@every_backend
def test_a_skipped_step_moves_neither_weights_nor_norms(backend, device):
    named = layers(device)
    expected = twin(named)
    ours = OURS["sgd"](named, lr=0.1, scaling=BalancedLR(), nonfinite="skip", backend=backend)
    other = torch_of("sgd", expected, lr=0.1)
    for bad in (True, False, True, False):
        gradients(named, expected)
        before = [p.detach().clone() for _, p in named]
        if bad:
            named[0][1].grad[0, 0] = float("nan")
        ours.step()
        if bad:
            for w, (_, p) in zip(before, named, strict=True):
                same(p.detach(), w)
            continue
        set_rates(other, 0.1)
        other.step()
        compare_weights(close, named, expected, 4)


@pytest.mark.parametrize("backend", ["torch", long("triton")])
def test_with_a_grad_scaler(backend, device):
    """Gradients with a loss scale; one of them overflows."""
    named = layers(device)
    expected = twin(named)
    ours = OURS["sgd"](named, lr=0.1, scaling=BalancedLR(), backend=backend)
    other = torch_of("sgd", expected, lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=100)
    for step in range(3):
        for optimizer, pairs in ((ours, named), (other, expected)):
            optimizer.zero_grad()
            loss = sum((p * p).sum() for _, p in pairs) / 2
            if optimizer is other:
                loss.backward()
                continue
            scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
            scaler.step(ours)
            scaler.update()
        if step != 1:
            set_rates(other, 0.1)
            other.step()
        compare_weights(close, named, expected, 4)


@pytest.mark.parametrize("backend", ["torch", long("triton")])
def test_layers_of_several_dtypes_are_balanced_together(backend, device):
    """Each of the two launches needs the norms of the layers of the other launch."""
    named = [*parameters([(6, 5)], torch.float32, device), *parameters([(8, 9)], torch.bfloat16, device)]
    named = [(f"p{i}", param) for i, (_, param) in enumerate(named)]
    wide = [(name, torch.nn.Parameter(param.detach().float())) for name, param in named]
    ours = OURS["sgd"](named, lr=0.1, scaling=BalancedLR(), backend=backend, master_weights=False)
    other = torch_of("sgd", wide, lr=0.1)
    for step in range(3):
        gradients(named)
        for (_, p), (_, q) in zip(named, wide, strict=True):
            q.data.copy_(p.detach().float())
            q.grad = p.grad.float()
        set_rates(other, 0.1, members=(0, 1))
        ours.step()
        other.step()
        close(named[0][1].detach(), wide[0][1].detach(), step + 2)
        close(named[1][1].detach(), wide[1][1].detach().bfloat16(), step + 2)


@every_backend
def test_layers_that_are_left_out(backend, device):
    """Layers that are not selected, have no gradient or have zero weights are left out; their rate is lr."""
    named = parameters([(3, 4)] * 5, torch.float32, device)
    named[2][1].data.zero_()
    expected = twin(named)
    ours = OURS["sgd"](named, lr=0.1, scaling=BalancedLR(select=["p0", "p1", "p2", "p3"]), backend=backend)
    other = torch_of("sgd", expected, lr=0.1)
    for members, absent in (((0, 1), 3), ((0, 1, 2, 3), None), ((1, 2, 3), 0)):
        gradients(named, expected)
        if absent is not None:
            named[absent][1].grad = expected[absent][1].grad = None
        set_rates(other, 0.1, members)
        ours.step()
        other.step()
        compare_weights(close, named, expected, 4)


@every_backend
def test_slices_are_layers_and_have_multipliers(backend, device):
    (_, whole), _ = named = parameters([(6, 5), (6,)], torch.float32, device)
    whole.data[:2] *= 4
    before = whole.detach().clone()
    norms = [before[:2].norm().item(), before[2:].norm().item()]
    eta = {"p0[0:2]": 0.5, "p0[2:6]": 3.0}
    optimizer = OURS["sgd"](named, lr=0.1, scaling=BalancedLR(), layers=eta, backend=backend)
    train((optimizer,), (named,), 1)
    for part, factor, norm in ((slice(0, 2), 0.5, norms[0]), (slice(2, 6), 3.0, norms[1])):
        rate = 0.1 * factor * 2 * (1 / norm) / (1 / norms[0] + 1 / norms[1])
        close(whole.detach()[part], before[part] - rate * whole.grad[part], 2)


@every_name
def test_one_more_launch_that_reads_the_weights(name, device):
    named = layers(device)
    ours = OURS[name](named, scaling=BalancedLR(), backend="triton", **OPTIONS[name])
    numbers = [cost(ours, named) for _ in range(3)]
    expected = twin(named)
    plain = OURS[name](expected, backend="triton", **OPTIONS[name])
    _, size, _ = cost(plain, expected)
    assert numbers == [(2, size + 4, 0)] * 3


def test_layer_stats_names_the_alternative(device):
    named = layers(device)
    optimizer = OURS["sgd"](named, lr=0.1, scaling=BalancedLR())
    train((optimizer,), (named,), 1)
    with pytest.raises(RuntimeError, match=r"BalancedLR use the norms of weights alone.*layer_statistics\(model\)"):
        optimizer.layer_stats()
    with pytest.raises(ValueError, match="it is not a parameter"):
        OURS["sgd"](named, lr=0.1, scaling=BalancedLR(select="conv.weight"))
    assert repr(BalancedLR()).startswith("BalancedLR(")
    assert LARS() != BalancedLR()
