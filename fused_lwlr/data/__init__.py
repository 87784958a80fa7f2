"""Images for training: folders and other sources, augmentation, order, and the loader that feeds the device."""

from fused_lwlr.data.loader import Batch, bytes_ahead, loader_throughput, train_batches, val_batches
from fused_lwlr.data.mixing import Mixing, mixed_binary_cross_entropy, mixed_cross_entropy
from fused_lwlr.data.sampler import MicroBatch, MicroBatchSampler
from fused_lwlr.data.sources import Images
from fused_lwlr.data.splits import AUGMENTATIONS, CORRUPT, Splits, open_data
from fused_lwlr.data.streams import Part, Stream

__all__ = [
    "AUGMENTATIONS",
    "CORRUPT",
    "Batch",
    "Images",
    "MicroBatch",
    "MicroBatchSampler",
    "Mixing",
    "Part",
    "Splits",
    "Stream",
    "bytes_ahead",
    "loader_throughput",
    "mixed_binary_cross_entropy",
    "mixed_cross_entropy",
    "open_data",
    "train_batches",
    "val_batches",
]
