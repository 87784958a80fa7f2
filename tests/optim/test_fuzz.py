"""Random sequences of training operations, compared step by step with torch's single-tensor optimizer."""

import pytest
import torch
from cases import long, nan_arithmetic, overflow
from fuzzing import GRADIENTS, HALF, OPTIONS_OF_LAYERS, REPLACED, SHAPES, Twins
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore:scaling=.* selects none of the:UserWarning")
SWITCH = st.booleans()
WHICH = st.integers(0, 3)
COMMON = {"lr": st.sampled_from([0.05, 0.5]), "weight_decay": st.sampled_from([0.0, 0.1]), "maximize": SWITCH}
# nesterov goes with momentum and without dampening; with beta1 < sqrt(beta2) a huge gradient leaves the first moment
# no later than the second, so that no quotient of both grows without limit
OPTIONS = {
    "sgd": st.tuples(
        st.fixed_dictionaries(COMMON),
        st.sampled_from([
            {}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.5, "nesterov": True},
        ]),
    ),
    "adamw": st.tuples(
        st.fixed_dictionaries({**COMMON, "amsgrad": SWITCH, "eps": st.sampled_from([1e-8, 1e-3])}),
        st.sampled_from([{}, {"betas": (0.5, 0.9)}, {"betas": (0.0, 0.3)}]),
    ),
    "lr in momentum": st.tuples(
        st.fixed_dictionaries(COMMON), st.sampled_from([{}, {"momentum": 0.5, "nesterov": True}])
    ),
    # with rates that halve no weight, so that no step ends near zero
    "hyperball": st.tuples(
        st.fixed_dictionaries({**COMMON, "lr": st.sampled_from([0.05, 0.2])}),
        st.sampled_from([
            {}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.5, "nesterov": True},
        ]),
    ),
    "lion": st.tuples(
        st.fixed_dictionaries(COMMON), st.sampled_from([{}, {"betas": (0.5, 0.9)}, {"betas": (0.0, 0.3)}])
    ),
}  # fmt: skip
LATER = {
    "sgd": {"momentum": st.sampled_from([0.0, 0.9])},
    "adamw": {"betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9)])},
    "lr in momentum": {"momentum": st.sampled_from([0.5, 0.9])},
    "hyperball": {"lr": st.sampled_from([0.05, 0.2]), "momentum": st.sampled_from([0.0, 0.9])},
    "lion": {"betas": st.sampled_from([(0.9, 0.99), (0.5, 0.9)])},
}
# plain gradients more often than the others, so that most sequences do not end in NaN
KINDS = st.lists(st.sampled_from([*["uniform"] * 12, *GRADIENTS]), min_size=1, max_size=3)
# these leave NaN in a weight: the factors of such a layer are not compared, as with any norm
ENDLESS = ("huge", "overflowing", "one NaN", "one infinity")
FINITE_KINDS = KINDS.map(lambda kinds: ["uniform" if kind in ENDLESS else kind for kind in kinds])
MODEL = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)
ARGUMENTS = {
    "step_again": (),
    "zero_grad": (SWITCH,),
    "freeze": (WHICH, SWITCH),
    "add_param_group": (st.sampled_from(SHAPES), st.fixed_dictionaries({}, optional=COMMON)),
    "reload": (),
    "reload_into_new": (),
    "exchange": (),
    "copy": (),
    "forget": (),
    "replace_state": (),
    "edit": (WHICH, st.sampled_from([0.5, -1.0, 0.0])),
    "replace": (WHICH, st.sampled_from([*REPLACED])),
    "cast": (st.sampled_from([torch.float32, torch.float64, *HALF]),),
}


def layers(name):
    """No options of layers, or an entry for each of the first three parameters."""
    entries = [
        1.0,
        {"weight_decay": 2.0},
        {"weight_decay": 0.0},
        {"corrected_decay": True},
        *OPTIONS_OF_LAYERS.get(name, ()),
    ]
    # with lr in the momentum buffer, η is not part of the buffer
    entries += [] if name == "lr in momentum" else [0.5, {"lr": 3.0, "weight_decay": 0.5}]
    return st.one_of(st.none(), st.lists(st.sampled_from(entries), min_size=3, max_size=3))


@st.composite
def sequences(draw, name):
    """Operations, most of them followed by a step that shows their effect."""
    options, kinds = {**COMMON, **LATER[name]}, FINITE_KINDS if name == "hyperball" else KINDS
    sequence = [("step", draw(kinds))]
    for _ in range(draw(st.integers(3, 8))):
        operation = draw(st.sampled_from([*ARGUMENTS, "set_option"]))
        if operation == "set_option":
            key = draw(st.sampled_from([*options]))
            sequence.append((operation, draw(WHICH), key, draw(options[key])))
        else:
            sequence.append((operation, *map(draw, ARGUMENTS[operation])))
        sequence += [("step", draw(kinds))] * draw(st.sampled_from([1, 1, 2, 0]))
    return [*sequence, ("step", ["uniform"])]


@nan_arithmetic
@overflow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("sgd", "torch"), ("sgd", "triton"), ("adamw", "triton"), ("lr in momentum", "triton"), ("lion", "torch"),
        *(long(*row) for row in (("adamw", "torch"), ("lr in momentum", "torch"), ("lion", "triton"))),
        ("hyperball", "torch"), long("hyperball", "triton"),
    ],
)  # fmt: skip
def test_any_sequence(name, backend, device):
    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=settings().max_examples // 2)
    @given(OPTIONS[name], MODEL, SWITCH, st.sampled_from([None, 0.9, 0.3]), layers(name), sequences(name))
    def run(options, shapes, named, ema, entries, sequence):
        torch.manual_seed(0)
        twins = Twins(name, backend, {**options[0], **options[1]}, shapes, device, named, ema, entries)
        for operation, *arguments in sequence:
            getattr(twins, operation)(*arguments)
            twins.check()

    run()
