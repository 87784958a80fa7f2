"""The hyper rows of each step: one for each param group, and for each distinct set of layer options."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels import Hyper
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
        self._numbers, self._params, self._largest = options.rule.numbers, params, largest
        self._correct = options.scaling is None or options.scaling.bias_correction
        self._lr_in_momentum = options.lr_in_momentum
        self._variants = [
            (number, [variant for _, variant in those]) for number, those in groupby(variants, lambda each: each[0])
        ]
        # rows of layers, and the group's options that they were made from: usually only lr changes in the next step
        self._made: dict[int, tuple[Any, list[Hyper]]] = {}
        self.count = len(variants)

    def of(self, groups: Groups) -> list[Hyper]:
        """Returns the rows of the next step.

        Raises:
            ValueError: a number that float32 cannot hold.
        """
        found: list[Hyper] = []
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

    def _variant(self, group: dict[str, Any], row: Hyper, options: LayerOptions) -> Hyper:
        """Returns the row of some layers of a group."""
        values = {name: value for name in ("betas", "eps") if (value := getattr(options, name)) is not None}
        if values:
            row = self._row(group, {**group, **values})
        if options.corrected_decay and isinstance(row.lr, Tensor):
            # a replay reads lr
            factor = 1.0 if options.weight_decay is None else options.weight_decay
            return row._replace(decay_factor=0.0, decay_per_lr=factor / max_lr(group))
        factor = options.weight_decay_factor(group)
        if factor == 1:
            return row
        if isinstance(row.weight_decay, Tensor):
            return row._replace(decay_factor=factor)
        return self._checked(group, row._replace(weight_decay=row.weight_decay * factor))

    def _row(self, group: dict[str, Any], options: dict[str, Any]) -> Hyper:
        lr, weight_decay = options["lr"], options["weight_decay"]
        if type(lr) not in NUMBERS or type(weight_decay) not in NUMBERS:
            lr, weight_decay = _number(lr, group), _number(weight_decay, group)
        if self._lr_in_momentum:
            lr, options = 1.0, {**options, "gradient_gain": float(lr)}
        ema = 0.0 if group[EMA] is None else decay_of(group)
        numbers = self._numbers(options, self._correct)
        # takes less time than a call of the class
        return self._checked(options, Hyper._make((lr, weight_decay, options["maximize"], ema, 1.0, 0.0, numbers)))

    def _checked(self, options: dict[str, Any], row: Hyper) -> Hyper:
        largest = self._largest
        for value in (*row[:2], *row.numbers):
            if type(value) is float and not -largest <= value <= largest:
                check_float32({**options, "weight_decay": row.weight_decay}, largest, self._params)
        return row


def _number(value: Any, group: dict[str, Any]) -> Number:
    """Returns a learning rate or weight decay of a group: a tensor if every replay must read it on the device."""
    if not isinstance(value, Tensor) or not (value.is_cuda or group["capturable"]):
        return float(value)
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
