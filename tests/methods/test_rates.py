"""LayerRates: a mapping that can be kept, read and drawn."""

import json
import math
import re

import numpy as np
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


@pytest.mark.parametrize("text", ["", "[]", "{}", "\udcff", '{"layers": [{"name": "a"}], "steps": 1}', '{"layers": 3}'])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"x\.json does not hold layer rates"):
        LayerRates.from_json(tmp_path / "x.json")


@pytest.mark.parametrize(
    "change", [{"name": 1}, {"eta": "1"}, {"eta": -1.0}, {"eta": math.nan}, {"numel": "4"}, {"gradient": None}], ids=str
)
def test_values_of_other_types_are_refused(change, rates, tmp_path):
    rates.to_json(tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text())
    content["layers"][0] |= change
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError,
        match=r"x\.json does not hold layer rates, .*: these are no (name and multiplier|numel and gradient): ",
    ):
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


def fused():
    """A fused projection of two slices of 8 elements, between two other layers."""
    names = ("wpe.weight", "qkv.weight[0:2]", "qkv.weight[2:4]", "head.weight", "head.bias")
    return LayerRates.from_gradients(names, (12, 8, 8, 40, 5), (9.0, 4.0, 1.0, 0.25, 0.0), ("weight",) * 5, steps=2)


@pytest.mark.parametrize(
    ("patterns", "excluded"),
    [
        (["wpe.weight"], [0]), (["w?e.*"], [0]), (["qkv.weight"], [1, 2]), (["qkv.weight[2:4]"], [2]),
        (["*.weight", "head.bias"], None), (["head.*"], [3, 4]), (["w*", "qkv.*"], [0, 1, 2]),
    ],
)  # fmt: skip
def test_exclude_is_a_calibration_without_the_layers(patterns, excluded):
    """Against `from_gradients` on the other layers alone; the mean over all parameters is 1."""
    rates = fused()
    if excluded is None:
        with pytest.raises(ValueError, match=r"exclude has '\*\.weight', 'head\.bias', so no measured layer is left"):
            rates.exclude(*patterns)
        return
    found = rates.exclude(*patterns)
    rest = [layer for i, layer in enumerate(rates.layers) if i not in excluded]
    columns = ([getattr(layer, field) for layer in rest] for field in ("name", "numel", "gradient", "kind"))
    expected = dict(LayerRates.from_gradients(*columns, steps=2))
    assert list(found) == list(rates)
    assert dict(found) == pytest.approx({name: expected.get(name, 1.0) for name in rates}, rel=1e-14)
    assert [layer.note for i, layer in enumerate(found.layers) if i in excluded] == ["excluded"] * len(excluded)
    mean = sum(layer.numel * layer.eta for layer in found.layers) / sum(layer.numel for layer in found.layers)
    assert mean == pytest.approx(1, rel=1e-14)
    assert found.exclude(*patterns, "head.bias") == pytest.approx(dict(found), rel=1e-14)


def test_what_is_rounding_is_judged_again_without_the_excluded_layers():
    gradients, names = [1.0, 5e-7, 8e-7, 4e-6, 1e-13], ["token", "a", "b", "c", "noise"]
    found = LayerRates.from_gradients(names, [4, 10, 10, 10, 10], gradients, ["weight"] * 5, 1).exclude("token")
    alone = LayerRates.from_gradients(names[1:], [10] * 4, gradients[1:], ["weight"] * 4, 1)
    assert found.layers[1:] == alone.layers
    assert [layer.note for layer in found.layers] == ["excluded", "", "", "", "gradient zero but for rounding"]


def test_sizes_may_be_an_array(tmp_path):
    LayerRates.from_gradients(["a"], np.array([10]), np.array([1.0]), ["weight"], 1).to_json(tmp_path / "rates.json")
    assert LayerRates.from_json(tmp_path / "rates.json").layers[0].numel == 10


@pytest.mark.parametrize(
    ("numel", "gradients", "message"),
    [
        ([1], [1.0, 2.0], r"names, numel, gradients and kinds must have one length, not \[2, 1, 2, 2\]"),
        ([1, 2], [1.0, -2.0], r"gradients=\[1.0, -2.0\] must be finite numbers, at least 0, or NaN"),
        ([1, 2], [1.0, math.inf], r"gradients=\[1.0, inf\] must be finite numbers"),
        ([1, 2], [0.0, math.nan], "the gradient of every layer is zero"),
    ],
)
def test_gradients_that_are_refused(numel, gradients, message):
    with pytest.raises(ValueError, match=message):
        LayerRates.from_gradients(("a", "b"), numel, gradients, ("weight",) * 2, steps=1)


def test_no_layers():
    assert repr(LayerRates([], 0)) == "LayerRates(0 layers)"


@pytest.mark.parametrize("pattern", [1, ["wpe.weight"], None])
def test_exclude_refuses_other_things_than_names(pattern):
    with pytest.raises(ValueError, match=r"exclude has .*, but must have names and patterns"):
        fused().exclude(pattern)


def test_exclude_refuses_patterns_without_a_match():
    with pytest.raises(ValueError, match=r"exclude has 'wte\.weight': it is not a layer of these rates; did you"):
        fused().exclude("wte.weight")


def test_or_merges_as_dict_does(tmp_path):
    rates = fused()
    merged = rates | {"head.weight": 3, "wpe.weight": 1.0}
    assert dict(merged) == dict(rates) | {"head.weight": 3.0, "wpe.weight": 1.0}
    assert list(merged) == list(rates)
    assert [layer.name for layer in merged.unmeasured] == ["wpe.weight", "head.weight", "head.bias"]
    merged.to_json(tmp_path / "rates.json")
    assert LayerRates.from_json(tmp_path / "rates.json").layers == merged.layers
    assert dict(rates) == dict(fused())
    other = LayerRates.from_gradients(("head.weight", "tail.weight"), (40, 7), (1.0, 4.0), ("weight",) * 2, steps=1)
    assert dict(rates | other) == dict(rates) | dict(other)
    assert (rates | other).layers[-1] == other.layers[-1]


def test_or_replaces_the_slices_of_a_parameter():
    """The gradient of the whole is the mean over its elements: (8 · 4 + 8 · 1) / 16."""
    merged = fused() | {"qkv.weight": 0.5}
    assert list(merged) == ["wpe.weight", "qkv.weight", "head.weight", "head.bias"]
    assert (merged.layers[1].eta, merged.layers[1].numel, merged.layers[1].gradient) == (0.5, 16, 2.5)
    assert list(fused() | {"qkv.weight[2:4]": 2.0}) == list(fused())
    with pytest.raises(ValueError, match=r"\| has 'qkv\.wight', but these rates have no such layer"):
        fused() | {"qkv.wight": 1.0}
    for bad in ({"weight_decay": 0}, -1.0, math.nan, "x"):
        message = rf"{re.escape(repr(bad))} for 'head\.bias', but rates are .* layers=\[rates, options\]"
        with pytest.raises(ValueError, match=message):
            fused() | {"head.bias": bad}
    with pytest.raises(TypeError, match="unsupported operand"):
        fused() | 3
