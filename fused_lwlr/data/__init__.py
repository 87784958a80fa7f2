"""Images and text for training: where they are from, augmentation, order, and the loader that feeds the device."""

from fused_lwlr.data.loader import Batch, bytes_ahead, loader_throughput, train_batches, val_batches
from fused_lwlr.data.mixing import Mixing
from fused_lwlr.data.sampler import MicroBatch, MicroBatchSampler
from fused_lwlr.data.sources import Split, Splits
from fused_lwlr.data.splits import open_data
from fused_lwlr.data.streams import Part, Stream
from fused_lwlr.data.text import Text, open_text

__all__ = [
    "Batch",
    "MicroBatch",
    "MicroBatchSampler",
    "Mixing",
    "Part",
    "Split",
    "Splits",
    "Stream",
    "Text",
    "bytes_ahead",
    "loader_throughput",
    "open_data",
    "open_text",
    "train_batches",
    "val_batches",
]
