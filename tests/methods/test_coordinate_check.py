"""The scale of activations over widths and steps."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fused_lwlr
from fused_lwlr import CoordinateCheck, coordinate_check, multipliers

INPUTS, CLASSES, BASE = 16, 4, 32


def batches(count):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(32, INPUTS, generator=generator), torch.randint(CLASSES, (32,), generator=generator))
        for _ in range(count)
    ]


def mlp(width, *, mup=False):
    """Weights of variance 2 / fan_in; with μP, output weights of variance 2 BASE / fan_in²."""
    model = nn.Sequential(
        nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )
    for i in (0, 2, 4):
        nn.init.normal_(model[i].weight, 0, (2 / model[i].in_features) ** 0.5)
        nn.init.zeros_(model[i].bias)
    if mup:
        with torch.no_grad():
            model[4].weight *= (BASE / width) ** 0.5
    return model


def standard(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def ours(model):
    layers = multipliers.mup(model, mlp(BASE), "adamw")
    return fused_lwlr.AdamW(model.named_parameters(), lr=0.01, layers=layers)


@pytest.mark.parametrize(("make_optimizer", "mup"), [(standard, False), (ours, True)])
def test_activations_are_level_with_mup_alone(make_optimizer, mup):
    """Tensor Programs V, Figure 5: in the standard parametrization, hidden activations and outputs grow."""
    widths, data = [64, 256, 1024], batches(4)
    found = coordinate_check(
        lambda width: mlp(width, mup=mup), widths, make_optimizer, data, cross_entropy, steps=3, seeds=(2,)
    )
    assert found.names == ("0", "1", "2", "3", "4", "(output)")
    after = dict(zip(found.names, found.exponents[1:].T, strict=True))
    assert np.abs(after["0"]).max() < 0.1
    if mup:
        assert max(np.abs(after[name]).max() for name in ("1", "2", "3")) < 0.1
        assert after["(output)"].max() < 0.1
    else:
        assert after["2"].min() > 0.3
        assert after["(output)"].min() > 0.6


def test_scales_are_of_a_plain_loop():
    """Without hooks: matrix products of the weights, and steps of torch.optim."""
    widths, seeds, data = (3, 5), (1, 2), batches(3)
    found = coordinate_check(mlp, widths, sgd, iter(data), cross_entropy, steps=2, seeds=seeds)
    expected = np.zeros((2, 3, 6))
    for i, width in enumerate(widths):
        for seed in seeds:
            torch.manual_seed(seed)
            model = mlp(width)
            weights = [p for m in model for p in m.parameters()]
            for step, (x, target) in enumerate(data):
                w0, b0, w2, b2, w4, b4 = weights
                first = x @ w0.T + b0
                second = first.relu() @ w2.T + b2
                out = second.relu() @ w4.T + b4
                outputs = [first, first.relu(), second, second.relu(), out, out]
                expected[i, step] += [y.abs().mean().item() / len(seeds) for y in outputs]
                gradients = torch.autograd.grad(cross_entropy(out, target), weights)
                with torch.no_grad():
                    for w, gradient in zip(weights, gradients, strict=True):
                        w -= 0.5 * gradient
    assert found.widths == widths
    np.testing.assert_allclose(found.scale, expected, rtol=1e-5)


class Mixed(nn.Module):
    """Modules that return a tuple, a dict, and integers, and one that is called twice."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.attention = nn.Embedding(CLASSES, width), nn.MultiheadAttention(width, 1, batch_first=True)
        self.twice, self.ids = nn.ReLU(), nn.Identity()

    def forward(self, ids):
        x = self.embed(self.ids(ids))
        self.seen = [x, self.attention(x, x, x)[0]]
        calls = [self.twice(x), self.twice(x + 3)]
        self.called = (calls[0].abs().mean() + calls[1].abs().mean()) / 2
        return {"length": 3, "logits": self.seen[1]}


def test_tuples_mappings_integers_and_repeated_calls():
    made = []
    found = coordinate_check(
        lambda width: made.append(Mixed(width)) or made[-1], [2, 4], sgd,
        [torch.tensor([[0, 1, 2]])], lambda out, ids: out["logits"].mean(), steps=0,
    )  # fmt: skip
    assert found.names == ("embed", "attention", "twice", "(output)")
    for model, scale in zip(made, found.scale[:, 0], strict=True):
        embed, attention = (x.abs().mean().item() for x in model.seen)
        assert scale.tolist() == pytest.approx([embed, attention, model.called.item(), attention])
        assert not any(module._forward_hooks for module in model.modules())


