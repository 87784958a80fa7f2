"""The interface of steps in buckets, which `step_in_backward` and `offload_to_cpu` implement."""

from typing import Any, Protocol

from fused_lwlr.optim.plans import Plans


class Buckets(Protocol):
    """The parameters of a step in buckets, see `step_in_backward` and `offload_to_cpu`."""

    def end_step(self, closure: Any) -> tuple[Plans, ...]:
        """Steps the parameters of the last bucket. Returns the plans of all buckets of the step."""

    def reset(self) -> None:
        """Forgets the gradients of a backward pass that did not end."""

    def read_weights(self) -> None:
        """Takes weights of the model that were changed into the parameters of the optimizer."""

    def write_weights(self) -> None:
        """Puts the parameters of the optimizer into the model."""
