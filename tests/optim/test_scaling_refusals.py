"""Scalings, limits and selections that are refused at construction."""

import math
import pickle
from dataclasses import dataclass

import pytest
import torch
from cases import layers
from steps import OURS

import fused_lwlr
from fused_lwlr import ELR, LAMB, LARC, LARS, ClipByLayer, NormalizedGradient, RadialBrake, UpdateFloor

POSITIVE = (0.0, -0.1, math.nan, math.inf, "fast", None, True)
NOT_NEGATIVE = (-0.1, math.nan, math.inf, "fast", None, True)
LIMIT = (0.0, -0.1, math.nan, "fast", None, True)
FIELDS = [
    (ELR, "goal", POSITIVE), (ELR, "eps", NOT_NEGATIVE), (LARS, "trust_coefficient", POSITIVE),
    (LARS, "eps", NOT_NEGATIVE), (LARC, "trust_coefficient", POSITIVE), (LARC, "eps", NOT_NEGATIVE),
    (ClipByLayer, "max_norm", POSITIVE), (LAMB, "min_norm", NOT_NEGATIVE), (LAMB, "max_norm", LIMIT),
    (LAMB, "max_ratio", LIMIT), (UpdateFloor, "ratio", NOT_NEGATIVE), (UpdateFloor, "ceiling", LIMIT),
    (RadialBrake, "outward", NOT_NEGATIVE), (RadialBrake, "inward", NOT_NEGATIVE),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "field", "values"), FIELDS)
def test_numbers_out_of_range(scaling, field, values):
    for value in values:
        required = {"goal": 0.1} if scaling is ELR else {}
        with pytest.raises(ValueError, match=rf"{scaling.__name__}\({field}={value!r}\): it must be a "):
            scaling(**{**required, field: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LAMB(min_norm=2.0, max_norm=1.0), "max_norm=1.0.*min_norm=2.0"),
        (lambda: UpdateFloor(0.5, 0.4), r"ceiling=0.4\): .* at least ratio=0.5"),
        (lambda: UpdateFloor(), r"UpdateFloor\(ratio=0.0, ceiling=inf\) changes no step: give a ratio, a ceiling"),
        (lambda: ClipByLayer(torch.ones(2)), r"max_norm=tensor\(\[1., 1.\]\)\): it must be a finite number above 0"),
        (lambda: LARS(select=[1, 2]), r"LARS\(select=\[1, 2\]\)"),
        (lambda: NormalizedGradient(select=[None]), "select="),
        (lambda: LARS(select=[torch.zeros(9, 9)]), r"^LARS\(select=\[tensor\(.{1,80} must be a predicate, a name, or"),
        (lambda: LARS(select=3), "select="), (lambda: LARS(select=None), "select="),
        (lambda: LARS(select=torch.nn.Conv2d), r"^LARS\(select=<class '.*Conv2d'>\) must be a predicate, a name, or"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "text",
    [
        "LAMB()",
        "LARS(trust_coefficient=0.02)",
        "ELR(select='*.w', goal=0.1)",
        "Hyperball(select=('!a',))",
        "BalancedLR()",
    ],
)
def test_a_scaling_prints_what_differs_from_its_defaults(text):
    scaling = eval(text, {name: getattr(fused_lwlr, name) for name in fused_lwlr.__all__})
    assert repr(scaling) == text
    assert pickle.loads(pickle.dumps(scaling)) == scaling


@pytest.mark.parametrize(("scaling", "field"), [row[:2] for row in FIELDS])
def test_a_tensor_becomes_a_number(scaling, field):
    """Later edits of the tensor do not count, and two scalings are equal if their numbers are."""
    required = {"goal": 0.1} if scaling is ELR else {}
    tensor = torch.tensor(0.5)
    made = scaling(**{**required, field: tensor})
    tensor.fill_(0.25)
    assert made == scaling(**{**required, field: 0.5})
    assert getattr(made, field) == 0.5


def test_an_own_scaling_prints_as_it_likes():
    @dataclass(frozen=True)
    class Own(ELR):
        def __repr__(self):
            return "mine"

    assert repr(Own(0.1)) == "mine"


def test_an_optimizer_prints_the_options_of_all_groups(device):
    params = layers(device)
    plain, scaled = (OURS["adamw"](params, lr=0.1, **more) for more in ({}, {"scaling": LAMB(), "nonfinite": "skip"}))
    assert "Options of all groups" not in repr(plain)
    assert repr(scaled).endswith("Options of all groups\n    scaling: LAMB()\n    nonfinite: 'skip'\n)")


def test_arguments_are_in_the_order_of_the_docstring():
    assert ELR(0.1, 0.2) == ELR(goal=0.1, eps=0.2)
    assert LARS(0.1, 0.2) == LARS(trust_coefficient=0.1, eps=0.2)
    assert ClipByLayer(0.1) == ClipByLayer(max_norm=0.1)
    assert UpdateFloor(0.1, 0.2) == UpdateFloor(ratio=0.1, ceiling=0.2)
    assert LAMB(0.5, 2.0, 3.0) == LAMB(min_norm=0.5, max_norm=2.0, max_ratio=3.0)


def test_sgd_has_no_bias_to_correct(device):
    with pytest.raises(ValueError, match=r"LAMB.*SGD has no moments"):
        OURS["sgd"](layers(device), lr=0.1, scaling=LAMB(bias_correction=False))
