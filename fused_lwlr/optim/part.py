"""Parts of a step: parameters of one device and one combination of dtypes, in one table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr import ops
from fused_lwlr.kernels import Row, Table
from fused_lwlr.memory import all_addressable, is_fake
from fused_lwlr.optim.average import EMA
from fused_lwlr.optim.layer_options import LayerOptions, layers_of
from fused_lwlr.optim.options import RADIUS, Groups, StepOptions
from fused_lwlr.rescaling import Target
from fused_lwlr.scaling import Scaling
from fused_lwlr.shards import local_row


class Part:
    """Parameters of one device and one combination of dtypes: one table, one launch.

    Attributes:
        members: the indices of the parameters in the plan, int64.
        all_members: whether these are all parameters of the plan.
        table: their table.
        backend: the module that steps it.
        rounding_seed: the seed of stochastic rounding, or None.
        names: the name of each row of the table; "" for a tensor that is only rescaled.
        stepped: the indices in the plan of those that have a gradient in the last or next step.
        statistics: what the last step returned.
    """

    def __init__(
        self, members: list[int] | None, table: Table, backend: ModuleType, rounding_seed: int | None, names: list[str]
    ):
        count = len(table.columns["param"])
        self.all_members = members is None
        self.members = np.arange(count) if members is None else np.array(members, dtype=np.int64)
        self.table, self.backend, self.rounding_seed, self.names = table, backend, rounding_seed, names
        self.device: torch.device = table.columns["param"][0].device
        self.stepped = self.members
        self.statistics: Tensor | None = None

    def select(self, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the members' values, of one value for each parameter of the plan."""
        return values if self.all_members else [values[i] for i in self.members.tolist()]

    def own_gradients(
        self, present: bytes, grads: Sequence[Any], addresses: bytes | None
    ) -> tuple[bytes, Sequence[Any], bytes | None]:
        """Returns the arguments of `Table.accept_gradients` for the members, of those for all of the plan."""
        if addresses is not None:
            addresses = np.frombuffer(addresses, dtype=np.int64)[self.members].tobytes()
        return bytes(self.select(present)), self.select(grads), addresses

    def stepped_names(self) -> list[str]:
        """Returns the name of each row; "" if it has no gradient in the last or next step."""
        return [name if stepped else "" for name, stepped in zip(self.names, self.table.stepped.tolist(), strict=True)]


def partition(
    options: StepOptions,
    columns: Mapping[str, Sequence[Any]],
    rows: Sequence[Sequence[Row]],
    names: Sequence[Sequence[str]],
    *,
    capturable: bool,
) -> Iterator[Part]:
    """Yields the parts of a plan.

    Args:
        options: of the optimizer.
        columns: "param", "grad" and the state, of this process.
        rows: the rows of each parameter, as of the first tensor of a table; none if it is in no part.
        names: what these are called.
        capturable: whether steps may be captured in a CUDA graph.
    """
    params, grads = columns["param"], columns["grad"]
    # counts and radii are float32 wherever they are, and the dtype of an average follows from its parameter's
    typed = [column for name, column in columns.items() if name not in ("step", RADIUS, EMA)]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, param in enumerate(params):
        if rows[i]:
            dtypes = [param.dtype if column[i] is None else column[i].dtype for column in typed]
            # kernels do not count versions of inference tensors, which have none
            addressable = all_addressable(column[i] for column in columns.values()) and not param.is_inference()
            kinds.setdefault((param.device, *dtypes, addressable), []).append(i)
    for number, ((*_, addressable), members) in enumerate(kinds.items()):
        first = params[members[0]]
        only = None if len(members) == len(params) else members
        here = columns if only is None else {name: [column[i] for i in members] for name, column in columns.items()}
        own = [row._replace(tensor=tensor) for tensor, i in enumerate(members) for row in rows[i]]
        grad_dtype = next((grads[i].dtype for i in members if grads[i] is not None), None)
        table = Table(here, own, grad_dtype)
        table.capturable = capturable
        # without values there is nothing to launch: only shapes follow
        chosen = "torch" if is_fake(first) else options.backend
        elements = sum(params[i].numel() for i in members)
        backend = ops.pick(chosen, first.device, first.dtype, addressable=addressable, elements=elements)
        # the noise of one bucket is not that of another
        seed = options.seed_of(members[0] if options.in_backward else number)
        yield Part(only, table, backend, seed, [name for i in members for name in names[i]])


def rows_of(
    groups: Groups,
    params: Sequence[Tensor],
    stepped: Sequence[bool],
    scaling: Scaling | None,
    every: Sequence[Tensor],
    targets: Sequence[Target],
) -> tuple[list[list[Row]], list[list[str]], list[tuple[int, LayerOptions]]]:
    """Returns the rows of each tensor, as of the first tensor of a table, what these are called, and their hyper rows.

    There is a hyper row for each param group, and for each set of options that some of its layers have.

    Args:
        groups: the param groups.
        params: their parameters.
        stepped: for each parameter, whether it is stepped when it has a gradient.
        scaling: one factor for each layer.
        every: the parameters, and then the tensors that are only rescaled.
        targets: what is rescaled.
    """
    powers = {id(target.tensor): target[1:] for target in targets}
    rows = [
        [Row(0, power=p, counts_for_max_norm=c) for p, c in [powers[id(t)]]] if id(t) in powers else [] for t in every
    ]
    names = [[""] * len(own) for own in rows]
    variants: dict[tuple[int, LayerOptions], int] = {}
    first = np.cumsum([0, *(len(group["params"]) for group in groups)])
    for label, number, at, (start, stop, options) in layers_of(groups):
        i, group = int(first[number]) + at, groups[number]
        if not stepped[i]:
            continue
        if start == 0:
            rows[i], names[i] = [], []
        name = group["param_names"][at] if "param_names" in group else None
        scaled = scaling is not None and scaling.selects(name, params[i])
        variant = options.without_lr
        if scaled and scaling is not None and scaling.on_spheres:
            # weight decay does not act there
            variant = replace(variant, weight_decay=0.0, corrected_decay=None)
        hyper = variants.setdefault((number, variant), len(variants))
        row = Row(0, start, stop, options.eta, scaled, *powers.get(id(params[i]), (0, False)), hyper)
        rows[i].append(local_row(row, params[i]))
        names[i].append(label)
    return rows, names, list(variants)
