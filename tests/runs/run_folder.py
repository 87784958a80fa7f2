"""The folder of a made-up run."""

import math

import torch

from fused_lwlr.runs.metrics import Metrics
from fused_lwlr.runs.provenance import record_start
from fused_lwlr.training.records import Interval, LayerValues, Validation

NAMES = ("b0.conv.weight", "b0.bn.weight", "b0.bn.bias", "b1.conv.weight", "b1.bn.weight", "b1.bn.bias")
CONFIG = {"model": "net <b>", "lr": 0.1, "augment": ["mixup", 0.2], "out": "a&b", "seed": 0, "world_size": 1}


def fill(folder, sinks=(), *, steps=6, of=6, after=None):
    """Records of steps after `after`, with validations and layers every second; the records are returned."""
    record_start(folder, CONFIG, device=torch.device("cpu"), steps=of)
    records = []
    for step in range((after or 0) + 1, steps + 1):
        norm = math.inf if step == 2 else 1.0 / step
        records.append(
            Interval(step, step / 2, 0.1 * (1 - step / 7), 3.0 / step, 64, 2.0 + step, 0.5, 1.5, norm, step % 2)
        )
        if step % 2 == 0:
            for weights, more in (("model", 0.0), ("ema", 0.03)):
                top1 = 0.1 * min(step, 8 - step) + more
                records.append(Validation(step, step / 2, weights, top1, 2 * top1, 2.0 / step, 100, 1.5))
            elr = tuple(0.01 * (i + 1) * step for i in range(5))
            weight = tuple("conv" in name for name in NAMES)
            records.append(LayerValues(step, NAMES, weight, (*elr, math.inf), (0.5,) * 6, (2.0,) * 5 + (None,)))
    metrics = Metrics(folder, after=after)
    for record in records:
        for sink in (metrics, *sinks):
            sink.add(record)
    return records
