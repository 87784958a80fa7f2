"""Statistics of layers, for TensorBoard."""

from typing import Any


class LayerStatsLogger:
    """A step hook that writes `layer_stats()` to a TensorBoard-style writer.

        optimizer.register_step_post_hook(LayerStatsLogger(SummaryWriter(), every=100))

    The tags are `elr/<layer>`, `trust_ratio/<layer>`, `grad_norm/<layer>` and `weight_norm/<layer>`, with a
    scaling that controls norms after the step also `update_ratio/<layer>` and `cosine/<layer>`, and `elr_mean` and
    `elr_spread` over all layers.

    Args:
        writer: an object with `add_scalar(tag, value, step)`, such as a `torch.utils.tensorboard.SummaryWriter`.
        every: the number of steps between two writes. Each write waits for the device.

    Raises:
        ValueError: `every` is not an int, or below 1.
        TypeError: `writer` has no such method, or later the optimizer no `layer_stats()`.
        RuntimeError: later, as `layer_stats()`, by the first step that would be written: the optimizer has no scaling,
            or `BalancedLR`.
    """

    def __init__(self, writer: Any, *, every: int = 100):
        if type(every) is not int or every < 1:
            raise ValueError(f"every={every!r} must be an int, at least 1")
        if not hasattr(writer, "add_scalar"):
            raise TypeError(f"writer={writer!r:.80} must have a method add_scalar(tag, value, step)")
        self._writer = writer
        self._every = every
        self._steps = 0

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hasattr(optimizer, "layer_stats"):
            raise TypeError(
                f"LayerStatsLogger needs an optimizer of fused_lwlr, with layer_stats(), not {type(optimizer).__name__}"
            )
        self._steps += 1
        if self._steps % self._every:
            return
        stats = optimizer.layer_stats()
        for layer, numbers in stats.to_dict().items():
            for name in ("elr", "trust_ratio", "grad_norm", "weight_norm", "update_ratio", "cosine"):
                if name in numbers:
                    self._writer.add_scalar(f"{name}/{layer}", numbers[name], self._steps)
        self._writer.add_scalar("elr_mean", stats.elr_mean.item(), self._steps)
        self._writer.add_scalar("elr_spread", stats.elr_spread.item(), self._steps)
