"""LayerRates: a mapping that can be kept, read and drawn."""

import json

import pytest

from fused_lwlr import LayerRates

NAMES = ("stem.weight", "norm.weight", "head.weight", "head.bias")


@pytest.fixture
def rates():
    return LayerRates.from_gradients(NAMES, (90, 10, 400, 4), (4.0, 1.0, 0.25, 1e-9), ("weight", "scale") * 2, steps=3)


def test_closed_form(rates):
    """1/√G = ½, 1, 2; the parameter-weighted mean over measured layers is (45 + 10 + 800) / 500."""
    mean = 855 / 500
    assert list(rates) == list(NAMES)
    assert list(rates.values()) == pytest.approx([0.5 / mean, 1 / mean, 2 / mean, 1.0], rel=1e-15)
    assert [layer.name for layer in rates.unmeasured] == ["head.bias"]


def test_scale_of_the_loss_does_not_matter(rates):
    scaled = LayerRates.from_gradients(NAMES, (90, 10, 400, 4), (4e3, 1e3, 250.0, 1e-6), ("weight",) * 4, steps=3)
    assert dict(scaled) == pytest.approx(dict(rates), rel=1e-14)


def test_json_round_trip_is_exact(rates, tmp_path):
    rates.to_json(tmp_path / "rates.json")
    again = LayerRates.from_json(tmp_path / "rates.json")
    assert again.layers == rates.layers
    assert again.steps == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": [{"name": "a"}], "steps": 1}', json.dumps({"layers": 3})])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json does not hold layer rates"):
        LayerRates.from_json(tmp_path / "x.json")


def test_table_and_repr(rates):
    header, *rows = str(rates).splitlines()
    assert header.split() == ["layer", "kind", "numel", "G", "η"]
    assert [row.split()[0] for row in rows] == list(NAMES)
    assert rows[-1].endswith("gradient zero but for rounding")
    assert "4 layers" in repr(rates)


def test_plot_shows_every_layer(rates, tmp_path):
    figure = rates.plot(tmp_path / "rates.png", title="net")
    left, right = figure.axes
    assert left.lines[0].get_ydata().tolist() == list(rates.values())
    assert right.lines[0].get_ydata().tolist() == [rates["stem.weight"], rates["head.weight"]]
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
