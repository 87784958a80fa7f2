"""Images for training with large batches, each random bit of which follows from seed, epoch and image."""

from fused_lwlr.recipe.data.loader import Batch, loader_throughput, train_batches, val_batches
from fused_lwlr.recipe.data.mixing import Mixing, mixed_cross_entropy
from fused_lwlr.recipe.data.sampler import MicroBatch, MicroBatchSampler
from fused_lwlr.recipe.data.sources import Images
from fused_lwlr.recipe.data.splits import AUGMENTATIONS, CORRUPT, Splits, open_data

__all__ = [
    "AUGMENTATIONS",
    "CORRUPT",
    "Batch",
    "Images",
    "MicroBatch",
    "MicroBatchSampler",
    "Mixing",
    "Splits",
    "loader_throughput",
    "mixed_cross_entropy",
    "open_data",
    "train_batches",
    "val_batches",
]
