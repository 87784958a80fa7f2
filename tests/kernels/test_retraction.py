"""Steps of rows whose norms are controlled: each kernel against the reference, and a step in two calls."""

import numpy as np
import pytest
import torch
from cases import long
from tables import HYPER, RULES, SHAPES, TILE, equal, make, twin, uniform
from tolerances import STATISTICS, same

from fused_lwlr import Hyperball, RadialBrake
from fused_lwlr.kernels import (
    RETRACTION_STATISTICS,
    FactorFormula,
    Factors,
    Gate,
    Retraction,
    Row,
    Table,
    reference,
    triton,
)

# lr in the buffer is refused
every_rule = pytest.mark.parametrize("operation", [name for name in RULES if name != "lr in momentum"])
BIG = [*SHAPES, (2 * TILE + 9,)]
SPHERES = FactorFormula(Hyperball.formula, "direction", {}, Retraction())
BRAKE = FactorFormula(RadialBrake.formula, "direction", {}, Retraction(0.3, 0.6, fixed=False))


def norm_itself(norm):
    return norm


def spheres(operation, dtype, device, shapes=BIG, **extra):
    """A table of rows on spheres whose radii differ from the norms; one in three has no sphere, one is in slices."""
    rows = [Row(i, scaled=i % 3 != 1, multiplier=1 + i / 4) for i in range(len(shapes))]
    rows[4:5] = [Row(4, 0, 1, scaled=False), Row(4, 1, 2, 0.5, scaled=False), Row(4, 2, 3, scaled=False)]
    rows[-1:] = [
        Row(len(shapes) - 1, 0, 7, 0.5, scaled=True), Row(len(shapes) - 1, 7, TILE + 9, scaled=True),
        Row(len(shapes) - 1, TILE + 9, shapes[-1][0], 2.0, scaled=True),
    ]  # fmt: skip
    table = make(operation, shapes, dtype, device, rows)
    counts = np.bincount([row.param_index for row in rows])
    radii = [torch.rand(int(n), device=device) + 0.5 if i % 3 != 1 else None for i, n in enumerate(counts)]
    radii[3] = torch.zeros(1, device=device)
    return Table({**table.columns, **extra, "radius": radii}, rows)


def check_statistics(table, found, expected, columns=RETRACTION_STATISTICS):
    """For rows with elements; differences of sums must be within the tolerance of their terms."""
    rows = [i for i, (_, (p,)) in enumerate(table.views("param")) if p.numel()]
    weight, direction = (
        expected[rows, RETRACTION_STATISTICS.index(name)] for name in ("weight_sq_sum", "direction_sq_sum")
    )
    size = {"direction_dot": (weight * direction).sqrt(), "update_sq_sum": weight}
    for name in columns:
        mine, other = (values[rows, RETRACTION_STATISTICS.index(name)] for values in (found, expected))
        assert ((mine - other).abs() <= STATISTICS * (other.abs() + size.get(name, 0 * weight))).all(), name


# an average follows the weight, so a half-precision average also changes where the weight rounds a tie differently;
# each row compiles a kernel: dtypes, averages and master weights are the same to all rules and scales
@pytest.mark.parametrize(
    ("operation", "scale", "dtype", "average", "exact"),
    [
        *((operation, SPHERES, torch.float32, False, False) for operation in ("sgd", "adamw", "lion")),
        ("sgd", BRAKE, torch.float32, False, False), long("adamw", BRAKE, torch.bfloat16, False, False),
        long("lion", BRAKE, torch.bfloat16, True, False), ("adamw", SPHERES, torch.bfloat16, True, True),
        long("sgd", BRAKE, torch.float16, False, True),
    ],
    ids=lambda value: {id(SPHERES): "spheres", id(BRAKE): "brake"}.get(id(value)),
)  # fmt: skip
def test_twins(operation, scale, dtype, average, exact, device):
    extra = {"ema": [uniform(shape, torch.float32, device) for shape in BIG]} if average else {}
    table = spheres(operation, dtype, device, **extra)
    if exact:
        exact = [p.float() + uniform(p.shape, torch.float32, device) * 1e-4 for p in table.columns["param"]]
        table = Table({**table.columns, "master_weight": exact}, table.rows)
        for p, weight in zip(table.columns["param"], exact, strict=True):
            p.copy_(weight)
    expected = twin(table)
    found = triton.step(RULES[operation], table, HYPER[operation], scale)
    other = reference.step(RULES[operation], expected, HYPER[operation], scale)
    equal(table, expected)
    assert found.shape == other.shape == (len(table.rows), len(RETRACTION_STATISTICS))
    check_statistics(table, found, other)


