"""Scalings, limits and selections that are refused at construction."""

import math
import pickle
from dataclasses import dataclass

import pytest
from cases import layers
from steps import OURS

import fused_lwlr
from fused_lwlr import ELR, LAMB, LARC, LARS, ClipByLayer, NormalizedGradient, UpdateFloor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ELR(-0.1), r"ELR\(goal=-0.1\)"), (lambda: ELR(0.0), r"goal=0.0"), (lambda: ELR(math.nan), "goal=nan"),
        (lambda: ELR(math.inf), "goal=inf"), (lambda: ELR(0.1, eps=-1.0), r"ELR\(eps=-1.0\)"),
        (lambda: ELR(0.1, eps=math.nan), "eps=nan"), (lambda: ELR(0.1, eps=math.inf), "eps=inf"),
        (lambda: LARS(0.0), r"LARS\(trust_coefficient=0.0\)"), (lambda: LARS(-1.0), "trust_coefficient=-1.0"),
        (lambda: LARS(math.nan), "trust_coefficient=nan"), (lambda: LARS(eps=-1e-8), r"eps=-1e-08"),
        (lambda: LARC(0.0), r"LARC\(trust_coefficient=0.0\)"), (lambda: LARC(eps=math.inf), r"LARC\(eps=inf\)"),
        (lambda: ClipByLayer(0.0), r"ClipByLayer\(max_norm=0.0\)"), (lambda: ClipByLayer(-2.0), "max_norm=-2.0"),
        (lambda: ClipByLayer(math.nan), "max_norm=nan"), (lambda: ClipByLayer(math.inf), "max_norm=inf"),
        (lambda: LAMB(min_norm=-1.0), r"LAMB\(min_norm=-1.0\)"), (lambda: LAMB(min_norm=math.nan), "min_norm=nan"),
        (lambda: LAMB(min_norm=math.inf), "min_norm=inf"), (lambda: LAMB(max_norm=0.0), r"LAMB\(max_norm=0.0\)"),
        (lambda: LAMB(max_norm=math.nan), "max_norm=nan"),
        (lambda: LAMB(min_norm=2.0, max_norm=1.0), "max_norm=1.0.*min_norm=2.0"),
        (lambda: LAMB(max_norm=-1.0), "max_norm=-1.0"), (lambda: LAMB(max_ratio=0.0), r"LAMB\(max_ratio=0.0\)"),
        (lambda: LAMB(max_ratio=-1.0), "max_ratio=-1.0"), (lambda: LAMB(max_ratio=math.nan), "max_ratio=nan"),
        (lambda: UpdateFloor(-0.1), r"UpdateFloor\(ratio=-0.1\)"), (lambda: UpdateFloor(math.inf), "ratio=inf"),
        (lambda: UpdateFloor(ceiling=0.0), r"UpdateFloor\(ceiling=0.0\): it must be a number above 0"),
        (lambda: UpdateFloor(ceiling=math.nan), "ceiling=nan"),
        (lambda: UpdateFloor(0.5, 0.4), r"ceiling=0.4\): .* at least ratio=0.5"),
        (lambda: UpdateFloor(), r"UpdateFloor\(ratio=0.0, ceiling=inf\) changes no step: give a ratio, a ceiling"),
        (lambda: LARS(select=[1, 2]), r"LARS\(select=\[1, 2\]\)"),
        (lambda: NormalizedGradient(select=[None]), "select="),
        (lambda: ELR("fast"), "goal='fast'"), (lambda: ELR(None), "goal=None"), (lambda: ELR("10"), "goal='10'"),
        (lambda: LARS(eps="small"), "eps='small'"), (lambda: ClipByLayer(None), "max_norm=None"),
        (lambda: LAMB(max_norm="large"), "max_norm='large'"), (lambda: LAMB(max_ratio=None), "max_ratio=None"),
        (lambda: LARS(select=3), "select="), (lambda: LARS(select=None), "select="),
        (lambda: UpdateFloor("small"), "ratio='small'"), (lambda: UpdateFloor(0.1, "large"), "ceiling='large'"),
    ],
)  # fmt: skip
def test_numbers_out_of_range(make, message):
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
