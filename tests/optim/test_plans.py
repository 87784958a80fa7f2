"""Parameters that have a gradient in some steps only: one plan serves them all."""

import weakref
from copy import deepcopy

import pytest
import torch
from cases import BACKENDS, every_backend, every_case, every_name, long
from pairs import beside_torch, twin_parameters
from steps import OPTIONS, OURS, compare, gradients, identical, parameters, snapshot, twin
from tolerances import close, same

from fused_lwlr import ELR, LAMB, LARS, BalancedLR, ScaleInvariant
from fused_lwlr.optim import base
from fused_lwlr.scaling import everything

SHAPES = [(6, 5), (1030,), (3, 2), (3, 2)]
# a trunk, and heads that take turns: which parameters have a gradient
TURNS = [(0, 1, 2), (0, 1, 3), (0, 1)]
CONTROLS = [
    {"scaling": ELR(0.1, select=everything)}, {"scaling": LARS(select=everything), "ema": 0.9},
    {"clip_global_norm": 0.5}, {"nonfinite": "skip"},
]  # fmt: skip
SKIPPING = {"nonfinite": "skip", "ema": 0.9}
OWN = {"sgd": {"scaling": BalancedLR(select=everything)}, "adamw": {"scaling": LAMB(select=everything)}}


@pytest.fixture
def made(monkeypatch):
    """Records all plans that are made."""
    found = []

    class Counted(base.StepPlan):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(weakref.ref(self))

    monkeypatch.setattr(base, "StepPlan", Counted)
    return found


def turn(optimizers, twins, members):
    gradients(*twins)
    for named in twins:
        for i, (_, p) in enumerate(named):
            if i not in members:
                p.grad = None
    for optimizer in optimizers:
        optimizer.step()


def pair(name, backend, device):
    ours, torchs, named, expected = beside_torch(name, SHAPES, device, backend)
    return (ours, torchs), (named, expected)


@every_case
def test_heads_take_turns(name, backend, made, device):
    """As in torch.optim; after every parameter has its state, no new plan is made."""
    both, twins = pair(name, backend, device)
    for step in range(12):
        turn(both, twins, TURNS[step % 3])
        compare(lambda a, b: close(a, b, 13), *both, *twins)
        if step == 5:
            made.clear()
    assert not made
    if name == "adamw":
        assert [both[0].state[p]["step"].item() for _, p in twins[0]] == [12, 12, 4, 4]


@every_case
def test_other_entries_of_the_state_need_no_new_plan(name, backend, made, device):
    """A program may add a text to the state of a parameter, or a number for all of them."""
    named = parameters([(3, 2)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], backend=backend)
    ours.state[named[0][1]]["note"] = "text"
    ours.state["epoch"] = 3
    for _ in range(3):
        turn((ours,), (named,), (0,))
    assert len(made) == 1


@every_case
def test_reading_options_and_averages_needs_no_new_plan(name, backend, made, device):
    """A capture in a CUDA graph would refuse a new plan."""
    named = parameters([(3, 2)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], layers={"p0[0:1]": 0.5}, ema=0.9, backend=backend)
    for _ in range(3):
        turn((ours,), (named,), (0,))
        ours.layers(), ours.state_dict()
        with ours.averaged():
            pass
    assert len(made) == 1


@every_case
def test_state_of_a_parameter_that_is_no_dict(name, backend, device):
    named = parameters([(3, 2), (4,)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], backend=backend)
    for _ in range(2):
        turn((ours,), (named,), (0, 1))
    param, before = named[1][1], [p.detach().clone() for _, p in named]
    ours.state[param] = 5
    with pytest.raises(ValueError, match=r"the state of parameter 'p1' must be a dict, not 5: .*state\.pop\(param\)"):
        turn((ours,), (named,), (0, 1))
    assert identical(before, [p.detach() for _, p in named])
    ours.state.pop(param)
    turn((ours,), (named,), (0, 1))


@every_case
def test_state_that_belongs_to_no_parameter_stays(name, backend, device):
    both, twins = pair(name, backend, device)
    for optimizer in both:
        optimizer.state["epoch"] = 3
    for _ in range(3):
        turn(both, twins, range(4))
        assert both[0].state.pop("epoch") == both[1].state.pop("epoch") == 3
        compare(lambda a, b: close(a, b, 6), *both, *twins)
        for optimizer in both:
            optimizer.state["epoch"] = 3


