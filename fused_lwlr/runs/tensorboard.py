"""TensorBoard: the metrics of a run, and its layers in one chart for each quantity instead of one for each layer."""

from pathlib import Path
from typing import Any

from fused_lwlr.extras import import_extra
from fused_lwlr.runs.metrics import LAYERS, plain, scalars
from fused_lwlr.training.records import LayerValues, Record

LAYOUT = {"Layers": {title: ["Multiline", [f"^{name}/"]] for name, title in LAYERS.items()}}
"""Layout of TensorBoard's page Custom Scalars: all layers in one chart."""


class Dashboard:
    """Writes records for TensorBoard, in the folder `tensorboard` of a run; made on rank 0 alone.

    Scalars have the step as their x: `train/loss`, `train/lr`, `train/images_per_second`, ...; `validation/top1_model`,
    `validation/top1_ema`, ...; for each layer `elr/<layer>`, `trust_ratio/<layer>` and `multiplier/<layer>`, which have
    one chart each on the page Custom Scalars. The page Images shows each of the three against depth.

    Args:
        after: the step of the checkpoint from which the run resumes; later events are hidden. None for a
            new run.

    Raises:
        ImportError: tensorboard is not installed; adding layers also needs matplotlib.
    """

    def __init__(self, folder: str | Path, *, after: int | None = None):
        import_extra("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            str(Path(folder) / "tensorboard"), purge_step=0 if after is None else after + 1
        )
        self._writer.add_custom_scalars(LAYOUT)

    def add(self, record: Record) -> None:
        """Write a record."""
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record.step)
        if isinstance(record, LayerValues):
            self._pictures(plain(record), record.step)
        self._writer.flush()

    def close(self) -> None:
        """Write no more."""
        self._writer.close()

    def _pictures(self, content: dict[str, Any], step: int) -> None:
        from fused_lwlr.runs.figures import by_depth

        for name in LAYERS:
            if any(value is not None for value in content[name]):
                self._writer.add_figure(f"{name}_by_depth", by_depth(content, name), step)
