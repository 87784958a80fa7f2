"""Statistics of a step with a scaling, and their log."""

import math

import numpy as np
import pytest
import torch
from cases import every_backend, every_case, every_name, name_of, one_kernel
from steps import OPTIONS, OURS, gradients, parameters, train

from fused_lwlr import ELR, LAMB, LARS, Hyperball, LayerStatsLogger, StepStatistics, step_in_backward

STATS_SHAPES = [(4, 6), (3,), (2, 5), (), (3, 3)]


def statistics(name, backend, device, scaling, steps=2, **more):
    """An optimizer after some steps, its parameters, and the weights before the last step."""
    named = parameters(STATS_SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], scaling=scaling, backend=backend, **more)
    train((optimizer,), (named,), steps - 1)
    before = [p.detach().clone() for _, p in named]
    train((optimizer,), (named,), 1)
    return optimizer, named, before


def agree(actual, expected):
    torch.testing.assert_close(actual.cpu(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


@one_kernel
@pytest.mark.parametrize("more", [{}, {"clip_global_norm": 0.1}])
def test_layer_stats(name, backend, more, device):
    optimizer, named, before = statistics(name, backend, device, LARS(0.5, eps=0.0), **more)
    stats = optimizer.layer_stats()
    assert isinstance(stats, StepStatistics)
    assert stats.names == tuple(key for key, _ in named)
    assert stats.constrained == (True, False, True, False, True)
    # norms of the gradients before clipping
    grads, weights = [p.grad.double() for _, p in named], [w.double() for w in before]
    agree(stats.abs_sum, [g.abs().sum() for g in grads])
    agree(stats.grad_norm, [g.norm() for g in grads])
    agree(stats.weight_norm, [w.norm() for w in weights])
    assert stats.nonfinite.tolist() == [0] * 5
    elr = [(g.norm() / w.norm()).item() for g, w in zip(grads, weights, strict=True)]
    agree(stats.elr, elr)
    constrained = [elr[0], elr[2], elr[4]]
    agree(stats.elr_mean, np.mean(constrained))
    agree(stats.elr_spread, np.std(constrained))
    total = math.sqrt(sum(g.square().sum().item() for g in grads))
    clip = min(1.0, more.get("clip_global_norm", math.inf) / (total + 1e-6))
    decay = OPTIONS[name]["weight_decay"]
    ratio = [
        (0.5 * w.norm() / (clip * g.norm() + decay * w.norm())).item() for g, w in zip(grads, weights, strict=True)
    ]
    agree(stats.trust_ratio, [ratio[0], 1.0, ratio[2], 1.0, ratio[4]])
    # a copy
    kept = stats.values.clone()
    train((optimizer,), (named,), 1)
    assert torch.equal(stats.values, kept)
    assert not torch.equal(optimizer.layer_stats().values, kept)


@every_case
@pytest.mark.parametrize("maximize", [False, True])
def test_layer_stats_of_the_direction(name, backend, maximize, device):
    """Norms are norms of the gradient, also where the trust ratio uses another quantity."""
    optimizer, named, before = statistics(name, backend, device, LAMB(), steps=1, maximize=maximize)
    stats = optimizer.layer_stats()
    agree(stats.abs_sum, [p.grad.double().abs().sum() for _, p in named])
    agree(stats.grad_norm, [p.grad.double().norm() for _, p in named])
    agree(stats.weight_norm, [w.double().norm() for w in before])
    # Δw = lr · ratio · d and ratio = ‖w‖ / ‖d‖
    rate = [(p.detach() - w).double().norm() / w.double().norm() for (_, p), w in zip(named, before, strict=True)]
    for i in (0, 2, 4):
        assert rate[i].item() == pytest.approx(OPTIONS[name]["lr"], rel=1e-4)


@every_case
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("scaling", [LARS(), LAMB()], ids=["gradient", "direction"])
def test_elements_that_are_not_finite_are_counted(name, backend, scaling, maximize, device):
    named = parameters(STATS_SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], scaling=scaling, maximize=maximize, backend=backend)
    gradients(named)
    for value, (_, param) in zip((math.inf, -math.inf, math.nan), named, strict=False):
        param.grad.view(-1)[0] = value
    optimizer.step()
    assert optimizer.layer_stats().nonfinite.tolist() == [1, 1, 1, 0, 0]


@every_backend
def test_layer_stats_in_the_order_of_parameters(backend, device):
    """Each dtype is a separate launch, some layers have no gradient, one is in slices."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    named = [(f"p{i}", parameters([(4, 2)], dtype, device)[0][1]) for i, dtype in enumerate(dtypes)]
    options = {"lr": 0.1, "momentum": 0.9, "scaling": ELR(0.1), "layers": {"p2[1:3]": 0.5}}
    optimizer = OURS["sgd"](named, **options, backend=backend)
    gradients(named)
    named[1][1].grad = None
    optimizer.step()
    stats = optimizer.layer_stats()
    assert stats.names == ("p0", "p2[0:1]", "p2[1:3]", "p2[3:4]", "p3")
    (_, a), _, (_, c), (_, d) = named
    agree(stats.grad_norm, [t.double().norm() for t in (a.grad, c.grad[:1], c.grad[1:3], c.grad[3:], d.grad)])
    assert list(stats.to_dict()) == list(stats.names)
    assert stats.to_dict()["p3"]["grad_norm"] == stats.grad_norm[4].item()
    assert "p2[1:3]" in str(stats)


@every_backend
def test_layer_stats_leave_zero_weights_out_of_the_mean(backend, device):
    named = parameters([(2, 3), (2, 2), (3, 3)], torch.float32, device)
    named[1][1].data.zero_()
    optimizer = OURS["sgd"](named, lr=0.1, scaling=ELR(0.1), backend=backend)
    train((optimizer,), (named,), 1)
    stats = optimizer.layer_stats()
    assert stats.elr[1] == math.inf
    agree(stats.elr_mean, np.mean([stats.elr[0].item(), stats.elr[2].item()]))
    agree(stats.elr_spread, np.std([stats.elr[0].item(), stats.elr[2].item()]))


@every_case
def test_layer_stats_need_a_scaling(name, backend, device):
    plain, _, _ = statistics(name, backend, device, None)
    with pytest.raises(RuntimeError, match=r"only with scaling="):
        plain.layer_stats()


class Writer:
    def __init__(self):
        self.written = []

    def add_scalar(self, tag, scalar_value, global_step):
        assert type(scalar_value) is float
        self.written.append((tag, scalar_value, global_step))


@pytest.mark.parametrize(("scaling", "more"), [(ELR(0.1), ()), (Hyperball(), ("update_ratio", "cosine"))], ids=name_of)
@every_name
def test_logger(name, scaling, more, device):
    named = parameters([(4, 6), (3,)], torch.float32, device)
    optimizer = OURS[name](named, lr=0.1, scaling=scaling, layers={"p0[0:2]": 0.5}, backend="torch")
    writer = Writer()
    optimizer.register_step_post_hook(LayerStatsLogger(writer, every=3))
    train((optimizer,), (named,), 7)
    layers = ("p0[0:2]", "p0[2:4]", "p1")
    kinds = ("elr", "trust_ratio", "grad_norm", "weight_norm", *more)
    tags = [f"{kind}/{layer}" for layer in layers for kind in kinds] + ["elr_mean", "elr_spread"]
    assert [(tag, step) for tag, _, step in writer.written] == [(tag, step) for step in (3, 6) for tag in tags]
    train((optimizer,), (named,), 2)
    stats = optimizer.layer_stats()
    last = {tag: value for tag, value, step in writer.written if step == 9}
    assert last["elr_mean"] == stats.elr_mean.item()
    for kind in ("weight_norm", *more):
        assert [last[f"{kind}/{layer}"] for layer in layers] == getattr(stats, kind).tolist()


@pytest.mark.parametrize("every", [0, -1, math.nan, 2.0, "3"])
def test_logger_refuses_no_steps(every):
    with pytest.raises(ValueError, match=f"every={every!r} must be an int"):
        LayerStatsLogger(Writer(), every=every)
    with pytest.raises(TypeError, match="writer='runs' must have a method add_scalar"):
        LayerStatsLogger("runs")


def test_logger_refuses_other_optimizers_at_the_first_step():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    optimizer.register_step_post_hook(LayerStatsLogger(Writer(), every=100))
    with pytest.raises(TypeError, match=r"needs an optimizer of fused_lwlr, .* not SGD"):
        optimizer.step()


@every_case
def test_after_a_step_that_was_refused(name, backend, device):
    """Names of its gradients would label statistics of the step before."""
    optimizer, named, _ = statistics(name, backend, device, LARS())
    named[0][1].grad = None
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="'lr' of a param group"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="or it raised an error: call it first"):
        optimizer.layer_stats()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert optimizer.layer_stats().names == tuple(key for key, _ in named[1:])


@every_case
def test_after_a_step_without_gradients(name, backend, device):
    """The messages distinguish this from no step, no step since loading, and a step with another scaling."""
    optimizer, named, _ = statistics(name, backend, device, LARS())
    for _, p in named:
        p.grad = None
    optimizer.step()
    with pytest.raises(RuntimeError, match="the last step, in which no parameter had a gradient"):
        optimizer.layer_stats()
    new = OURS[name](named, **OPTIONS[name], scaling=LARS(), backend=backend)
    for load in (lambda: None, lambda: new.load_state_dict(new.state_dict())):
        load()
        with pytest.raises(RuntimeError, match=r"but step\(\) was not called yet, or not since load_state_dict\(\)"):
            new.layer_stats()
        train((new,), (named,), 1)
        new.layer_stats()
    new.scaling = LAMB()
    with pytest.raises(RuntimeError, match="the last step, which was taken without this scaling"):
        new.layer_stats()
    new.zero_grad()
    step_in_backward(torch.nn.ParameterDict(dict(named)), new)
    new.step()
    with pytest.raises(RuntimeError, match="the last step, in which no parameter had a gradient"):
        new.layer_stats()


@every_case
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_norm_of_all_gradients(name, backend, scale, device):
    """Before clipping, and without the scale of a GradScaler."""
    named = parameters(STATS_SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], scaling=LAMB(), clip_global_norm=0.1, backend=backend)
    scaler = torch.amp.GradScaler(device.type, init_scale=scale or 1.0, enabled=scale is not None)
    gradients(named)
    expected = torch.nn.utils.get_total_norm([p.grad for _, p in named]).item()
    for _, p in named:
        p.grad = scaler.scale(p.grad)
    scaler.step(optimizer)
    assert optimizer.layer_stats().grad_norm.norm().item() == pytest.approx(expected, rel=1e-6)
    scaled = torch.nn.utils.get_total_norm([p.grad for _, p in named]).item()
    assert scaled == pytest.approx(expected * (scale or 1.0), rel=1e-6)
