"""Decisions that all layers share: clipping by the global norm, and what to do about gradients that are not finite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.kernels import Gate

if TYPE_CHECKING:
    from fused_lwlr.optim.parts import Part

Nonfinite = Literal["propagate", "skip", "raise"]


@dataclass
class Verdict:
    """On its way from the device: whether a step was skipped, and the non-finite elements of each row of each part."""

    skipped: Tensor
    arrived: torch.cuda.Event | None
    counts: list[tuple[Tensor, list[str]]]


class LossScale(NamedTuple):
    """What a `torch.amp.GradScaler` hands to an optimizer that unscales gradients by itself; see `Gate`."""

    grad_scale: Tensor | None
    found_inf: Tensor | None

    def gate(self, part: "Part") -> Gate | None:
        """The gate of a part that asks for nothing else."""
        if self.grad_scale is None and self.found_inf is None:
            return None
        device = part.table.columns["param"][0].device
        grad_scale, found_inf = (None if t is None else _local(t, device) for t in self)
        return Gate(grad_scale=grad_scale, found_inf=found_inf)


NO_LOSS_SCALE = LossScale(None, None)


class GlobalGate:
    """Makes the `Gate` of each part of a step. One more launch for each part, if gradients are to be read first.

    Attributes:
        max_norm: for clipping, infinite for none.
        nonfinite: whether a gradient that is not finite is used, skips the step, or skips it and is reported.
        rescales: whether Ŵ is needed.
        balances: whether Σ 1 / ‖w‖ is needed.
        verdict: on the last step, until it is reported.
    """

    def __init__(self, max_norm: float, nonfinite: Nonfinite, *, rescales: bool, balances: bool = False):
        self.max_norm = max_norm
        self.nonfinite = nonfinite
        self.rescales = rescales
        self.balances = balances
        self.skips = nonfinite != "propagate"
        self.clips = max_norm < math.inf
        self.looks = self.skips or self.clips or rescales or balances
        self.verdict: Verdict | None = None

    def of(self, parts: Sequence["Part"], loss_scale: LossScale) -> list[Gate | None]:
        """The gates of the next step, from one pass over all gradients where that is needed."""
        if not self.looks:
            return [loss_scale.gate(part) for part in parts]
        gates = [loss_scale.gate(part) or Gate() for part in parts]
        wanted = {"grad": self.skips or self.clips, "weight": self.rescales, "balance": self.balances}
        found = [
            part.backend.totals(part.table, **wanted, grad_scale=gate.grad_scale)
            for part, gate in zip(parts, gates, strict=True)
        ]
        totals = found[0][0] if len(found) == 1 else _together([sums for sums, _ in found])
        return [*self.gates(parts, gates, totals, [rows for _, rows in found])]

    def gates(
        self, parts: Sequence["Part"], gates: Sequence[Gate], totals: Tensor, counts: Sequence[Tensor]
    ) -> list[Gate]:
        """The gates of the next step, from what was found out about all gradients.

        Args:
            parts: what is stepped.
            gates: for each part, its loss scale.
            totals: see `Gate`.
            counts: for each part, the non-finite elements of each row.
        """
        if self.nonfinite == "raise":
            # an overflow that a GradScaler has found is its own to deal with
            known = gates[0].found_inf
            skipped = totals[1] if known is None else totals[1] * (known.to(totals.device) == 0).reshape(())
            self.verdict = _send(skipped, [(rows, part.names) for rows, part in zip(counts, parts, strict=True)])
        devices = [part.table.columns["param"][0].device for part in parts]
        return [
            gate._replace(totals=totals.to(device, non_blocking=True), max_norm=self.max_norm, skip=self.skips)
            for gate, device in zip(gates, devices, strict=True)
        ]

    def report(self, *, wait: bool) -> None:
        """Raise if the last step was skipped because of a gradient; on a GPU only when told to wait for its verdict.

        Called after a step without waiting and before the next one with it: by then forward and backward passes are
        queued behind the verdict, so the device does not run dry.

        Raises:
            FloatingPointError: naming the layers.
        """
        verdict = self.verdict
        if verdict is None or (verdict.arrived is not None and not wait):
            return
        if verdict.arrived is not None and not verdict.arrived.query():
            verdict.arrived.synchronize()
        self.verdict = None
        if verdict.skipped.item():
            bad = [
                name
                for rows, names in verdict.counts
                for name, count in zip(names, rows.tolist(), strict=True)
                if count
            ]
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise FloatingPointError(
                f"the gradient of {', '.join(map(repr, bad[:5]))}{more} is not finite: the step was skipped, and "
                "neither parameters nor state were changed"
            )

    def __getstate__(self) -> dict[str, Any]:
        # a verdict belongs to the device and to this process
        return {**vars(self), "verdict": None}


def _local(number: Tensor, device: torch.device) -> Tensor:
    return number.to(device, torch.float32, non_blocking=True)


def _send(nonfinite: Tensor, counts: list[tuple[Tensor, list[str]]]) -> Verdict:
    if not nonfinite.is_cuda:
        return Verdict(nonfinite, None, counts)
    host = torch.empty((), dtype=nonfinite.dtype, device="cpu", pin_memory=True)
    host.copy_(nonfinite, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(nonfinite.device))
    return Verdict(host, arrived, counts)


def _together(totals: Sequence[Tensor]) -> Tensor:
    """The totals of all parts: sums, and the largest."""
    table = torch.stack([t.to(totals[0].device, non_blocking=True) for t in totals])
    return torch.cat((table[:, :2].sum(0), table[:, 2:3].amax(0), table[:, 3:].sum(0)))
