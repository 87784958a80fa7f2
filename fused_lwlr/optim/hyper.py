"""The hyper rows of each step: one for each param group, and for each set of options that some of its layers have."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels.rules.base import Number
from fused_lwlr.optim.average import EMA, decay_of
from fused_lwlr.optim.layer_options import SAME, LayerOptions, max_lr
from fused_lwlr.optim.options import Groups, StepOptions
from fused_lwlr.optim.validate import check_float32

NUMBERS = (float, int)


class HyperRows:
    """Makes hyper rows of param groups.

    Args:
        options: of the optimizer.
        variants: for each row, the number of a param group, ascending, and the options of its layers but lr.
        params: that the rows are for.
        largest: the largest number that float32 computes with, times the largest multiplier of lr.
    """

    def __init__(
        self,
        options: StepOptions,
        variants: Sequence[tuple[int, LayerOptions]],
        params: Sequence[Tensor],
        largest: float,
    ):
        self._rule, self._params, self._largest = options.rule, params, largest
        self._correct = options.scaling is None or options.scaling.bias_correction
        self._variants = [
            (number, [variant for _, variant in those]) for number, those in groupby(variants, lambda each: each[0])
        ]
        # rows of layers, and what of their group they were made of: mostly lr is all that differs in the next step
        self._made: dict[int, tuple[Any, list[Any]]] = {}
        self.count = len(variants)

    def of(self, groups: Groups) -> list[Any]:
        """Returns the rows of the next step.

        Raises:
            ValueError: a number that float32 cannot hold.
        """
        found: list[Any] = []
        for number, variants in self._variants:
            group = groups[number]
            row = self._row(group, group)
            if variants == [SAME]:
                found.append(row)
                continue
            made_of, rows = self._made.get(number, (None, []))
            if made_of is not None and made_of == row[1:]:
                rows = [each._replace(lr=row.lr) for each in rows]
            else:
                rows = [self._variant(group, row, variant) for variant in variants]
                # tensors are not compared: that would wait for the device
                again = type(row.weight_decay) in NUMBERS and not any(variant.corrected_decay for variant in variants)
                self._made[number] = row[1:] if again else None, rows
            found += rows
        return found

    def _variant(self, group: dict[str, Any], row: Any, options: LayerOptions) -> Any:
        """Returns the row of some layers of a group."""
        values = {name: value for name in ("betas", "eps") if (value := getattr(options, name)) is not None}
        if values:
            row = self._row(group, {**group, **values})
        if options.corrected_decay and isinstance(row.lr, Tensor):
            # a replay reads lr
            factor = 1.0 if options.weight_decay is None else options.weight_decay
            return row._replace(decay_factor=-factor / max_lr(group))
        factor = options.weight_decay_factor(group)
        if factor == 1:
            return row
        if isinstance(row.weight_decay, Tensor):
            return row._replace(decay_factor=factor)
        return self._checked(row._replace(weight_decay=row.weight_decay * factor))

    def _row(self, group: dict[str, Any], options: dict[str, Any]) -> Any:
        row = self._rule.hyper_of(options, self._correct)
        if type(row.lr) not in NUMBERS or type(row.weight_decay) not in NUMBERS:
            row = row._replace(lr=_number(row.lr, group), weight_decay=_number(row.weight_decay, group))
        if group[EMA] is not None:
            row = row._replace(ema=decay_of(group))
        return self._checked(row)

    def _checked(self, row: Any) -> Any:
        for value in row:
            if type(value) is float and not -self._largest <= value <= self._largest:
                check_float32(row, self._largest, self._params)
        return row


def _number(value: Any, group: dict[str, Any]) -> Number:
    """Returns a learning rate or weight decay of a group: a tensor if every replay is to read it on the device."""
    if not isinstance(value, Tensor) or not (value.is_cuda or group["capturable"]):
        return float(value)
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