@every_case
def test_a_plan_waits_for_its_first_gradient(name, backend, made, device):
    """A plan for each dtype; one of them is made with the state of parameters, and without a gradient."""
    named, expected = (
        [*of_one, *zip(("q0", "q1"), (p for _, p in of_another), strict=True)]
        for of_one, of_another in zip(
            *(twin_parameters([(3, 2), (5,)], dtype, device) for dtype in (torch.float32, torch.bfloat16)), strict=True
        )
    )
    ours, other = (
        OURS[name](pairs, **OPTIONS[name], backend=of) for pairs, of in ((named, backend), (expected, "torch"))
    )
    turn((ours, other), (named, expected), range(4))
    ours.load_state_dict(ours.state_dict())
    made.clear()
    for members in [(0, 1), (0, 1, 2, 3), (2, 3), (0, 1), (1, 2)]:
        other._last_plans = None
        turn((ours, other), (named, expected), members)
        compare(lambda a, b: close(a, b, 6), ours, other, named, expected)
    # one a step is the other's
    assert len(made) == 1 + 5


@pytest.mark.parametrize(
    ("name", "backend", "more"),
    [(name, "torch", more) for name in OURS for more in (*CONTROLS, None)]
    + [(name, "triton", more) for name in OURS for more in (CONTROLS[0], *CONTROLS[2:], None)]
    + [long(name, "triton", CONTROLS[1]) for name in OURS],
    ids=lambda value: value if isinstance(value, str) else "-".join(value or ["own"]),
)
def test_equals_a_new_plan_in_every_step(name, backend, more, made, device):
    """Norms carried from step to step are the norms of the current weights, also after edits."""
    more = OWN[name] if more is None else more
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    ours, other = (
        OURS[name](pairs, **OPTIONS[name], backend=of, **more) for pairs, of in ((named, backend), (expected, "torch"))
    )
    for step in range(9):
        other._last_plans = None
        if step == 7:
            with torch.no_grad():
                for pairs in (named, expected):
                    pairs[0][1].mul_(3)
        turn((ours, other), (named, expected), TURNS[step % 3])
        compare(lambda a, b: close(a, b, 40), ours, other, named, expected)
        if step == 5:
            made.clear()
    # one a step is the other's
    assert len(made) == 3


@pytest.mark.parametrize(
    ("backend", "more"),
    [("torch", {}), ("torch", SKIPPING), ("triton", {}), long("triton", SKIPPING)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_weights_are_rescaled_with_and_without_a_gradient(backend, more, made, device):
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    ours, other = (
        OURS["sgd"](
            pairs, **OPTIONS["sgd"], **more, backend=of,
            rescale_weights=ScaleInvariant(
                ("p0", "p3"), tuple((torch.nn.ParameterDict({"w": pairs[i][1]}), "w") for i in (0, 3)), (), (), {}, {}
            ),
        )
        for pairs, of in ((named, backend), (expected, "torch"))
    )  # fmt: skip
    for step in range(9):
        other._last_plans = None
        members = [(0, 1), (1, 3), (0, 3)][step % 3]
        before = deepcopy([ours.state.get(p, {}) for _, p in named])
        turn((ours, other), (named, expected), members)
        compare(lambda a, b: close(a, b, 40), ours, other, named, expected)
        for i, state in enumerate(before):
            if i not in members:
                # not stepped: neither is that counted, nor the average moved
                after = ours.state.get(named[i][1], {})
                assert all(torch.equal(after[key], state[key]) for key in state.keys() & {"step", "ema"})
        if step == 5:
            made.clear()
    assert len(made) == 3


def replace_state(optimizer, named):
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items()})


def count_anew(optimizer, named):
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.tensor(30.0)


