"""A step of any rule in plain PyTorch. It defines every option, and runs on every device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from fused_lwlr.kernels.reference.move import Factor, apply_update, decayed_direction, times
from fused_lwlr.kernels.reference.rounding import key_of, position_of, rounded
from fused_lwlr.kernels.rules.base import Hyper, Rule, States
from fused_lwlr.kernels.step_arguments import (
    DIRECTION_SQ_SUM,
    FACTOR,
    RETRACTION_STATISTICS,
    STEP_STATISTICS,
    STEPS_OF_SHRINK,
    UPDATE_SQ_SUM,
    FactorFormula,
    Factors,
    FactorTarget,
    Gate,
)
from fused_lwlr.kernels.table import Row, Table
from fused_lwlr.kernels.tensors import HALF, sum_dtype, to_float32


class StepContext(NamedTuple):
    """The arguments of a step that all rows share."""

    rule: Rule
    factor: FactorFormula | Factors | None
    gate: Gate
    write: bool
    rounding_seed: int | None

    def working_copy(self, tensor: Tensor) -> Tensor:
        """Returns a tensor for the computation: in float32 for half precision, a copy if the step may be skipped."""
        result = to_float32(tensor)
        return result if (self.write and self.gate.skipped is None) or result is not tensor else result.clone()


@torch.no_grad()
def step(
    rule: Rule,
    table: Table,
    hyper: Sequence[Any],
    factor: FactorFormula | Factors | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Tensor | None:
    """Takes one step of a rule on every row of the table that has a gradient, in place, each with its multiplier η.

    `Hyper` has the formula, with clip and grad_scale from the gate, s from the factor (at its target, 1 elsewhere), and
    Ŵᵖ as each row says. After it, an average of the weights moves: e ← e + (1 − ema) · (w − e), with the stored w,
    or the master weight if it exists. The multiplier acts on weight decay too, like a separate param group with
    rate lr · η. Half precision is computed in float32 and rounded once when stored.

    Args:
        rule: the update rule.
        table: its state columns are the rule's. A master weight in "master_weight" is used where it rounds to the
            parameter.
        hyper: the rows that `table.hyper_index` points into.
        factor: one factor for each row.
        gate: loss scaling, clipping, skipping and Ŵ.
        write: False changes nothing, and only returns statistics.
        rounding_seed: rounds half precision up or down at random, by the seed, `Row.layer_index`, the step count and
            the position, so that expectations are exact.

    Returns:
        With a `FactorFormula`, float64 of shape [rows, 5] in the order of `STEP_STATISTICS`, or [rows, 8] in the order
        of `RETRACTION_STATISTICS`, valid until the next step. Rows without a gradient have arbitrary values.
    """
    context = StepContext(rule, factor, gate or Gate(), write, rounding_seed)
    formula = factor if isinstance(factor, FactorFormula) else None
    retraction = None if formula is None else formula.retraction
    statistics = radii = None
    if formula is not None:
        device, shape = table.columns["param"][0].device, (len(table.rows), len(RETRACTION_STATISTICS))
        statistics = torch.zeros(shape, dtype=sum_dtype(device), device=device)
        radii = table.radii().to(statistics.dtype) if retraction is not None and retraction.fixed else None
    columns = table.views("param", "grad", "step", "master_weight", "ema", *rule.states)
    for i, (row, (param, grad, steps, master_weight, ema, *states)) in enumerate(columns):
        if grad is None:
            if not row.exponent:
                continue
            # a row that is only rescaled is not counted, has no factor, and its average stays
            steps, ema, row = None, None, row._replace(scaled=False)
        h = hyper[table.hyper_index[i]]
        count = table.steps.item(row.param_index) if steps is None else steps
        tensors = param, grad, master_weight, *states
        w, new_states = new_values(context, row, i, h, count, tensors, statistics, radii)
        if write:
            if master_weight is not None:
                _store(master_weight, w, context.gate.skipped)
            _store_rounded(context, row.layer_index, steps, (param, *states), (w, *new_states))
            if ema is not None:
                weight = param if master_weight is None else master_weight
                _store(ema, context.working_copy(ema).lerp_(to_float32(weight), 1 - h.ema), context.gate.skipped)
    for steps, grad in zip(table.column("step"), table.column("grad"), strict=True):
        # all rows of a tensor need the count before this step
        if write and steps is not None and grad is not None:
            _store(steps, steps + 1, context.gate.skipped)
    if statistics is None or retraction is not None:
        return statistics
    return statistics[:, : len(STEP_STATISTICS)]


def prepare(*args: Any, **options: Any) -> Callable[[], Tensor | None]:
    """Returns `step` with these arguments. Nothing is prepared before it is called."""
    return partial(step, *args, **options)


def new_values(
    context: StepContext, row: Row, i: int, h: Hyper, count: Any, tensors: Sequence[Any], statistics: Any, radii: Any
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the new weight and the new states of a row, before they are rounded.

    Args:
        i: the number of the row.
        count: the number of steps taken.
        tensors: parameter, gradient, master weight, and states; None for a missing one.
        statistics: receives the statistics of the row, [rows, 8]; None without a `FactorFormula`.
        radii: R of each row for a `Retraction` that is fixed, or None.
    """
    rule, factor, gate = context.rule, context.factor, context.gate
    param, grad, master_weight, *stored = tensors
    lr, weight_decay = float(h.lr) * row.multiplier, float(h.applied_decay)
    w = context.working_copy(param)
    if master_weight is not None:
        # the master weight of the elements that it still rounds to
        w = torch.where(master_weight.to(param.dtype) == param, master_weight, w)
    states = [None if state is None else context.working_copy(state) for state in stored]
    g = times(torch.zeros_like(w) if grad is None else to_float32(grad), gate.unscale)
    s: dict[str, Factor] = dict.fromkeys(get_args(FactorTarget), 1.0)
    rho: Factor = 1.0
    if isinstance(factor, Factors):
        s[factor.target] = factor.values[i]
        rho = 1.0 if factor.rho is None else factor.rho[i]
    formula = factor if isinstance(factor, FactorFormula) else None
    if formula is not None:
        sums = statistics[i]
        radius = None if radii is None else radii[i]
        weight = w if formula.target == "direction" else to_float32(param)
        sums[:FACTOR] = _sums(sums.dtype, g.abs(), g.square(), ~g.isfinite(), weight.square())
        if formula.target != "direction":
            s[formula.target], rho = _factors(formula, sums, row, gate.clip, lr, weight_decay, radius)
    g = times(times(g, gate.clip), s["gradient"])
    g = -g if h.maximize else g
    if rule.decay_mode == "coupled" and weight_decay != 0:
        g = g.add(w, alpha=weight_decay)
    reference = rule.reference or partial(_by_formula, rule)
    d, new_states = reference(h.hyperparameters, w, times(g, s["decayed"]), states, count)
    if formula is not None and formula.target == "direction":
        decayed = decayed_direction(rule.decay_mode, w, d, weight_decay)
        sums[DIRECTION_SQ_SUM:UPDATE_SQ_SUM] = _sums(sums.dtype, decayed.square(), w * decayed)
        s["direction"], rho = _factors(formula, sums, row, gate.clip, lr, weight_decay, radius)
    w = apply_update(rule.decay_mode, w, d, lr, weight_decay, s["direction"])
    if row.exponent:
        shrink = gate.shrink**row.exponent
        w = times(w, shrink)
        # the first state is the momentum
        momentum, *others = new_states
        new_states = [None if momentum is None else times(momentum, shrink), *others]
    return times(w, rho), list(new_states)


