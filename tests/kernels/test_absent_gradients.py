"""A table with missing gradients steps like a table of only the parameters with a gradient."""

import pytest
import torch
from lazy import negated
from steps import launches
from tables import HYPER, SGD, equal, equal_column, make, totals, twin, uniform
from tolerances import close, same

from fused_lwlr import LARS
from fused_lwlr.kernels import ADAMW, FactorFormula, Gate, Row, Table, reference, triton

SHAPES = [(6, 5), (1030,), (3, 4), (0,), (7,), (2, 1)]
ROWS = [
    Row(0, 0, 2, 0.5, True), Row(0, 2, 6, 2.0), Row(1, scaled=True), Row(2, 1, 3, 0.25), Row(3), Row(4, scaled=True),
    Row(5, 1, 2),
]  # fmt: skip
CHOSEN = [(0,), (1, 4), (0, 2, 5), (2, 3, 4), (0, 1, 2, 3, 4, 5)]
every_backend = pytest.mark.parametrize("backend", [triton, reference], ids=["triton", "torch"])


def turned(tensor):
    return tensor.T.contiguous().T if tensor.dim() == 2 else tensor


# changes of the tensors of one column that keep them from being read in storage order
LAID_OUT = {
    "plain": lambda column: column,
    "strides": lambda column: [*map(turned, column)],
    "gaps": lambda column: [torch.stack((t, t), -1)[..., 0] for t in column],
    "absent": lambda column: [None if i % 2 else t for i, t in enumerate(column)],
}

BY_LARS = LARS(select="*").factor_formula(SGD)
LAYOUTS = [*(("param", it) for it in ("plain", "strides", "gaps")), *(("momentum_buffer", it) for it in LAID_OUT)]


def whole(rows=ROWS, **laid_out):
    """A table without gradients over all parameters, and its columns."""
    made = make("sgd", SHAPES, torch.float32, torch.device("cpu"), rows)
    columns = {name: LAID_OUT[laid_out.get(name, "plain")](column) for name, column in made.columns.items()}
    return Table({**columns, "grad": [None] * len(SHAPES)}, rows), columns


def alike(column):
    """Gradients that go with these parameters."""
    return [torch.empty_like(p).copy_(uniform(p.shape, p.dtype, p.device)) for p in column]


def some(grads, chosen):
    """The gradients of some parameters, None for the others."""
    return [grad if i in chosen else None for i, grad in enumerate(grads)]


def made_of(columns, chosen, rows, grads):
    """The table of some of the parameters, from copies, and their gradients."""
    copies = {
        name: [None if column[i] is None else column[i].clone() for i in chosen] for name, column in columns.items()
    }
    rows = [row._replace(param_index=chosen.index(row.param_index)) for row in rows if row.param_index in chosen]
    return Table({**copies, "grad": [grads[i].clone() for i in chosen]}, rows)


def compare(table, chosen, other, check=same):
    """The columns of some parameters."""
    for name, column in other.columns.items():
        equal_column([table.columns[name][i] for i in chosen], column, check)


@every_backend
@pytest.mark.parametrize(("rows", "scale"), [(ROWS, BY_LARS), (None, None)], ids=["slices-LARS", "whole-plain"])
@pytest.mark.parametrize(("column", "layout"), LAYOUTS)
def test_the_same_steps(column, layout, rows, scale, backend):
    """One after the other, of some of the parameters of one table; the others stay, and so do their versions."""
    table, columns = whole(rows or [Row(i, scaled=True) for i in range(len(SHAPES))], **{column: layout})
    for chosen in CHOSEN:
        absent = [i for i in range(len(SHAPES)) if i not in chosen]
        for _ in range(2):
            grads = alike(table.columns["param"])
            other = made_of(columns, chosen, table.rows, grads)
            before = [(table.columns["param"][i].clone(), table.columns["param"][i]._version) for i in absent]
            assert table.accept_gradients(some(grads, chosen))
            found, expected = (backend.step(SGD, each, HYPER["sgd"], scale) for each in (table, other))
            compare(table, chosen, other)
            for i, (value, version) in zip(absent, before, strict=True):
                same(table.columns["param"][i], value)
                assert table.columns["param"][i]._version == version
            if scale is not None:
                same(found[torch.from_numpy(table.stepped)], expected)


