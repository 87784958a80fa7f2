"""Each Triton operation against its PyTorch twin."""

import inspect
from itertools import product

import pytest
import torch
from cases import long
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import (
    ADAMW,
    ADAMW_RULE,
    COLUMNS,
    HYPER,
    RULES,
    SHAPES,
    adamw_hyper,
    after,
    agree,
    having,
    make,
    sgd_hyper,
    uniform,
)  # fmt: skip

from fused_lwlr import LAMB
from fused_lwlr.kernels import Row, Table, reference, triton

# with the flags that users have: this is the main test of the values of kernels
pytestmark = pytest.mark.usefixtures("optimize")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = tuple(RULES)
# the other tests read and write float16 as well
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, long(torch.float16)])
SGD_OPTIONS = [
    (sgd_hyper(0.1, momentum, dampening, weight_decay, nesterov, maximize), taken)
    for momentum, dampening, nesterov in ((0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True))
    for weight_decay, maximize, taken in product((0.0, 0.1), (False, True), (0, 1))
]
ADAMW_OPTIONS = [
    (adamw_hyper(betas=betas, weight_decay=weight_decay, maximize=maximize), taken)
    for betas, weight_decay, maximize, taken in product(
        ((0.9, 0.999), (0.0, 0.0), (0.3, 0.4), (0.5, 0.9)), (0.0, 0.1), (False, True), (0, 999)
    )
]


@pytest.mark.parametrize(
    ("one", "other"), [(reference.step, triton.prepare), (reference.statistics, triton.statistics)]
)
def test_same_parameters(one, other):
    assert inspect.signature(one).parameters == inspect.signature(other).parameters


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", STEPS)
def test_shapes(operation, shape, dtype, device):
    agree(operation, make(operation, [shape], dtype, device), HYPER[operation])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", STEPS)
def test_all_shapes_in_one_table(operation, dtype, device):
    rows = [Row(i, multiplier=0.25 * i) for i in range(len(SHAPES))]
    agree(operation, make(operation, SHAPES, dtype, device, rows), HYPER[operation])


@every_dtype
@pytest.mark.parametrize(("hyper", "taken"), SGD_OPTIONS)
def test_sgd_options(hyper, taken, dtype, device):
    table = make(
        "sgd",
        [(5,), (1030,)],
        dtype,
        device,
        absent=lambda name, _: name == "momentum_buffer" and not hyper.hyperparameters[0],
    )
    agree("sgd", after(table, taken), [hyper])


@every_dtype
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("hyper", "taken"), ADAMW_OPTIONS)
def test_adamw_options(hyper, taken, amsgrad, dtype, device):
    table = make(
        "adamw", [(5,), (1030,)], dtype, device, absent=lambda name, _: name == "max_exp_avg_sq" and not amsgrad
    )
    agree("adamw", after(table, taken), [hyper])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["sgd", "adamw"])
def test_state_of_some_tensors_only(operation, dtype, device):
    last = COLUMNS[operation][-1]
    table = make(operation, [(9,), (1024,), (3, 700)], dtype, device, absent=lambda name, i: name == last and i == 1)
    agree(operation, table, HYPER[operation])


@pytest.mark.parametrize(("operation", "options"), [("sgd", SGD_OPTIONS[4:]), ("adamw", ADAMW_OPTIONS)])
def test_every_tensor_its_own_hyper_row(operation, options, device):
    table = make(operation, [(5,)] * len(options), torch.float32, device)
    table.hyper_index = list(reversed(range(len(options))))
    after(table, *(taken for _, taken in reversed(options)))
    agree(operation, table, [hyper for hyper, _ in options])