@every_rule
def test_rows_end_on_their_spheres(operation, device):
    table = spheres(operation, torch.float32, device)
    triton.step(RULES[operation], table, HYPER[operation], SPHERES)
    radii = table.radii().tolist()
    assert sum(radius > 0 for radius in radii) > 5
    for radius, (_, (param,)) in zip(radii, table.views("param"), strict=True):
        if radius and param.numel():
            assert param.double().norm().item() == pytest.approx(radius, rel=1e-5)


@pytest.mark.parametrize(
    ("operation", "dtype", "scale"),
    [("sgd", torch.float32, SPHERES), long("adamw", torch.bfloat16, BRAKE), long("lion", torch.float32, BRAKE)],
    ids=["sgd-spheres", "adamw-brake", "lion-brake"],
)
def test_factors_that_are_known(operation, scale, dtype, device):
    """A step in two calls, norms and then the update by their factors and ρ, is the step in one."""
    table = spheres(operation, dtype, device)
    one, before = twin(table), twin(table)
    norms = FactorFormula(norm_itself, "direction", {}, scale.retraction)
    measured = triton.step(RULES[operation], table, HYPER[operation], norms, write=False)
    equal(table, before, same)
    found = reference.step(RULES[operation], one, HYPER[operation], scale)
    check_statistics(table, measured, found, ("weight_sq_sum", "direction_sq_sum", "direction_dot"))
    values = reference.step(RULES[operation], twin(before), HYPER[operation], scale)
    factor, weight, direction, dot = (values[:, i] for i in (4, 3, 5, 6))
    lr = torch.tensor([HYPER[operation][0].lr * row.multiplier for row in table.rows], device=device)
    length = (weight - 2 * lr * factor * dot + (lr * factor) ** 2 * direction).sqrt()
    kept = table.radii().double()
    if scale is BRAKE:
        norm, outward, inward = weight.sqrt(), *BRAKE.retraction[:2]
        scaled = torch.tensor([row.scaled for row in table.rows], device=device)
        kept = scaled * (norm + torch.where(length > norm, outward, inward) * (length - norm))
    rho = torch.where((kept > 0) & (length > 0), kept / length, 1.0).double()
    known = Factors(factor.clone(), "direction", rho)
    assert triton.step(RULES[operation], table, HYPER[operation], known) is None
    equal(table, one)
    again = twin(before)
    reference.step(RULES[operation], again, HYPER[operation], known)
    equal(again, one)


@pytest.mark.parametrize("operation", ["sgd", long("adamw"), long("lion")])
def test_a_skipped_step_writes_nothing(operation, device):
    table = spheres(operation, torch.float32, device)
    before = twin(table)
    gate = Gate(found_inf=torch.ones((), device=device))
    for backend in (triton, reference):
        backend.step(RULES[operation], table, HYPER[operation], SPHERES, gate)
        equal(table, before, same)


def test_scales_that_differ_in_their_retraction_alone(device):
    """They share a device table, and a kernel with other numbers, but no workspace without a retraction."""
    table = spheres("sgd", torch.float32, device)
    without = BRAKE._replace(retraction=None)
    other = BRAKE._replace(retraction=Retraction(0.9, 0.1, fixed=False))
    for scale in (without, BRAKE, other, SPHERES, without):
        expected = twin(table)
        triton.step(RULES["sgd"], table, HYPER["sgd"], scale)
        reference.step(RULES["sgd"], expected, HYPER["sgd"], scale)
        equal(table, expected)
    (device_table,) = table.device_tables.values()
    assert len(device_table.kernels) == 3