def _store_rounded(
    context: StepContext, layer_index: int, steps: Tensor | None, stored: Sequence[Any], computed: Sequence[Any]
) -> None:
    """Stores the parameter and the states of a row, at random with a seed; None for a missing state."""
    param, key = stored[0], None
    if context.rounding_seed is not None:
        if steps is None:
            steps = torch.as_tensor(context.gate.shrink, dtype=torch.float32, device=param.device) * STEPS_OF_SHRINK
        key = key_of(context.rounding_seed, layer_index, steps)
    for i, (tensor, result) in enumerate(zip(stored, computed, strict=True)):
        if tensor is None or result is None:
            continue
        if key is not None and tensor.dtype in HALF:
            # each tensor has its own noise. A state with other strides uses the positions of its parameter, too
            result = rounded(result, tensor.dtype, position_of(param), key, i)
        _store(tensor, result, context.gate.skipped)


def _store(tensor: Tensor, result: Tensor, skipped: Tensor | None) -> None:
    """Writes a result, unless the step is skipped."""
    if skipped is not None:
        result = torch.where(skipped, tensor.to(result.dtype), result)
    if result is not tensor:
        tensor.copy_(result)


def _factors(
    formula: FactorFormula, sums: Tensor, row: Row, clip: Factor, lr: float, weight_decay: float, radius: Tensor | None
) -> tuple[Factor, Factor]:  # fmt: skip
    """Returns s and ρ of a row, and fills in its statistics, see `FactorFormula.fill_factors_`."""
    rho = formula.fill_factors_(sums, row.scaled, clip, lr, weight_decay, radius)
    if not row.scaled:
        # numbers, not tensors, keep the bits of torch.optim
        return 1.0, 1.0
    return sums[FACTOR], 1.0 if rho is None else rho


def _sums(dtype: torch.dtype, *terms: Tensor) -> Tensor:
    return torch.stack([each.sum(dtype=dtype) for each in terms])


def _by_formula(
    rule: Rule, hyperparameters: Sequence[float], w: Tensor, g: Tensor, states: States, steps: float | Tensor
) -> tuple[Tensor, States]:
    """Returns the direction and the new states of a rule without a reference, by the formulas that Triton compiles."""
    coefficients = rule.coefficients(hyperparameters, steps)
    if not isinstance(steps, Tensor):
        coefficients = tuple(map(float, coefficients))
    present = [torch.full((), state is not None, device=w.device) for state in states]
    values = [torch.zeros_like(w) if state is None else state for state in states]
    result: tuple[Tensor, States] = rule.update(w, g, values, present, coefficients, hyperparameters)
    return result