@pytest.mark.parametrize(
    ("operation", "scale"),
    [
        *((operation, None) for operation in STEPS), ("adamw", LAMB()),
        *(long(operation, LAMB()) for operation in STEPS if operation != "adamw"),
    ],
)  # fmt: skip
def test_every_tensor_its_own_number_of_steps(operation, scale, device):
    rows = [Row(0, scaled=True), Row(1, 0, 3, scaled=True), Row(1, 3, 5, scaled=True), Row(2), Row(3)]
    table = after(make(operation, [(5,), (5, 7), (40,), (6,)], torch.float32, device, rows), 3, 0, 17, 3)
    agree(operation, table, HYPER[operation], factor=scale and scale.factor_formula(RULES[operation]))
    # each row must equal a table of this row alone
    for i in range(4):
        columns = {name: column[i : i + 1] for name, column in table.columns.items()}
        alone = after(Table(columns), *table.steps[i : i + 1])
        agree(operation, alone, HYPER[operation])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", STEPS)
def test_slices(operation, dtype, device):
    # the last tensor has a row for its middle only
    rows = [Row(0, 0, 2, 0.5), Row(0, 2, 6, 2.0), Row(1), Row(2, 1, 3, 0.0), Row(2, 3, 4, 1.5)]
    agree(operation, make(operation, [(6, 301), (5,), (5, 7)], dtype, device, rows), HYPER[operation])


@pytest.mark.parametrize("half", [torch.bfloat16, long(torch.float16)])
def test_every_column_its_own_dtype(half, device):
    columns = {
        name: [uniform((1030,), dtype, device).square()]
        for name, dtype in (
            ("param", half), ("grad", torch.float32), ("exp_avg", half), ("exp_avg_sq", torch.float32),
            ("max_exp_avg_sq", half),
        )
    }  # fmt: skip
    agree("adamw", Table(columns), [ADAMW])


def test_one_table_serves_several_operations(device):
    shapes = [(5,), (1030,)]
    table = make("adamw", shapes, torch.float32, device)
    table = Table({**table.columns, "momentum_buffer": [uniform(shape, torch.float32, device) for shape in shapes]})
    for operation in ("adamw", "sgd", "adamw"):
        agree(operation, table, HYPER[operation])
    assert triton.statistics(table).shape == (2, 6)
    agree("sgd", table, HYPER["sgd"])


@pytest.mark.parametrize("backend", [reference, triton])
def test_betas_of_zero_forget_exactly(backend, device):
    table = make("adamw", [(1030,)], torch.float32, device)
    # so small that m + (g − m) would round
    table.columns["grad"][0].div_(3000)
    backend.step(ADAMW_RULE, table, [adamw_hyper(betas=(0.0, 0.0))])
    (grad,), (exp_avg,), (exp_avg_sq,) = (table.columns[name] for name in ("grad", "exp_avg", "exp_avg_sq"))
    assert torch.equal(exp_avg, grad)
    assert torch.equal(exp_avg_sq, grad.square())


@pytest.mark.parametrize("operation", STEPS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_shapes_offsets_and_slices(operation, data):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = data.draw(st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=6))
    offsets = data.draw(st.lists(st.integers(0, 5), min_size=5, max_size=5))
    table = make(operation, shapes, data.draw(st.sampled_from(DTYPES)), device)
    shifts = dict(zip(COLUMNS[operation], offsets, strict=False))
    table = having(table, **{n: [_shifted(t, by) for t in table.columns[n]] for n, by in shifts.items()})
    cuts = [data.draw(st.integers(1, shape[0] - 1)) if shape and shape[0] > 1 else None for shape in shapes]
    rows = [
        row
        for i, cut in enumerate(cuts)
        for row in ([Row(i)] if cut is None else [Row(i, 0, cut, 0.5), Row(i, cut, shapes[i][0], 2.0)])
    ]
    agree(operation, after(Table(table.columns, rows), *table.steps), HYPER[operation])


def _shifted(tensor, offset):
    """The same numbers, `offset` elements into a buffer."""
    buffer = tensor.new_full((tensor.numel() + offset,), float("nan"))
    buffer[offset:] = tensor.flatten()
    return buffer[offset:].view(tensor.shape)