def test_the_last_minibatch_only_measures():
    taken = []

    def counted(model):
        optimizer = sgd(model)
        optimizer.register_step_post_hook(lambda *_: taken.append(model[0].out_features))
        return optimizer

    coordinate_check(mlp, [2, 4], counted, batches(3), cross_entropy, steps=2)
    assert taken == [2, 2, 4, 4]


def test_widths_and_seeds_may_be_iterators():
    found = [
        coordinate_check(mlp, widths, standard, batches(2), cross_entropy, steps=1, seeds=seeds)
        for widths, seeds in (([2, 4], [0, 1]), (iter([2, 4]), iter([0, 1])))
    ]
    assert found[1].widths == (2, 4)
    np.testing.assert_array_equal(found[0].scale, found[1].scale)


def test_random_numbers_are_restored():
    before = torch.get_rng_state()
    coordinate_check(mlp, [2, 4], standard, batches(1), cross_entropy, steps=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def powers():
    """Scales that are powers of the width, 0 and infinite."""
    widths = np.array([10, 20, 80])[:, None]
    level = widths * np.ones(4)
    scale = np.stack([level**0, 3 * widths ** np.array([-1, 0, 0.5, 2])], axis=1)
    scale[1, 0, 0], scale[2, 0, 1] = 0, np.inf
    return CoordinateCheck(("a", "b.long", "c", "(output)"), (10, 20, 80), scale)


def test_exponents(powers):
    expected = [[np.nan, np.nan, 0, 0], [-1, 0, 0.5, 2]]
    np.testing.assert_allclose(powers.exponents, expected, atol=1e-12)


def test_table_has_the_last_step(powers):
    header, *rows = str(powers).splitlines()
    assert powers.table() == str(powers)
    assert header.split() == ["module", "10", "20", "80", "exponent"]
    assert [row.split() for row in rows][:2] == [
        ["a", "3.000e-01", "1.500e-01", "3.750e-02", "-1.00"],
        ["b.long", "3.000e+00", "3.000e+00", "3.000e+00", "0.00"],
    ]
    assert len({len(line) for line in (header, *rows)}) == 1


def test_plot_has_a_line_for_each_module_and_a_plot_for_each_step(powers, tmp_path):
    figure = powers.plot(tmp_path / "check.png", title="net")
    assert len(figure.axes) == 2
    for step, axes in enumerate(figure.axes):
        np.testing.assert_array_equal([line.get_ydata() for line in axes.lines], powers.scale[:, step].T)
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in figure.legends[0].texts] == list(powers.names)
    assert figure.get_suptitle() == "net"
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")


def deeper(width):
    return mlp(width) if width == 2 else nn.Sequential(*mlp(width), nn.Identity())


WRONG = [
    ({"widths": [8, 8]}, r"widths=\[8, 8\] must have at least two different widths"),
    ({"widths": [0, 8]}, r"widths=\[0, 8\] must have at least two different widths, all above 0"),
    ({"make_model": lambda width: nn.ReLU()}, r"make_model\(2\) must return a model with parameters"),
    ({"widths": 8}, "widths=8 must be a list"),
    ({"widths": ["4", "8"]}, r"widths=\['4', '8'\] must have at least two different widths"),
    ({"seeds": 1}, "seeds=1 must be a list"),
    ({"steps": -1}, "steps=-1 must be an int, at least 0"),
    ({"steps": 0.5}, "steps=0.5 must be an int, at least 0"),
    ({"seeds": []}, r"seeds=\[\] must have at least one seed"),
    ({"steps": 2}, "batches ended after 2 minibatches, but steps=2 needs 3"),
    (
        {"make_model": deeper},
        r"make_model\(4\) must return a model that calls the same modules as the first one in every step, but '5'",
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(options, message):
    given = {"make_model": mlp, "widths": [2, 4], "make_optimizer": standard, "batches": batches(2), "steps": 1}
    with pytest.raises(ValueError, match=message):
        coordinate_check(**given | options, loss_fn=cross_entropy)


def test_an_optimizer_is_needed():
    with pytest.raises(TypeError, match="make_optimizer must return an optimizer, not NoneType"):
        coordinate_check(mlp, [2, 4], lambda model: None, batches(2), cross_entropy, steps=1)
