"""The radii of layers on spheres: entries of the state, float32, one number for each row of a parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels import Row
from fused_lwlr.kernels.precision import sum_dtype
from fused_lwlr.kernels.table import real
from fused_lwlr.optim.average import first_average
from fused_lwlr.optim.options import MASTER, RADIUS
from fused_lwlr.shards import completion_of, local


def radii_of(
    params: Sequence[Tensor], rows: Sequence[Sequence[Row]], states: Mapping[Any, Any], labels: Sequence[str]
) -> list[Tensor | None]:
    """Returns the radii of each tensor, those that there are or the norms of its rows now; None for no spheres.

    Norms are of whole layers and of exact weights.

    Args:
        params, rows: as of a plan.
        states: of the optimizer.
        labels: what messages call each parameter.

    Raises:
        ValueError: an entry of the state that does not fit its parameter.
    """
    found: list[Tensor | None] = [None] * len(params)
    new: list[int] = []
    for i, own in enumerate(rows):
        # all rows of a parameter are scaled, or none
        if not any(row.scaled for row in own):
            continue
        entry = states.get(params[i], {}).get(RADIUS)
        if entry is None:
            new.append(i)
        else:
            _check(labels[i], params[i], entry, len(own))
        found[i] = entry
    if not new:
        return found
    held = [(params[i], row) for i in new for row in rows[i]]
    device = local(params[new[0]]).device
    sums = torch.stack([_sq_sum(param, row, states.get(param, {})).to(device) for param, row in held])
    completion = completion_of(held, device)
    if completion is not None:
        sums = completion.sum(sums[:, None])[:, 0]
    norms = sums.sqrt().float().split([len(rows[i]) for i in new])
    for i, norm in zip(new, norms, strict=True):
        # memory of its own
        found[i] = norm.to(local(params[i]).device, copy=True)
    return found


def check_shape(value: Any, rows: int) -> None:
    """Raises ValueError unless the value may be the radii of so many rows of a parameter."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
        raise ValueError(f"must be a tensor of norms, not {value!r:.80}")
    if value.shape != (rows,):
        raise ValueError(
            f"is {tuple(value.shape)}, but must be ({rows},), one norm for each layer that the parameter is cut into: "
            "give the optimizer the slices in layers= that the state was saved with"
        )


def _check(label: str, param: Tensor, value: Any, rows: int) -> None:
    """Raises ValueError unless kernels can read an entry of the state as the radii of a parameter."""
    try:
        check_shape(value, rows)
    except ValueError as error:
        raise ValueError(f"state {RADIUS!r} of {label} {error}") from None
    if (value.dtype, value.device) != (torch.float32, local(param).device) or not value.is_contiguous():
        raise ValueError(
            f"state {RADIUS!r} of {label} is {value.dtype} on {value.device}, but must be torch.float32 on "
            f"{local(param).device}, and contiguous: optimizer.load_state_dict(optimizer.state_dict()) converts it"
        )


def _sq_sum(param: Tensor, row: Row, state: Mapping[str, Any]) -> Tensor:
    """Returns Σw² over what this process holds of a row, of no dimension."""
    master = state.get(MASTER)
    weight = real(first_average(local(param), None if master is None else local(master)))
    if row.stop is not None and weight.dim():
        weight = weight[row.start : row.stop]
    return weight.square().sum(dtype=sum_dtype(weight.device))