@every_backend
def test_statistics_of_rows_without_a_gradient_are_zero(backend):
    """Values that earlier launches found for the other rows do not count."""
    table, columns = whole([Row(i, scaled=i % 2 == 0) for i in range(len(SHAPES))])
    for chosen in CHOSEN:
        grads = alike(table.columns["param"])
        other = made_of(columns, chosen, table.rows, grads)
        assert table.accept_gradients(some(grads, chosen))
        found, expected = backend.statistics(table), backend.statistics(other)
        same(found[torch.from_numpy(table.stepped)], expected)
        assert not found[torch.from_numpy(~table.stepped)].any()
        backend.step(SGD, table, HYPER["sgd"])


@every_backend
def test_rescaled_rows_without_a_gradient(backend):
    """The parameter is divided, with its momentum, and neither counted nor averaged."""
    made = make("sgd", SHAPES, torch.float32, torch.device("cpu"))
    count = len(SHAPES)
    extra = {"step": [torch.tensor(float(i)) for i in range(count)], "ema": [p.clone() for p in made.columns["param"]]}
    columns = {**made.columns, **extra, "grad": some(made.columns["grad"], (0, 2))}
    table = Table(columns, [Row(i, exponent=i % 3, counts_for_max_norm=i % 3 == 1) for i in range(count)])
    other = twin(table)
    for each in (table, other):
        each.hyper_index = [0, 1, 0, 1, 1, 1]
    norm = max(p.double().norm() for p in (table.columns["param"][i] for i in (1, 4)))
    before = {name: [t.clone() for t in table.columns[name]] for name in ("param", "momentum_buffer", *extra)}
    hyper = [*HYPER["sgd"], SGD.rescale_only]
    for of, each in ((backend, table), (reference, other)):
        of.step(SGD, each, hyper, gate=Gate(totals(of, each, grad=False)))
    equal(table, other)
    for i in (1, 3, 4, 5):
        for name in ("param", "momentum_buffer"):
            close(table.columns[name][i], (before[name][i].double() / norm ** (i % 3)).float())
        for name in extra:
            same(table.columns[name][i], before[name][i])
    assert [table.columns["step"][i].item() for i in (0, 2)] == [1, 3]


def quotient(norm, weight_norm):
    return weight_norm / norm


@every_backend
def test_a_rescaled_row_without_a_gradient_has_no_factor(backend):
    made = make("sgd", [(6, 8), (6, 8)], torch.float32, torch.device("cpu"))
    columns = {**made.columns, "grad": some(made.columns["grad"], (0,))}
    table = Table(columns, [Row(0, scaled=True), Row(1, scaled=True, exponent=1, counts_for_max_norm=True)])
    table.hyper_index = [0, 1]
    before = columns["param"][1].double()
    gate = Gate(totals(backend, table, grad=False))
    backend.step(SGD, table, [HYPER["sgd"][0], SGD.rescale_only], FactorFormula(quotient, "gradient"), gate)
    close(columns["param"][1], (before / before.norm()).float())


@every_backend
def test_a_rescaled_row_has_its_first_state_divided(backend):
    """The first state is the momentum; the others, such as second moments, have another scale."""
    made = make("adamw", [(6, 8)], torch.float32, torch.device("cpu"))
    table, plain = (Table(twin(made).columns, [Row(0, exponent=p, counts_for_max_norm=bool(p))]) for p in (1, 0))
    norm = table.columns["param"][0].double().norm().float()
    backend.step(ADAMW, table, HYPER["adamw"][:1], gate=Gate(totals(backend, table)))
    backend.step(ADAMW, plain, HYPER["adamw"][:1])
    close(table.columns["param"][0], plain.columns["param"][0] / norm)
    close(table.columns["exp_avg"][0], plain.columns["exp_avg"][0] / norm)
    same(table.columns["exp_avg_sq"][0], plain.columns["exp_avg_sq"][0])


