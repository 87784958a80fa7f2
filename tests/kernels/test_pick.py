"""A table that is picked from another one is as one that is made of the same parameters."""

from array import array

import numpy as np
import pytest
import torch
from lazy import negated
from tables import HYPER, SGD, equal, make, uniform
from tolerances import same

from fused_lwlr import LARS
from fused_lwlr.kernels import Row, Table, reference, triton

SHAPES = [(6, 5), (1030,), (3, 4), (0,), (7,), (2, 1)]
ROWS = [
    Row(0, 0, 2, 0.5, True), Row(0, 2, 6, 2.0), Row(1, scaled=True), Row(2, 1, 3, 0.25), Row(3), Row(4, scaled=True),
    Row(5, 1, 2),
]  # fmt: skip
CHOSEN = [(0,), (1, 4), (0, 2, 5), (2, 3, 4), (0, 1, 2, 3, 4, 5)]
every_backend = pytest.mark.parametrize("backend", [triton, reference], ids=["triton", "torch"])


def turned(tensor):
    return tensor.T.contiguous().T if tensor.dim() == 2 else tensor


# what is done with the tensors of one column, so that they are not walked as they are
LAID_OUT = {
    "plain": lambda column: column,
    "strides": lambda column: [*map(turned, column)],
    "gaps": lambda column: [torch.stack((t, t), -1)[..., 0] for t in column],
    "absent": lambda column: [None if i % 2 else t for i, t in enumerate(column)],
}

LAYOUTS = [*(("param", it) for it in ("plain", "strides", "gaps")), *(("momentum_buffer", it) for it in LAID_OUT)]


def whole(rows=ROWS, **laid_out):
    """A table without gradients over all parameters, and the columns that it is of."""
    made = make("sgd", SHAPES, torch.float32, torch.device("cpu"), rows)
    columns = {name: LAID_OUT[laid_out.get(name, "plain")](column) for name, column in made.columns.items()}
    return Table({**columns, "grad": [None] * len(SHAPES)}, rows), columns


def alike(column):
    """Gradients that go with these parameters."""
    return [torch.empty_like(p).copy_(uniform(p.shape, p.dtype, p.device)) for p in column]


def addresses(tensors):
    return array("q", [t.data_ptr() for t in tensors]).tobytes()


def made_of(columns, chosen, rows, grads):
    """The table of some of the parameters, from copies, and those gradients."""
    copies = {
        name: [None if column[i] is None else column[i].clone() for i in chosen] for name, column in columns.items()
    }
    rows = [row._replace(tensor=chosen.index(row.tensor)) for row in rows if row.tensor in chosen]
    return Table({**copies, "grad": [grad.clone() for grad in grads]}, rows)


def mask(chosen):
    return np.isin(np.arange(len(SHAPES)), chosen)


@every_backend
@pytest.mark.parametrize("scale", [None, LARS(select="*").scale(SGD)], ids=["plain", "LARS"])
@pytest.mark.parametrize("rows", [ROWS, None], ids=["slices", "whole"])
@pytest.mark.parametrize(("column", "layout"), LAYOUTS)
def test_the_same_steps(column, layout, rows, scale, backend):
    """One after the other, of some of the parameters of one table."""
    table, columns = whole(rows or [Row(i, scaled=True) for i in range(len(SHAPES))], **{column: layout})
    for chosen in CHOSEN:
        picked = table.pick(mask(chosen))
        for _ in range(2):
            grads = alike(picked.columns["param"])
            other = made_of(columns, chosen, table.rows, grads)
            assert picked.rows == other.rows
            assert picked.replace(grads, addresses(grads))
            for each in (picked, other):
                backend.step(SGD, each, HYPER["sgd"], scale)
            equal(picked, other, same)


@every_backend
def test_picked_twice(backend):
    """From a table that was picked itself."""
    table, columns = whole()
    picked = table.pick(mask([0, 1, 4, 5])).pick(np.array([True, False, True, True]))
    grads = alike(picked.columns["param"])
    other = made_of(columns, [0, 4, 5], ROWS, grads)
    assert picked.replace(grads, addresses(grads))
    for each in (picked, other):
        backend.step(SGD, each, HYPER["sgd"])
    assert picked.rows == other.rows
    equal(picked, other, same)


@every_backend
def test_other_gradients_follow(backend):
    """After those that go with their parameters, others that do not, and then again such that do."""
    table, columns = whole()
    chosen = [0, 2, 4]
    picked = table.pick(mask(chosen))
    for change in (None, turned, None, negated, lambda g: g[..., :1].expand(g.shape), turned, None):
        grads = alike(picked.columns["param"])
        grads = grads if change is None else [*map(change, grads)]
        other = made_of(columns, chosen, ROWS, grads)
        assert picked.replace(grads, addresses(grads) if change is None else None)
        for each in (picked, other):
            backend.step(SGD, each, HYPER["sgd"])
        equal(picked, other, same)
    assert picked.replace(grads, addresses(grads))


@pytest.mark.parametrize(
    "change", [lambda g: g.double(), lambda g: g[:1], lambda g: g.to_sparse(), lambda g: g.to("meta")]
)
def test_gradients_that_do_not_fit(change):
    table, _ = whole()
    picked = table.pick(mask([0, 2]))
    grads = alike(picked.columns["param"])
    for _ in range(2):
        assert not picked.replace([grads[0], change(grads[1])])
        assert picked.replace(grads, addresses(grads))
        assert all(map(torch.equal, picked.columns["grad"], grads))


def test_gradients_of_another_dtype_than_those_before():
    """They are not taken for what was there, also where they go with their parameters."""
    param, grad = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
    table = Table({"param": [param], "grad": [grad]})
    found = grad.bfloat16()
    for _ in range(2):
        assert not table.replace([found], addresses([found]))
        assert table.replace([grad.clone()])
