"""The plans that an optimizer keeps: one for each set of parameters that had gradients lately."""

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from torch import Tensor

from fused_lwlr.optim.plan import Plan
from fused_lwlr.optim.state import Counts

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer

KEPT = 8
"""Of one optimizer. Heads that take turns are mostly fewer; of layers dropped at random no number would be enough."""
CAPTURABLE = itemgetter("capturable")


class Plans:
    """Plans of one optimizer, and the step counts that they share.

    Which parameters have gradients may change from step to step: by heads that take turns, layers that are dropped,
    experts that nothing is sent to. A plan takes as long to make as some tens of steps, and is of one such set.
    """

    def __init__(self) -> None:
        # by which parameters have gradients, that of the last step last
        self._kept: dict[bytes, Plan] = {}
        self._counts = Counts(())

    def find(self, optimizer: "FusedOptimizer", params: Sequence[Tensor], failed: Plan | None) -> Plan | None:
        """The plan of an earlier step that takes in the gradients of the next one; None if there is none.

        Args:
            params: all of the optimizer.
            failed: the plan of the last step, which does not.
        """
        present = _present(params)
        plan = self._kept.pop(present, None)
        if plan is None:
            # state that was replaced is not to be held on to
            self._kept = {key: other for key, other in self._kept.items() if other.state.holds(optimizer)}
        elif plan is not failed and plan.take(optimizer, params):
            self._kept[present] = plan
            return plan
        else:
            # something has changed, for the others as well
            self._kept = {}
        return None

    def make(self, optimizer: "FusedOptimizer", params: Sequence[Tensor]) -> Plan:
        """A new plan, for the gradients that there are."""
        if not self._counts.fit(optimizer, params):
            self._kept, self._counts = {}, Counts(params)
        plan = Plan(optimizer, params, [param.grad for param in params], self._counts)
        if any(map(CAPTURABLE, optimizer.param_groups)):
            # replays of a graph change weights in a way that other plans would not notice
            self._kept = {}
        elif len(self._kept) == KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[_present(params)] = plan
        return plan


def _present(params: Sequence[Tensor]) -> bytes:
    return bytes(param.grad is not None for param in params)