def move_counts(optimizer, named):
    """The counts are then no longer next to each other in memory."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].data = state["step"].data.clone()


def exchange(optimizer, named):
    """Exchanges the state of the two heads. The next step has a gradient for one of them."""
    (_, p), (_, q) = named[2:4]
    optimizer.state[p], optimizer.state[q] = optimizer.state[q], optimizer.state[p]


def exchange_keys(optimizer, named):
    """As `exchange`, but the state has the same tensors in the same order."""
    (_, p), (_, q) = named[2:4]
    first, second = optimizer.state.pop(p), optimizer.state.pop(q)
    optimizer.state[q] = first
    optimizer.state[p] = second


def reverse(optimizer, named):
    [group] = optimizer.param_groups
    for key in {"params", "param_names"} & group.keys():
        group[key].reverse()


def add(optimizer, named):
    named.append(("more", torch.nn.Parameter(torch.ones(3, device=named[0][1].device))))
    optimizer.add_param_group({"params": named[-1:]})


CHANGES = {
    "clear": lambda optimizer, named: optimizer.state.clear(),
    "clear one": lambda optimizer, named: optimizer.state[named[0][1]].clear(),
    # to the head of the next step, from the other, which starts again without state
    "hand over": lambda optimizer, named: optimizer.state.update({named[2][1]: optimizer.state.pop(named[3][1])}),
    "move": lambda optimizer, named: setattr(named[0][1], "data", named[0][1].data.clone()),
    "options": lambda optimizer, named: optimizer.param_groups[0].update(weight_decay=0.0, lr=0.003),
    "load": lambda optimizer, named: optimizer.load_state_dict(optimizer.state_dict()),
    **{f.__name__: f for f in (replace_state, count_anew, move_counts, exchange, exchange_keys, reverse, add)},
}


# plans do not depend on the rule
@pytest.mark.parametrize(
    ("name", "backend", "change"),
    [(name, of, change) for name, of in (("sgd", "torch"), ("adamw", "triton")) for change in CHANGES]
    + [long(name, of, change) for name, of in (("adamw", "torch"), ("sgd", "triton")) for change in CHANGES],
)
def test_something_else_changes(name, backend, change, device):
    both, twins = pair(name, backend, device)
    for step in range(13):
        if step == 7:
            for optimizer, named in zip(both, twins, strict=True):
                CHANGES[change](optimizer, named)
        turn(both, twins, TURNS[step % 3])
        compare(lambda a, b: close(a, b, 14), *both, *twins)


@every_case
def test_another_parameter_takes_the_place_of_one_without_state(name, backend, device):
    both, twins = pair(name, backend, device)
    for step in range(4):
        if step == 2:
            for optimizer, named in zip(both, twins, strict=True):
                label, old = named[3]
                named[3] = label, torch.nn.Parameter(old.detach().clone())
                optimizer.param_groups[0]["params"][3] = named[3][1]
        turn(both, twins, (0, 1) if step < 2 else (0, 1, 3))
        compare(lambda a, b: close(a, b, 6), *both, *twins)


@every_case
def test_capturable_is_switched_on(name, backend, made, device):
    """The device counts steps from then on, so the table needs a column of counts."""
    named = parameters(SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], backend=backend)
    for capturable in (False, False, True, True):
        optimizer.param_groups[0]["capturable"] = capturable
        turn((optimizer,), (named,), range(4))
        [launch] = optimizer._last_plans[0].launch_plans
        assert ("step" in launch.table.columns) == capturable
    assert len(made) == 2


@every_case
def test_a_group_loses_the_option_of_averages(name, backend, device):
    named = parameters(SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], ema=0.9, backend=backend)
    turn((optimizer,), (named,), range(4))
    del optimizer.param_groups[0]["ema"]
    turn((optimizer,), (named,), range(4))
    assert not any("ema" in state for state in optimizer.state.values())


def test_other_names_of_the_same_parameters(device):
    named = parameters(SHAPES, torch.float32, device)
    optimizer = OURS["sgd"](named, **OPTIONS["sgd"], scaling=ELR(0.1, select="p0"), backend="torch")
    for names in (["p0", "p1", "p2", "p3"], ["q", "p0", "p2", "p3"]):
        optimizer.param_groups[0]["param_names"] = names
        turn((optimizer,), (named,), range(4))
        statistics = optimizer.layer_stats()
        assert list(statistics.names) == names
        assert statistics.constrained == tuple(name == "p0" for name in names)


@pytest.mark.parametrize("members", [*TURNS, (0,)])
@every_backend
@every_name
def test_replaced_state_is_freed(name, backend, members, device):
    """The next step frees it, whichever parameters that step includes."""
    named = parameters(SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], backend=backend)
    for step in range(6):
        turn((optimizer,), (named,), TURNS[step % 3])
    key = "momentum_buffer" if name == "sgd" else "exp_avg"
    before = weakref.ref(optimizer.state[named[3][1]][key])
    replace_state(optimizer, named)
    turn((optimizer,), (named,), members)
    assert before() is None


ALONE = [
    ("sgd", {"clip_global_norm": 0.5}), ("sgd", {"scaling": LARS(select=everything), "nonfinite": "skip"}),
    ("sgd", OWN["sgd"]), ("adamw", {"scaling": LAMB(select=everything)}), ("adamw", {"ema": 0.9}),
    ("adamw", {"master_weights": True}),
]  # fmt: skip


RATES = {"q0[0:2]": 0.5, "q0[2:6]": 2.0, "q4": 0.25}


def turned(tensor):
    """The same values, with the strides of a transposed tensor."""
    return tensor.T.contiguous().T


@pytest.mark.parametrize(
    ("name", "more", "backend", "odd"),
    [(*row, "torch", True) for row in ALONE]
    + [(*ALONE[i], "triton", True) for i in (1, 3, 4)]
    + [long(*ALONE[i], "triton", True) for i in (0, 2, 5)]
    # where all steps have the same strides
    + [long(*row, backend, False) for row in ALONE for backend in BACKENDS],
)
def test_same_bits_as_where_the_others_are_not_there(name, backend, more, odd, device):
    """Layers of two dtypes dropped at random: each step equals a step of an optimizer with only the remaining layers.

    Args:
        odd: whether some parameters, gradients and state have other strides.
    """
    torch.manual_seed(2)
    shapes = [(6, 5), (3, 2), (7,)]
    pairs = zip(parameters(shapes, torch.float32, device), parameters(shapes, torch.bfloat16, device), strict=True)
    named = [(f"q{i}", p) for i, (_, p) in enumerate(it for pair in pairs for it in pair)]
    expected = twin(named)
    if odd:
        for _, p in (named[1], expected[1]):
            p.data = turned(p.data)
    whole = OURS[name](named, **OPTIONS[name], backend=backend, layers=RATES, **more)
    state = {}
    for step in range(8):
        members = [i for i in range(len(named)) if torch.rand(()) < 0.7]
        gradients(named, expected)
        for _, p in (*named, *expected):
            if odd and step % 3 == 2 and p.dim() == 2:
                p.grad = turned(p.grad)
        for twins in (named, expected):
            for i, (_, p) in enumerate(twins):
                p.grad = p.grad if i in members else None
        whole.step()
        if odd and step == 3:
            entries = whole.state[named[0][1]]
            entries.update({key: turned(value) for key, value in entries.items() if value is not None and value.dim()})
        if members:
            rates = {layer: rate for layer, rate in RATES.items() if int(layer[1]) in members}
            mine = [expected[i] for i in members]
            alone = OURS[name](mine, **OPTIONS[name], backend=backend, layers=rates, **more)
            alone.state.update({p: state[p] for p in alone.param_groups[0]["params"] if p in state})
            alone.step()
            state.update(alone.state)
            if isinstance(more.get("scaling"), (LARS, LAMB)):
                assert whole.layer_stats().to_dict() == alone.layer_stats().to_dict()
        for (_, p), (_, q) in zip(named, expected, strict=True):
            same(p.detach(), q.detach())
            assert whole.state.get(p, {}).keys() == state.get(q, {}).keys()
            for key, value in state.get(q, {}).items():
                same(whole.state[p][key], value)


@every_case
def test_state_without_a_gradient_is_not_checked(name, backend, device):
    """As in torch.optim, state of parameters without a gradient is not checked."""
    both, twins = pair(name, backend, device)
    turn(both, twins, range(4))
    for named in twins:
        named[3][1].data = torch.ones(7, device=device)
    for members in [(0, 1, 2), (0, 1), (0, 1, 2)]:
        turn(both, twins, members)
        compare(lambda a, b: close(a, b, 5), *both, *twins)


@every_case
def test_a_refused_gradient_is_refused_again(name, backend, device):
    """Also if the gradient did not change, or belongs to another parameter; a valid gradient is accepted afterwards."""
    both, twins = pair(name, backend, device)
    for members in TURNS[:2]:
        turn(both, twins, members)
    ours, named = both[0], twins[0]
    # the same wrong gradient again, or on another parameter
    for wrong in (torch.ones(3, device=device), torch.ones(3, 2, dtype=torch.float64, device=device)):
        for place in (3, 2, 3):
            gradients(*twins)
            named[5 - place][1].grad = None
            named[place][1].grad.data = wrong
            for _ in range(3):
                before = snapshot(ours, named)
                with pytest.raises(RuntimeError, match=f"gradient of parameter 'p{place}'"):
                    ours.step()
                assert identical(before, snapshot(ours, named))
    for members in TURNS:
        turn(both, twins, members)
        compare(lambda a, b: close(a, b, 5), *both, *twins)


REFUSED = {
    "twice": (lambda p: [p, p], "'0:2' is given twice"),
    "expanded": (lambda p: [torch.nn.Parameter(p.detach()[:1].expand(3, 2))], "'0:1' share"),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("what", REFUSED)
@every_backend
def test_a_late_parameter_is_refused(backend, what, device):
    """Also if it has state, and a gradient that fits it."""
    make, message = REFUSED[what]
    a, b = (p for _, p in parameters([(3, 2), (3, 2)], torch.float32, device))
    late = make(b)
    optimizer = OURS["sgd"]([a, *late], lr=0.1, momentum=0.9, backend=backend)
    optimizer.state[late[0]]["momentum_buffer"] = torch.zeros(3, 2, device=device)
    named = [("a", a), ("b", late[0])]
    for members in [(a,), (a,), (a, late[0]), (a, late[0])]:
        for p in members:
            p.grad = torch.empty_strided(p.shape, p.stride(), device=device).fill_(0.5)
        before = snapshot(optimizer, named)
        if len(members) == 1:
            optimizer.step()
            continue
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert identical(before, snapshot(optimizer, named))
