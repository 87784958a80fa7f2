"""The calls that an optimizer makes to `step_in_backward` or `offload_to_cpu`."""

from collections.abc import Sequence

from torch import Tensor


class Handle:
    """Does nothing: for an optimizer that steps in `step()`. `StepInBackward` and `CPUOffload` override it."""

    def pull_weights(self) -> None:
        """Takes weights of the model that were changed into the parameters of the optimizer, if these are copies."""

    def push_weights(self) -> None:
        """Puts the parameters of the optimizer into the model, if these are copies."""

    def reset(self) -> None:
        """Drops the gradients of a backward pass that did not end. Parameters that were stepped stay stepped."""

    def check_added(self, params: Sequence[Tensor]) -> None:
        """Raises ValueError if a param group is added with a parameter of the model that the optimizer has already."""

    def check_copy(self) -> None:
        """Raises RuntimeError if a copy of the optimizer could not step a copy of the model."""
