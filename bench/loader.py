"""Images per second that one core loads: decoded, augmented, and sent to the training process.

    python -m bench.loader                     # photographs of scikit-learn, 520 x 350 pixels on average
    python -m bench.loader --data imagenet/

The time is the worker's CPU time, so that other work on the machine does not count. The training process's own time
is a second number; it includes normalization, done by the GPU if one exists. Writes `loader.json`.
"""

import os
import tempfile
import time
from pathlib import Path

import torch

from bench import rows
from bench.about import about
from bench.pictures import make
from fused_lwlr.data import MicroBatchSampler, open_data, train_batches
from fused_lwlr.integrations.extras import import_beside_torchvision


def measure(data: str, augmentation: str, *, size: int, batch: int, batches: int) -> tuple[float, float, int]:
    """Returns images for each second of the worker, and of this process; and bytes of a batch between them."""
    images = open_data(data, image_size=size, augmentation=augmentation).train
    order = MicroBatchSampler(len(images), seed=0, batch_size=batch, micro_batch=batch, steps=batches)
    sent = images[next(iter(order))].inputs
    here, there = time.process_time(), sum(os.times()[2:4])
    for _ in train_batches(images, order, device=torch.device("cpu"), workers=1):
        pass
    here, there = time.process_time() - here, sum(os.times()[2:4]) - there
    count = batch * batches
    return count / there, count / here, sent.numel() * sent.element_size()


def main() -> None:
    """The command line."""
    parser = rows.command(__doc__, "--out")
    parser.add_argument("--data", help="a folder as of fused-lwlr train; photographs of scikit-learn if not given")
    given = parser.parse_args()
    torch.set_num_threads(1)
    import_beside_torchvision("timm")
    measured = []
    with tempfile.TemporaryDirectory() as scratch:
        data = given.data or str(make(Path(scratch) / "pictures", classes=2, images=256))
        for augmentation in ("basic", "strong"):
            for _ in range(3):
                try:
                    worker, rest, size = measure(data, augmentation, size=224, batch=64, batches=16)
                except (OSError, ValueError) as error:
                    parser.error(f"--data: {error}")
                row = {"augmentation": augmentation, "worker": worker, "training": rest, "batch_bytes": size}
                rows.write(row)
                measured.append(row)
    rows.save(given.out / "loader.json", {"about": about(None, quick=False), "data": given.data, "rows": measured})


if __name__ == "__main__":
    main()
