"""The cost of an optimizer in a training with large batches: images a second, and its share of a step.

    python -m bench.training               # a GPU: ResNet-50 and ViT-S/16 at 224 x 224, batches of 4k to 32k, 6 minutes
    python -m bench.training --size cpu    # a CPU: two small models at 32 x 32, batches of 64 and 256, a minute
    python -m bench.training --size quick  # any machine: two tiny models once, to see that it runs

A step is all forward and backward passes of a batch, accumulated, and one update. Optimizers are timed in turns. Images
are random and on the device, so that no loader is involved; the last rows load pictures from files.
"""

import itertools
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.about import about
from bench.clock import Clock, CudaClock
from bench.contestants import ours, torchs
from bench.figures import share
from bench.pictures import make
from bench.rows import command, save, table, write
from fused_lwlr.data import Splits, open_data
from fused_lwlr.training.environment import device_name
from fused_lwlr.training.presets import resolve
from fused_lwlr.training.processes import world_of
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.trainer import Trainer


class Size(NamedTuple):
    """The size of a measurement.

    Attributes:
        models: presets, and options that differ from theirs.
        batches: images of a batch.
        rounds: steps of each optimizer, after one that is not counted.
        options: of all trainings.
    """

    models: dict[str, dict[str, Any]]
    batches: tuple[int, ...]
    rounds: int
    options: dict[str, Any]


def models(resnet: str, vit: str) -> dict[str, dict[str, Any]]:
    """Two presets with models of our own."""
    return {name: {"model": m, "model_args": ()} for name, m in (("resnet50-sgd", resnet), ("vit-s-adamw", vit))}


ON_CPU = {"image_size": 32, "augmentation": "none", "amp": "none", "device": "cpu"}
ON_GPU = {"image_size": 224, "augmentation": "basic", "micro_batch": 256, "amp": "bf16", "device": "cuda"}
SIZES = {
    "gpu": Size({"resnet50-sgd": {"channels_last": True}, "vit-s-adamw": {}}, (4096, 8192, 16384, 32768), 2, ON_GPU),
    "cpu": Size(models("resnet", "vit"), (64, 256), 10, {**ON_CPU, "micro_batch": 64}),
    "quick": Size(models("resnet8x2", "vit1x16"), (8, 16), 1, {**ON_CPU, "micro_batch": 8, "image_size": 16}),
}
OPTIMIZERS = {
    "ours": ("plain", ours), "ours, layer-wise": ("multipliers", ours), "ours, ELR": ("ELR", ours),
    "torch fused": ("plain", torchs), "torch fused, layer-wise": ("multipliers", torchs),
}  # fmt: skip
"""Name -> method and contestant; layer-wise ones have a rate for each tensor."""
LAYER_WISE = ("ours, layer-wise", "torch fused, layer-wise")
HEAD = ("model", "images", "batch", "passes", "optimizer", "images/s", "update ms", "% of the step")


def timed(recipe: Recipe, data: Splits, rounds: int, *, files: bool) -> Iterator[dict[str, Any]]:
    """A row for each optimizer, with images that are on the device, or for two, with images from files."""
    with world_of(recipe.device) as world:
        # each step of an optimizer is one of the training
        trainer = Trainer(replace(recipe, steps=(rounds + 1) * len(LAYER_WISE)) if files else recipe, world, data)
        trainer.prepare()
        clock = CudaClock() if world.device.type == "cuda" else Clock()
        passes: Iterator[Any] = trainer.batches() if files else itertools.repeat(next(trainer.batches()))
        named = list(trainer.model.named_parameters())
        every = {name: OPTIMIZERS[name] for name in (LAYER_WISE if files else OPTIMIZERS)}
        of_rule = {name: of(recipe.optimizer, method) for name, (method, of) in every.items()}
        made = {name: of.build(named, recipe.peak_lr, False) for name, of in of_rule.items()}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for step, (name, optimizer) in enumerate([*made.items()] * (rounds + 1)):
            trainer.optimizer, trainer.step = optimizer, step if files else 0
            _, backward = clock.wall_seconds(lambda: trainer.gradients(passes))
            _, update = clock.wall_seconds(optimizer.step)
            optimizer.zero_grad()
            seconds[name].append((backward + update, update))
        images = f"from files, {trainer.workers} workers" if files else "on the device"
        for name, (_, *found) in seconds.items():  # the first step compiles and allocates
            whole, update = (statistics.median(part) for part in zip(*found, strict=True))
            yield {
                "model": recipe.model, "images": images, "batch": recipe.batch_size, "passes": trainer.accumulation,
                "optimizer": name, "seconds": whole, "update_seconds": update,
                "images_per_second": recipe.batch_size / whole,
            }  # fmt: skip


def measure(size: Size) -> Iterator[dict[str, Any]]:
    """All rows."""
    side, batches = size.options["image_size"], size.batches
    fixed: dict[str, Any] = {"rates": "single", "init": "model", "deterministic": False, **size.options}
    synthetic = open_data("synthetic", image_size=side, augmentation="none", synthetic=(2 * batches[-1], 100, 1000))
    for batch, (preset, change) in itertools.product(batches, size.models.items()):
        recipe = resolve(preset, {**fixed, **change, "workers": 0, "batch_size": batch})
        yield from timed(recipe, synthetic, size.rounds, files=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make(Path(scratch) / "pictures", classes=4, images=batches[0] // 2)
        for preset, change in size.models.items():
            recipe = resolve(preset, {**fixed, **change, "batch_size": batches[0], "data": str(folder)})
            files = open_data(recipe.data, image_size=side, augmentation=recipe.augmentation)
            yield from timed(recipe, files, size.rounds, files=True)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    share = 100 * row["update_seconds"] / row["seconds"]
    return (
        row["model"], row["images"], str(row["batch"]), str(row["passes"]), row["optimizer"],
        f"{row['images_per_second']:,.0f}", f"{1e3 * row['update_seconds']:.2f}", f"{share:.2f}",
    )  # fmt: skip


def main() -> None:
    """The command line."""
    parser = command(__doc__, "--out")
    parser.add_argument("--size", choices=SIZES, default="gpu", help="the models, and the device that they need")
    options = parser.parse_args()
    size = SIZES[options.size]
    device = torch.device(size.options["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        print("Not measured: there is no GPU here. --size cpu measures two small models.")
        return
    settings = about(device_name(device), options.size == "quick") | {"command": shlex.join(sys.orig_argv)}
    rows = []
    for row in measure(size):
        write(row)
        rows.append(row)
    path = options.out / f"training-{'-'.join(settings['device'].lower().split())}.json"
    save(path, {"about": settings, "rows": rows})
    lines = ["# Training", "", *(f"- {key}: {value}" for key, value in settings.items()), ""]
    path.with_suffix(".md").write_text("\n".join((*lines, *table(HEAD, map(cells, rows)), "")), encoding="utf-8")
    share(rows, path.with_suffix(".png"))
    print(f"Wrote {path}, its report and its figure.")


if __name__ == "__main__":
    main()
