"""The study gradinit: a smoke test through the command, and its parts by hand."""

import numpy as np
import pandas
import pytest
import torch
from by_hand import batches
from test_lwlr_studies import COMMON, quick, spread
from torch.nn.functional import cross_entropy

from fused_lwlr.data.digits import digits
from fused_lwlr.models.build import build
from fused_lwlr.models.deep import kaiming_init_
from fused_lwlr.papers.gradinit import _paper, factors, gradient_std, initialize_and_train


def test_study(tmp_path):
    (accuracy, differences, variance), jobs = quick("gradinit", tmp_path, "--model", "noshort8x2-nobn")
    assert [row["initialization"] for row in accuracy] == ["He", "MetaInit", "GradInit", "GradInit, g / ‖g‖"]
    of = {(p["init"], p["seed"]): job["values"] for job in jobs for p in [job["parameters"]]}
    assert accuracy[0]["first epoch %"] == spread([of["kaiming", seed]["first"] for seed in (0, 1)], 1)
    gain = [of["metainit", seed]["first"] - of["kaiming", seed]["first"] for seed in (0, 1)]
    assert differences[0]["difference"] == f"{np.mean(gain):+.1f} ± {np.std(gain, ddof=1):.1f}"
    assert differences[0]["paper"] == "+1.4"
    assert of["kaiming", 0]["before"] == of["kaiming", 0]["after"] == of["gradinit", 0]["before"]
    # three steps of Adam on the scales are much the same with the gradient divided by its norm
    for init in ("metainit", "gradinit", "gradinit-normalized"):
        change = np.array(of[init, 0]["after"]) / np.array(of[init, 0]["before"])
        assert abs(change - 1).max() > 1e-3
    assert [row["initialization"] for row in variance] == ["MetaInit", "GradInit", "GradInit, g / ‖g‖"]


def test_training_by_hand():
    found = initialize_and_train("kaiming", quick=True, model="resnet8x2", seed=2, **COMMON)
    torch.manual_seed(2)
    model = build("resnet8x2", image_size=8, channels=1, classes=10)
    torch.manual_seed(2)
    kaiming_init_(model)
    # running statistics of batch normalization would show if measuring had changed them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches(2)))
    for x, y in batches(2):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    test = digits()[1]
    right = (model.eval()(test.inputs).argmax(1) == test.targets).double().mean().item()
    assert found["first"] == found["last"] == pytest.approx(100 * right)
    assert found["normalized"]


def test_gradient_std():
    torch.manual_seed(0)
    model = build("resnet8x2", image_size=8, channels=1, classes=10)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = gradient_std(model, batches(0, 200))
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    of_head = []
    for x, y in batches(0, 200):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        of_head.append(model.head.weight.grad.numpy().copy())
    assert found[-1] == pytest.approx(np.std(np.array(of_head, dtype=np.float64), axis=0, ddof=1).mean(), rel=1e-5)
    assert len(found) == 8


@pytest.mark.parametrize(
    ("model", "normalized", "net", "gradinit"),
    [
        ("vgg19x8", [True, True], "VGG-19 with BN", "47.8 ± 1.8"),
        ("noshort20x8-nobn", [False], "VGG-19 without BN", "29.3 ± 0.6"),
        ("densenet100-nobn", [False], "DenseNet-100 without BN", "37.2 ± 1.1"),
        ("timm:resnet50", [True], "ResNet-110 with BN", "38.2 ± 0.9"),
        ("resnet20-nobn", [False], "ResNet-110 without BN", "36.2 ± 0.8"),
    ],
)
def test_figures_of_the_paper(model, normalized, net, gradinit):
    """GradInit, Tables 3 and 10, after the first epoch."""
    of = pandas.DataFrame({"model": model, "normalized": normalized})
    found, figures = _paper(of)
    assert (found, figures["gradinit-normalized"][0]) == (net, gradinit)


def test_factors():
    rows = [([1.0, 2.0], [0.5, 4.0]), (None, None), ([0.0, 1.0], [1.0, 1.0])]
    [found] = factors(pandas.DataFrame(rows, columns=["before", "after"]))
    assert found.tolist() == [0.5, 2.0]


def test_a_failed_initialization_is_reported(monkeypatch):
    def fail(*args, **options):
        raise ValueError("the loss is not finite: nan")

    monkeypatch.setattr("fused_lwlr.papers.gradinit.metainit_", fail)
    found = initialize_and_train("metainit", quick=True, model="noshort8x2-nobn", seed=0, **COMMON)
    assert found["first"] is None
    assert found["problem"] == "the loss is not finite: nan"
    assert found["normalized"] is False
