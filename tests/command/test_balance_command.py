"""`fused-lwlr balance`: the table, the picture, and what the scheduler does to a linear and a ReLU net."""

import numpy as np
import pytest
from typer.testing import CliRunner

from fused_lwlr import balance
from fused_lwlr.command.main import app
from fused_lwlr.papers.balance_figure import Split, train


def test_table_and_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "here" / "balance.png"
    result = CliRunner().invoke(app, ["balance", "--width", "30", "--seeds", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    rows = [line.split() for line in result.output.splitlines() if line.strip()[:1] in tuple("1248")]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    rate = 30**1.4
    assert rows[0][1] == f"{balance.one_step_loss(rate, rate, 30):.4f}"
    assert rows[1][1] == f"{balance.two_step_loss(rate, rate, 30):.4f}"
    runs = [balance.simulate(30, rate, rate, 8, seed) for seed in range(2)]
    assert rows[3][1] == f"{balance.full_gradient_loss(rate, rate, 30, 8):.4f}"
    assert rows[3][2] == f"{np.mean(runs, axis=0)[8]:.4f}"


@pytest.mark.parametrize(("steps", "kind", "best"), [(1, "local maximum", 1.0), (2, "local minimum", 0.0)])
def test_equal_rates(steps, kind, best):
    split = Split(400, 1.4)
    assert (split.equal_is(steps), split.best(steps)) == (kind, best)


def test_rates_are_apart_at_first_and_come_together():
    for net in train(steps=40):
        apart = net.factors.max(axis=1) - net.factors.min(axis=1)
        assert net.factors.sum(axis=1) == pytest.approx(2)
        assert apart[-1] < 0.9 * apart[0]
        assert net.loss[-1] < net.loss[0] / 4
