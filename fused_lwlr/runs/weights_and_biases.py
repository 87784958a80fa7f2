"""Weights & Biases: the metrics of a run, and its layers, on its server or in its offline folder."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fused_lwlr.extras import import_extra
from fused_lwlr.runs.metrics import scalars
from fused_lwlr.training.records import Record


class WandbRun:
    """Logs records to Weights & Biases; made on rank 0 alone: the result of `scalars` over `step`.

    A resumed run continues the same run there, by an id in the file `wandb_id` of its folder. Steps that are repeated
    after a kill are logged again, with the same numbers.

    Args:
        folder: folder of the run, whose name is used for the run.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]) -> None:
        folder = Path(folder)
        identity = folder / "wandb_id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex, encoding="utf-8")
        self._run: Any = import_extra("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "fused_lwlr"),
            name=folder.name,
            id=identity.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric="step")

    def add(self, record: Record) -> None:
        """Log a record."""
        self._run.log({**scalars(record), "step": record.step})

    def close(self) -> None:
        """Log no more."""
        self._run.finish()
