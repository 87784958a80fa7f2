"""A step on layers of which every process has a part: norms here, one all-reduce, then the updates."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.kernels import Balance, Factors, Gate, Row, Rule, Scale
from fused_lwlr.scaling import BalancedLR
from fused_lwlr.shards import Completion

if TYPE_CHECKING:
    from fused_lwlr.optim.gate import GlobalGate
    from fused_lwlr.optim.parts import Part


def norm_itself(norm: Tensor, weight_norm: Tensor, lr: Tensor, weight_decay: Tensor) -> Tensor:
    """The formula that asks for nothing but the norm."""
    return norm


class Decision(NamedTuple):
    """What a part has to know before it is updated.

    Attributes:
        scale: the factor of each of its rows, or how to find it.
        gate: of all rows.
        statistics: what a step with a scaling returns, of whole layers; None where the step itself does.
    """

    scale: Scale | Factors | Balance | None
    gate: Gate | None
    statistics: Tensor | None = None


class Traits:
    """What is fixed of the rows of all parts, on the device: to upload it in every step would be to wait for that."""

    def __init__(self, rows: Sequence[Row], device: torch.device):
        self.anchor = torch.tensor([row.anchor for row in rows], device=device)
        self.scaled = torch.tensor([row.scaled for row in rows], device=device)
        self.multiplier = torch.tensor([row.multiplier for row in rows], dtype=torch.float64, device=device)


def decide(
    rule: Rule,
    parts: Sequence["Part"],
    completion: Completion,
    traits: Traits,
    hyper: Sequence[Any],
    scale: Scale | Balance | None,
    gate: "GlobalGate",
    gates: Sequence[Gate],
) -> list[Decision]:
    """Measure the rows of all parts, complete the sums, and decide.

    One all-reduce; two where a clipped direction is scaled, since that depends on the norm of all gradients.

    Args:
        rule: the update rule.
        parts: their tables hold the gradients and hyper rows of this step.
        completion: of sums over the rows of all parts.
        traits: of these rows.
        hyper: the hyper rows.
        scale: one factor for each row.
        gate: what is decided for all rows at once.
        gates: for each part, the loss scale.
    """
    direction = isinstance(scale, Scale) and scale.place == "direction"
    twice = direction and gate.clips
    sums = _measure(rule, parts, hyper, "direction" if direction and not twice else "gradient", gates)
    sums = completion.sum(sums)
    largest = torch.where(traits.anchor, sums[:, 3], 0.0).amax()
    totals = torch.stack((sums[:, 1].sum(), sums[:, 2].sum(), largest))
    counts = list(sums[:, 2].split([len(part.table.rows) for part in parts]))
    decided = gate.gates(parts, gates, totals, counts)
    if scale is None:
        return [Decision(None, gate) for gate in decided]
    if isinstance(scale, Balance):
        # 1 of a norm of 0, which does not count
        balanced = BalancedLR.factors(torch.where(traits.scaled, sums[:, 3].sqrt(), 0.0))
        places = zip(parts, decided, balanced.split([len(part.table.rows) for part in parts]), strict=True)
        return [Decision(Factors(of.to(_device(part)), scale.place), each) for part, each, of in places]
    clip = torch.ones_like(totals[0])
    if gate.clips:
        clip = (gate.max_norm / (totals[0].sqrt() + 1e-6)).clamp(max=1.0)
    if twice:
        sums[:, 4:] = completion.sum(_measure(rule, parts, hyper, "direction", decided)[:, 4:])
    norm = sums[:, 4].sqrt() if direction else sums[:, 1].sqrt() * clip
    sums[:, 4] = _factors(parts, traits, hyper, scale, norm, sums[:, 3].sqrt())
    pieces = sums.split([len(part.table.rows) for part in parts])
    return [
        Decision(Factors(piece[:, 4].to(_device(part)), scale.place), gate, piece)
        for piece, part, gate in zip(pieces, parts, decided, strict=True)
    ]


def _device(part: "Part") -> torch.device:
    device: torch.device = part.table.columns["param"][0].device
    return device


def _measure(rule: Rule, parts: Sequence["Part"], hyper: Sequence[Any], place: Any, gates: Sequence[Gate]) -> Tensor:
    """Σ|g|, Σg², non-finite g, Σw² and the square of the norm at a place, of the local part of every row."""
    found = [
        part.backend.step(rule, part.table, hyper, Scale(norm_itself, place), gate, write=False)
        for part, gate in zip(parts, gates, strict=True)
    ]
    sums = torch.cat([values.to(found[0].device) for values in found])
    sums[:, 4].square_()
    return sums


def _factors(
    parts: Sequence["Part"], traits: Traits, hyper: Sequence[Any], scale: Scale, norm: Tensor, weight_norm: Tensor
) -> Tensor:
    """What the formula of a scaling makes of the norms of all rows, 1 where it does not act."""
    used = [hyper[part.table.hyper_row[row.tensor]] for part in parts for row in part.table.rows]
    lr = _numbers([h.lr for h in used], norm) * traits.multiplier
    weight_decay = _numbers([h.weight_decay for h in used], norm)
    numbers = [norm.new_full((), number) for number in scale.numbers]
    factors = scale.formula(norm, weight_norm, lr, weight_decay, *numbers)
    return torch.where(traits.scaled, factors, 1.0)


def _numbers(values: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """Numbers, or tensors of one element, as one tensor."""
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value).to(like).reshape(()) for value in values])
    return torch.tensor(values, dtype=like.dtype, device="cpu").to(like.device, non_blocking=True)
