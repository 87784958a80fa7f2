"""Records as named numbers for TensorBoard and Weights & Biases."""

from fused_lwlr.runs.metrics import plain
from fused_lwlr.training.records import Interval, LayerValues, Record, Validation

INTERVAL = (
    "loss", "lr", "epoch", "images_per_second", "tokens_per_second", "loader_seconds", "step_seconds", "grad_norm",
    "skipped", "steps_skipped",
)  # fmt: skip
VALIDATION = ("top1", "top5", "loss", "perplexity")
LAYERS = ("elr", "trust_ratio", "multiplier")


def scalars(record: Record) -> dict[str, float]:
    """Name -> number, for all finite values: `train/loss`, `validation/top1_ema`, `elr/<layer>`, ..."""
    content, found = plain(record), {}
    if isinstance(record, Interval):
        found = {f"train/{name}": content[name] for name in INTERVAL if name in content}
    elif isinstance(record, Validation):
        found = {f"validation/{name}_{record.weights}": content[name] for name in VALIDATION if name in content}
    elif isinstance(record, LayerValues):
        for name in LAYERS:
            found |= {f"{name}/{layer}": v for layer, v in zip(record.names, content[name], strict=True)}
    return {name: value for name, value in found.items() if value is not None}
