"""The layers that a scaling selects; other layers step as without it."""

import contextlib

import pytest
import torch
from cases import LAYERS, every_backend, every_name, layers, over
from steps import OPTIONS, OURS, train, twin

from fused_lwlr import ELR, LAMB, LARC, LARS, ClipByLayer, NormalizedGradient, NormalizedGradientAdaptive


@every_name
@pytest.mark.parametrize(
    ("scaling", "constrained"),
    [
        *((s, [0, 3]) for s in (ELR(0.1), LARS(), LARC(), LAMB(), NormalizedGradientAdaptive())),
        *((s, [0, 1, 2, 3, 4]) for s in (NormalizedGradient(), ClipByLayer(1.0))),
        (LARS(select="conv.weight"), [0]), (LARS(select="*.bias"), [1]), (LARS(select=["conv.*", "temp*"]), [0, 1, 4]),
        (LARS(select=iter(["conv.weight", "head.weight"])), [0, 3]), (LARS(select="????.weight"), [0, 2, 3]),
        (ClipByLayer(1.0, select=("norm.weight",)), [2]), (LARS(select=[]), []),
        (LARS(select="!head.*"), [0]), (ClipByLayer(1.0, select="!*.bias"), [0, 2, 3, 4]),
        (LARS(select=["*.weight", "!norm.*", "!head.weight"]), [0]), (LARS(select=["!conv.*", "*"]), [2, 3, 4]),
        (ELR(0.1, select=["!conv.weight", "!head.weight"]), []),
        (LARS(select=lambda name, p: name.startswith("head") or p.dim() == 0), [3, 4]),
    ],
)  # fmt: skip
def test_selection(name, scaling, constrained, device):
    named = layers(device)
    ours = OURS[name](named, lr=0.1, scaling=scaling, backend="torch")
    with contextlib.nullcontext() if constrained else pytest.warns(UserWarning, match="selects none of the 5"):
        train((ours,), (named,), 1)
    stats = ours.layer_stats()
    assert stats.names == tuple(key for key, _ in named)
    assert [i for i, yes in enumerate(stats.constrained) if yes] == constrained
    free = [i for i in range(len(LAYERS)) if i not in constrained]
    assert (stats.trust_ratio[free] == 1).all()


def test_names_that_are_edited(device):
    """As for a checkpoint of a model that is not compiled. They count from the next step on."""
    named = layers(device)
    ours = OURS["sgd"](named, lr=0.1, scaling=LARS(select="*.weight"))
    train((ours,), (named,), 1)
    names = ours.param_groups[0]["param_names"]
    names[0] = "conv.kernel"
    train((ours,), (named,), 1)
    stats = ours.layer_stats()
    assert stats.names == tuple(names) == tuple(ours.layers())
    assert stats.constrained == (False, False, True, True, False)


@every_backend
@over([ELR(0.1), LARS(), ClipByLayer(0.1, select="*weight")])
@every_name
def test_layers_that_are_not_selected_step_as_without(name, scaling, backend, device):
    named = layers(device)
    expected = twin(named)
    # a large eps keeps AdamW's first direction from being only the sign of the gradient
    options = OPTIONS[name] | ({"eps": 0.1} if name == "adamw" else {})
    ours = OURS[name](named, **options, scaling=scaling, backend=backend)
    plain = OURS[name](expected, **options, backend=backend)
    train((ours, plain), (named, expected), 4 if backend == "torch" else 1)
    for (_, p), (_, q), constrained in zip(named, expected, ours.layer_stats().constrained, strict=True):
        assert torch.equal(p, q) != constrained


@every_name
def test_a_predicate_works_without_names(name, device):
    params = [p for _, p in layers(device)]
    ours = OURS[name](params, lr=0.1, scaling=ELR(0.1), backend="torch")
    for p in params:
        p.grad = torch.ones_like(p)
    ours.step()
    assert ours.layer_stats().names == ("0:0", "0:1", "0:2", "0:3", "0:4")
    assert ours.layer_stats().constrained == (True, False, False, True, False)


@every_name
@pytest.mark.parametrize("select", ["conv.weight", ["*"], ()])
def test_names_without_names_are_refused(name, select, device):
    params = [p for _, p in layers(device)]
    for source in (params, [{"params": params}]):
        with pytest.raises(ValueError, match=r"given without: pass model\.named_parameters"):
            OURS[name](source, lr=0.1, scaling=LARS(select=select))


@every_name
def test_a_scaling_that_is_set_later_is_checked_as_in_the_constructor(name, device):
    """A refused scaling leaves the old one."""
    named = layers(device)
    ours = OURS[name](named, lr=0.1, scaling=LARS())
    with pytest.raises(ValueError, match=r"ELR\(select=...\) has 'conv.weigth': .*did you mean 'conv.weight'"):
        ours.scaling = ELR(0.1, select="conv.weigth")
    unnamed = OURS[name]([p for _, p in named], lr=0.1)
    with pytest.raises(ValueError, match=r"given without: pass model\.named_parameters"):
        unnamed.scaling = ELR(0.1, select="*")
    assert (ours.scaling, unnamed.scaling) == (LARS(), None)


@every_name
def test_a_scaling_without_a_layer_warns(name, device):
    """A flat parameter, as in FSDP1, has one dimension. The warnings name lines of the user."""
    flat = torch.nn.Parameter(torch.ones(12, device=device))
    flat.grad = torch.ones_like(flat)
    ours = OURS[name]([("_flat_param", flat)], lr=0.1, scaling=ELR(0.1))
    with pytest.warns(UserWarning, match="ELR.* selects none of the 1 parameters, so it has no effect") as first:
        ours.step()
    ours.step()
    ours.scaling = LARS()
    # a scheduler wraps step()
    torch.optim.lr_scheduler.StepLR(ours, 1)
    with pytest.warns(UserWarning, match="LARS.* selects none of the 1 parameters") as second:
        ours.step()
    assert {warning.filename for warning in (*first, *second)} == {__file__}
    ours.scaling = ELR(0.1, select="*")
    ours.step()
