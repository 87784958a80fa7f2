"""Options of a step other than its rule: loss scales, numbers on the device, master weights, given factors."""

import pytest
import torch
from cases import long
from tables import HYPER, RULES, SHAPES, TILE, equal, equal_column, make, twin, uniform
from tolerances import close, same

from fused_lwlr import ELR, LAMB, LARS
from fused_lwlr.kernels import FactorFormula, Factors, Row, Table, reference, triton

OPERATIONS = tuple(RULES)
BIG = [*SHAPES, (2 * TILE + 9,)]


def norm_itself(norm):
    return norm


def counting(operation, dtype, device, shapes=BIG, **extra):
    """A table with step counts and more columns, in which every row is scaled."""
    rows = [Row(i, scaled=True, multiplier=1 + i / 4) for i in range(len(shapes))]
    table = make(operation, shapes, dtype, device, rows)
    steps = [torch.full((), float(i % 3), device=device) for i in range(len(shapes))]
    return Table({**table.columns, "step": steps, **extra}, rows)


def both(operation, table, hyper=None, **options):
    """Triton on the table, the reference on a copy; the copy and both results."""
    expected = twin(table)
    hyper = hyper or HYPER[operation]
    return expected, *(
        b.step(RULES[operation], t, hyper, **options) for b, t in ((triton, table), (reference, expected))
    )


@pytest.mark.parametrize(
    ("operation", "dtype"), [*((operation, torch.bfloat16) for operation in OPERATIONS), long("adamw", torch.float16)]
)
def test_stochastic_rounding_is_the_same_on_both_backends(operation, dtype, device):
    table = counting(operation, dtype, device)
    before = twin(table)
    for seed in (0, 7):
        table = twin(before)
        expected, *_ = both(operation, table, rounding_seed=seed)
        # rounded up or down by the same noise: results differ only if a sum in another order differs in its last bit
        # and the noise lies between both sums
        for name in set(table.columns) - {"step"}:
            for got, want in zip(table.columns[name], expected.columns[name], strict=True):
                if got is not None and got.numel():
                    assert (got != want).float().mean() <= 0.002
                    assert ((got - want).abs() <= 2 * torch.finfo(dtype).eps * want.abs() + 1e-7).all()
        equal_column(table.columns["step"], expected.columns["step"], same)
    again = twin(before)
    triton.step(RULES[operation], again, HYPER[operation], rounding_seed=7)
    equal(again, table, same)


@pytest.mark.parametrize(
    ("operation", "scale"),
    [("sgd", ELR(0.1)), long("lr in momentum", LARS()), long("adamw", LAMB())],
)
def test_factors_that_are_known(operation, scale, device):
    """A step in two calls, norms and then the update by their factors, is the step in one."""
    table = counting(operation, torch.float32, device)
    one, before = twin(table), twin(table)
    scale = scale.factor_formula(RULES[operation])
    norm = FactorFormula(norm_itself, scale.target)
    measured = triton.step(RULES[operation], table, HYPER[operation], norm, write=False)
    expected = reference.step(RULES[operation], one, HYPER[operation], norm, write=False)
    equal(table, before, same)
    equal(one, before, same)
    filled = [i for i, shape in enumerate(BIG) if 0 not in shape]
    close(measured[filled].float(), expected[filled].float(), steps=4)
    known = reference.step(RULES[operation], twin(before), HYPER[operation], scale)[:, 4]
    other, result, twin_result = both(operation, table, factor=Factors(known, scale.target))
    assert result is twin_result is None
    equal(table, other)
    reference.step(RULES[operation], one, HYPER[operation], scale)
    equal(table, one)


@pytest.mark.parametrize(
    ("operation", "dtype", "scale"),
    [("sgd", torch.float32, None), long("adamw", torch.bfloat16, None), long("sgd", torch.float16, LARS())],
    ids=["sgd-float32", "adamw-bfloat16", "sgd-float16-LARS"],
)
def test_averages(operation, dtype, scale, device):
    """With several decays, over tiles that are full, partial and not aligned; missing averages stay missing."""
    shapes = [(), (1030,), (7,), (0,), (1030,)]
    averages = [uniform(shape, torch.float32, device) for shape in shapes]
    averages[1] = torch.cat((averages[1].new_zeros(1), averages[1]))[1:]
    averages[2] = None
    table = make(operation, shapes, dtype, device, [Row(i, scaled=True) for i in range(len(shapes))])
    table = Table({**table.columns, "ema": averages}, table.rows)
    before = [t if t is None else t.clone() for t in averages]
    hyper = [HYPER[operation][0]._replace(ema=decay) for decay in (0.999, 0.25, 0.0)]
    table.hyper_index = [0, 1, 2, 0, 2]
    triton.step(RULES[operation], table, hyper, FactorFormula(norm_itself, "gradient"), write=False)
    equal_column(averages, before, same)
    expected, *_ = both(operation, table, hyper, factor=scale and scale.factor_formula(RULES[operation]))
    equal(table, expected)
    for i, average, first, param in zip(table.hyper_index, averages, before, table.columns["param"], strict=True):
        if average is not None:
            decay = hyper[i].ema
            close(average, (decay * first.double() + (1 - decay) * param.double()).float())
