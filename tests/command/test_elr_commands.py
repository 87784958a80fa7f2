"""`fused-lwlr elr`: the model fitted to a real net's first step, and the paper's simulations."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from fused_lwlr import simulate
from fused_lwlr.command.main import app
from fused_lwlr.data.datasets import Batches, digits
from fused_lwlr.models.toynet import ToyNet
from fused_lwlr.papers.elr_figures import FIGURES, figure_2
from fused_lwlr.papers.elr_fit import Comparison, Fit

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(line, code=0):
        result = CliRunner().invoke(app, line.split(), prog_name="fused-lwlr")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fit(run, tmp_path, momentum):
    """Against a training by hand: measured E, and what the first step alone predicts."""
    lrs, steps, depth = (0.01, 0.5), 3, 6
    line = f"elr fit --depth {depth} --width 4 --steps {steps} --seeds 1 --device cpu --momentum {momentum}"
    output = run(f"{line} --lr {lrs[0]} --lr {lrs[1]} --out here").output
    assert "toynet of 6 layers on digits" in output
    assert (tmp_path / "here" / "fit.png").read_bytes().startswith(PNG)
    found = json.loads((tmp_path / "here" / "fit.json").read_text())["rates"]
    for lr, of_rate in zip(lrs, found, strict=True):
        torch.manual_seed(0)
        model = ToyNet(depth=depth, width=4, channels=1, classes=10)
        weights = list(model.layers.parameters())[1:]
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        measured, start = [], None
        for _, (x, y) in zip(range(steps + 1), Batches(digits().train, 64, torch.device("cpu"), seed=0), strict=False):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            norms = np.array([w.detach().norm().item() for w in weights])
            if start is None:
                start = norms**2, norms * [w.grad.norm().item() for w in weights]
            optimizer.step()
            steered = [w.grad if momentum == 0 else optimizer.state[w]["momentum_buffer"] for w in weights]
            measured.append(np.array([g.norm().item() for g in steered]) / norms)
        np.testing.assert_allclose(of_rate["measured"], measured, rtol=1e-3)
        predicted = simulate.momentum(start[1], start[0], lr, momentum, steps).elr
        np.testing.assert_allclose(of_rate["predicted"], predicted, rtol=1e-3)


def test_fit_of_another_model(run):
    assert (
        "noshort on digits, 1 seed, 32 layers"
        in run("elr fit --model noshort --lr 0.1 --steps 1 --seeds 1 --batch-size 16 --device cpu").output
    )
    message = "vit has no scale-invariant layers"
    assert message in run("elr fit --model vit --steps 1 --seeds 1 --device cpu", 2).stderr


def test_comparison():
    found = Comparison(0.1, ("a", "b", "c"), np.array([[1.0, 2.0, 4.0]]), np.array([[4.0, 2.0, 1.0]]))
    measured, predicted, correlation, apart = found.row(0)
    assert measured == predicted == pytest.approx(np.std([1, 2, 4]))
    assert correlation == pytest.approx(-1)
    assert apart == pytest.approx(4 ** (2 / 3))


def test_figures(run, tmp_path):
    output = run("elr figures --depth 4 --only 1 --only 4 --out here").output
    assert output.split() == ["Wrote", "here/figure_1.png.", "Wrote", "here/figure_4.png."]
    for number in (1, 4):
        assert (tmp_path / "here" / f"figure_{number}.png").read_bytes().startswith(PNG)


def test_figure_6_shows_every_schedule():
    axes = FIGURES[6](5, 1.0).axes
    rates = [line.get_ydata() for place in axes[:5] for line in place.lines]
    assert [place.get_title() for place in axes[:5]][:2] == ["constant", "cosine"]
    for place, lrs in zip(axes[5:10], rates, strict=True):
        shown = np.stack([line.get_ydata() for line in place.lines], axis=1)
        np.testing.assert_allclose(shown, simulate.discrete(simulate.feedforward_profile(5), 1.0, lrs).elr)


def test_figure_2_shows_what_the_model_says():
    """Mean and spread fall with λ, and shortcuts keep the spread down at low rates."""
    mean, spread = figure_2(56, 1.0).axes
    (noshort, short) = (line.get_ydata() for line in spread.lines)
    lrs = spread.lines[0].get_xdata()
    expected = simulate.discrete(simulate.feedforward_profile(56), 1.0, np.full(10, lrs[-1])).elr[-1]
    assert noshort[-1] == pytest.approx(np.std(expected))
    assert mean.lines[0].get_ydata()[-1] == pytest.approx(np.mean(expected))
    assert (np.diff(noshort) < 0).all()
    assert short[0] < noshort[0] / 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("elr fit --lr -1", "lrs must be rates above 0"),
        ("elr fit --model nope --device cpu", "there is no model 'nope'"),
        ("elr fit --momentum 1", "momentum must be at least 0 and below 1, not 1.0"),
        ("elr figures --sq-norm 0", "sq_norm=0.0 must be above 0"),
    ],
)
def test_bad_input_is_one_line(run, line, message):
    stderr = run(line, 2).stderr.strip()
    assert stderr.startswith("Error: ")
    assert message in stderr
    assert "\n" not in stderr


def test_bad_numbers():
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        Fit(steps=0)
