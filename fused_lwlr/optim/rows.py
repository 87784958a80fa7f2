"""The rows of parameters: a row for each layer, with its multiplier and its hyper row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fused_lwlr.kernels import Row
from fused_lwlr.optim.layer_options import LayerOptions, layers_of
from fused_lwlr.optim.options import Groups, StepOptions
from fused_lwlr.shards import local_row


@dataclass
class Rows:
    """The rows of the parameters of an optimizer.

    Attributes:
        rows: (group, position) -> the rows of this parameter, as rows of the first tensor of a table.
        labels: (group, position) -> the label of each row.
        hyper: for each hyper row the number of a param group, ascending, and the options of its layers but lr.
        largest_eta: the largest multiplier of lr, at least 1.
        has_slices: whether any parameter has a row for a slice.
    """

    rows: dict[tuple[int, int], list[Row]]
    labels: dict[tuple[int, int], list[str]]
    hyper: list[tuple[int, LayerOptions]]
    largest_eta: float
    has_slices: bool


def rows_of(options: StepOptions, groups: Groups, places: Sequence[tuple[int, int]]) -> Rows:
    """Returns the rows of some parameters.

    Args:
        options, groups: of the optimizer.
        places: the group and the position of each parameter.
    """
    scaling, wanted = options.scaling, set(places)
    rows: dict[tuple[int, int], list[Row]] = {place: [] for place in places}
    labels: dict[tuple[int, int], list[str]] = {place: [] for place in places}
    hyper: dict[tuple[int, LayerOptions], int] = {}
    largest_eta, has_slices = 1.0, False
    for label, number, at, (start, stop, own) in layers_of(groups):
        if (number, at) not in wanted:
            continue
        group = groups[number]
        param: Tensor = group["params"][at]
        name = group["param_names"][at] if "param_names" in group else None
        scaled = scaling is not None and scaling.selects(name, param)
        variant = own.without_lr
        if scaled and options.on_spheres:
            # weight decay does not act on a sphere
            variant = replace(variant, weight_decay=0.0, corrected_decay=None)
        index = hyper.setdefault((number, variant), len(hyper))
        row = Row(0, start, stop, own.eta, scaled, hyper=index)
        rows[number, at].append(local_row(row, param))
        labels[number, at].append(label)
        largest_eta, has_slices = max(largest_eta, own.eta), has_slices or stop is not None
    return Rows(rows, labels, list(hyper), largest_eta, has_slices)
