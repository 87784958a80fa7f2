"""A step of any rule in plain PyTorch. It defines every option, and runs on every device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels.reference.step_context import StepContext
from fused_lwlr.kernels.rules.base import Rule
from fused_lwlr.kernels.step_arguments import Factors, Gate, Scale
from fused_lwlr.kernels.table import Table


@torch.no_grad()
def step(
    rule: Rule,
    table: Table,
    hyper: Sequence[Any],
    scale: Scale | Factors | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Tensor | None:
    """Takes one step of a rule on every row of the table that has a gradient, in place, each with its multiplier η.

    `Hyper` has the formula, with clip and grad_scale from the gate, s from the scale (at its target, 1 elsewhere), and
    Ŵᵖ as each row says. After it, an average of the weights moves: e ← e + (1 − ema) · (w − e), with the stored w,
    or the exact weight if it exists. The multiplier acts on weight decay too, like a separate param group with
    rate lr · η. Half precision is computed in float32 and rounded once when stored.

    Args:
        rule: the update rule.
        table: columns "param", "grad" and the rule's states (None for state that a parameter does not have). "step"
            if the device counts steps. "master_weight": for a half-precision parameter its weight before rounding,
            used where it rounds to the parameter. "ema": the moving average of the weight. "radius": the norms
            of the rows for a `Retraction` that is fixed.
        hyper: the rows that `table.hyper_row` points into.
        scale: one factor for each row.
        gate: loss scaling, clipping, skipping and Ŵ.
        write: False changes nothing, and only returns statistics.
        rounding_seed: rounds half precision up or down at random, by the seed, the row, the step count and the
            position, so that expectations are exact.

    Returns:
        With a `Scale`, float64 of shape [rows, 5] in the order of `STEP_STATISTICS`, or [rows, 8] in the order of
        `RETRACTION_STATISTICS`, valid until the next step. Rows without a gradient have arbitrary values.
    """
    context = StepContext(rule, table, scale, gate, write, rounding_seed)
    columns = table.views("param", "grad", "step", "master_weight", "ema", *rule.states)
    for number, (row, (param, grad, steps, master_weight, ema, *stored)) in zip(table.hyper_row, columns, strict=True):
        h = hyper[number]
        if grad is None:
            # a rescale-only row is not counted, and its average stays
            steps = ema = None
        context.begin(row, h, param, steps)
        count = table.steps.item(row.tensor) if steps is None else steps
        if grad is None and not row.power:
            continue
        g = context.gradient(grad)
        states = [None if state is None else context.own(state) for state in stored]
        w = context.weight(master_weight)
        g = context.decayed(-g if h.maximize else g, w)
        direction, results = (rule.reference or partial(_by_formula, rule))(h.numbers, w, g, states, count)
        w = context.move(w, direction)
        context.store(param, w, 0)
        if master_weight is not None:
            context.store(master_weight, w, 0)
        context.average(ema, param if master_weight is None else master_weight, h.ema)
        for column, (state, result) in enumerate(zip(stored, results, strict=True), 1):
            if state is not None and result is not None:
                context.store(state, result, column)
    # all rows of a tensor need the count before this step
    context.count(table)
    statistics: Tensor | None = context.statistics
    return statistics


def prepare(*args: Any, **options: Any) -> Callable[[], Tensor | None]:
    """Runs the part of `step` that can fail, and writes nothing. Call the returned function once for the rest."""
    return partial(step, *args, **options)


def _by_formula(
    rule: Rule, numbers: Sequence[float], w: Tensor, g: Tensor, states: Sequence[Tensor | None], steps: float | Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Returns the direction and the new states of a rule without a reference, by the formulas that Triton compiles."""
    if isinstance(steps, Tensor):
        coefficients = rule.coefficients(numbers, steps)
    else:
        coefficients = tuple(map(float, rule.scheduled(numbers, steps)))
    present = [torch.full((), state is not None, device=w.device) for state in states]
    values = [torch.zeros_like(w) if state is None else state for state in states]
    found: tuple[Tensor, Sequence[Tensor | None]] = rule.update(w, g, values, present, coefficients, numbers)
    return found
