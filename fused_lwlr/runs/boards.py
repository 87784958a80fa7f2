"""The metrics of a run for TensorBoard and Weights & Biases; both objects are made on rank 0 alone."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fused_lwlr.integrations.extras import import_extra
from fused_lwlr.runs.metrics import LAYERS, plain, scalars
from fused_lwlr.training.records import LayerValues, Record


class TensorBoardSink:
    """Writes records for TensorBoard, in the folder `tensorboard` of a run.

    Scalars have the step as their x: `train/loss`, `train/lr`, `train/images_per_second`, ...; `validation/top1_model`,
    `validation/top1_ema`, ...; for each layer `elr/<layer>`, `trust_ratio/<layer>` and `multiplier/<layer>`, which have
    one chart each on the page Custom Scalars. The page Images shows each of the three against depth.

    Args:
        after: the step of the checkpoint from which the run resumes; later events are hidden. None for a
            new run.
    """

    def __init__(self, folder: str | Path, *, after: int | None):
        import_extra("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        path = str(Path(folder) / "tensorboard")
        self._writer: Any = SummaryWriter(path, purge_step=0 if after is None else after + 1)
        charts = {title: ["Multiline", [f"^{name}/"]] for name, title in LAYERS.items()}
        self._writer.add_custom_scalars({"Layers": charts})

    def add(self, record: Record) -> None:
        """Write a record."""
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record.step)
        if isinstance(record, LayerValues):
            from fused_lwlr.runs.figures import by_depth

            content = plain(record)
            for name in LAYERS:
                if any(value is not None for value in content[name]):
                    self._writer.add_figure(f"{name}_by_depth", by_depth(content, name), record.step)
        self._writer.flush()

    def close(self) -> None:
        """Write no more."""
        self._writer.close()


class WandbSink:
    """Logs records to Weights & Biases, on its server or in its offline folder: the result of `scalars` over `step`.

    A resumed run continues the same run there, by an id in the file `wandb_id` of its folder. Steps that are repeated
    after a kill are logged again, with the same numbers. The run has the name of its folder.

    Raises:
        ValueError: the package cannot start a run.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]) -> None:
        folder = Path(folder)
        identity = folder / "wandb_id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex, encoding="utf-8")
        wandb = import_extra("wandb")
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fused_lwlr"), name=folder.name, dir=str(folder),
                id=identity.read_text(encoding="utf-8"), resume="allow", config=dict(config),
            )  # fmt: skip
        except Exception as error:  # the package has many, as without a login or a network
            reason = " ".join(str(error).split()).rstrip(". ")
            raise ValueError(
                f"--wandb cannot log ({reason}): run wandb login, set WANDB_MODE=offline, or leave --wandb out"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def add(self, record: Record) -> None:
        """Log a record."""
        self._run.log({**scalars(record), "step": record.step})

    def close(self) -> None:
        """Log no more."""
        self._run.finish()