def test_a_rescaled_row_in_parts_of_other_memory_without_a_gradient():
    """Scratch tensors take the places of the parameter and its momentum, and of no gradient."""
    made = make("sgd", [(6, 8), (6, 8)], torch.float32, torch.device("cpu"))
    columns = {name: [tensor[:, ::2] for tensor in column] for name, column in made.columns.items()}
    table = Table(columns, [Row(i, exponent=1, counts_for_max_norm=True) for i in range(2)])
    other = twin(table)
    first, second = columns["grad"]
    # the step with NaN is skipped, but the scratch tensor of the gradient has it
    bad = torch.full((6, 8), torch.nan)[:, ::2]
    for grads in ([first, second], [first, bad], [first, None], [first, second]):
        for of, each in ((triton, table), (reference, other)):
            assert each.accept_gradients(grads)
            each.hyper_index = [int(grad is None) for grad in grads]
            gate = Gate(totals(of, each), skip=True)
            of.step(SGD, each, [HYPER["sgd"][0], SGD.rescale_only], gate=gate)
        equal(table, other)
        assert table.columns["param"][1].isfinite().all()


def test_the_first_gradient_comes_late():
    """A launch that only rescales does not mark the table as without gradients."""
    made = make("sgd", SHAPES[:2], torch.bfloat16, torch.device("cpu"))
    columns = {**made.columns, "grad": [None, None]}
    rows = [Row(i, exponent=1, counts_for_max_norm=True) for i in range(2)]
    table = Table(columns, rows)
    other = twin(table)
    table.grad_dtype = other.grad_dtype = torch.float32
    for grads in ([None, None], [p.float() for p in made.columns["grad"]]):
        for of, each in ((triton, table), (reference, other)):
            assert each.accept_gradients(grads)
            each.hyper_index = [int(grad is None) for grad in grads]
            of.step(SGD, each, [*HYPER["sgd"], SGD.rescale_only], gate=Gate(totals(of, each, grad=False)))
        equal(table, other)


def test_only_rows_with_a_gradient_have_work():
    """Nine of ten experts have no gradient: no more launches, and no work items for them."""
    shapes = [(50, 50)] * 40
    table = make("sgd", shapes, torch.float32, torch.device("cpu"), [Row(i, scaled=True) for i in range(40)])
    items = []
    for chosen in ((3, 17, 18, 39), range(40)):
        assert table.accept_gradients(some(alike(table.columns["param"]), chosen))
        for scale in (None, LARS(select="*").factor_formula(SGD)):
            with launches(1):
                triton.step(SGD, table, HYPER["sgd"], scale)
        for device_table in table.device_tables.values():
            [listed] = (kernel.items for kernel in device_table.kernels.values())
            assert {*listed[:, 0].tolist()} == {*chosen}
            items.append(len(listed))
    assert [10 * count for count in items[:2]] == items[2:]


@every_backend
def test_gradients_with_changing_strides(backend):
    """Gradients with the strides of their parameters, then others, and then the first kind again."""
    table, columns = whole()
    chosen = [0, 2, 4]
    for change in (None, turned, None, negated, lambda g: g[..., :1].expand(g.shape), turned, None):
        grads = alike(table.columns["param"])
        grads = grads if change is None else [*map(change, grads)]
        other = made_of(columns, chosen, ROWS, grads)
        grads = some(grads, chosen)
        assert table.accept_gradients(grads)
        for each in (table, other):
            backend.step(SGD, each, HYPER["sgd"])
        compare(table, chosen, other)
