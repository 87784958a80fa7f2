"""A preview of a recipe without a training: steps, memory, learning rates, and throughput."""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fused_lwlr import LayerRates
from fused_lwlr.data import Batch, Splits, Stream, Text, bytes_ahead, loader_throughput
from fused_lwlr.methods.lwlr.init import kinds_of
from fused_lwlr.shards import local
from fused_lwlr.training.processes import world_of
from fused_lwlr.training.recipe import DEFAULTS, Recipe, without_effect
from fused_lwlr.training.recipe_rules import fields_of_choice
from fused_lwlr.training.setup import load_data, split_by_decay
from fused_lwlr.training.trainer import Trainer

PROBE = 4
"""The number of examples in a micro-batch that is measured on a CPU, because a large one takes minutes. Images smaller
than `LARGE` pixels have a larger number, with the same number of pixels in the micro-batch."""
LARGE = 224
GIB = 2**30
SHARED = "/dev/shm"


def dry_run(recipe: Recipe, console: Console) -> None:
    """Take one step of a training, discard it, and print tables about the full training, or raise its errors.

    Rates are calibrated on one minibatch, GradInit is left out, and no file is written.
    """
    with world_of(recipe.device) as world:
        data = load_data(recipe)
        trainer = Trainer(recipe, world, data)
        probe = _probe(trainer)
        if world.is_rank0:
            console.print(_steps(trainer))
        small = Trainer(_short(recipe, probe * world.size, probe), world, data)
        small.prepare()
        batch = next(small.batches())
        with saved_bytes(small.model) as saved:
            small.gradients(repeat(batch))
        small.update()
        tables = (
            _memory(trainer, small, saved[0]),
            rates_by_kind(recipe, small.model, small.rates),
            _waiting(trainer),
            _throughput(trainer, small, batch),  # on all ranks: a step waits for all gradients
        )
        if world.is_rank0:
            for table in tables:
                console.print(table)


def _probe(trainer: Trainer) -> int:
    """Examples of the micro-batch that is measured."""
    if trainer.world.device.type == "cuda":
        return trainer.micro_batch
    side = trainer.data.image_size if isinstance(trainer.data, Splits) else LARGE
    # an even number, which Mixup and CutMix need
    return min(trainer.micro_batch, max(PROBE, PROBE * LARGE**2 // side**2 // 2 * 2))


def _short(recipe: Recipe, batch_size: int, micro_batch: int) -> Recipe:
    """The recipe for one step of small micro-batches, without GradInit, and with rates that one minibatch gives."""
    fields = recipe.to_dict() | {
        "steps": 1, "warmup_epochs": 0.0, "warmup_bound": None, "batch_size": batch_size, "micro_batch": micro_batch,
        "workers": 0, "prefetch": DEFAULTS["prefetch"], "compile": False,
        "lr_scaling": "none", "lr": recipe.peak_lr, "calibration_steps": 1,
        "init": "model" if recipe.init == "gradinit" else recipe.init,
    }  # fmt: skip
    for name in without_effect(fields):
        del fields[name]
    return Recipe.from_dict(fields)


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Counts the bytes that forward passes keep for backward passes, without parameters, and shared memory once."""
    own = {local(param).untyped_storage().data_ptr() for param in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    total = [0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total[0] = sum(seen.values())


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(local(t).numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _steps(trainer: Trainer) -> Table:
    recipe, data, world = trainer.recipe, trainer.data, trainer.world
    left = len(data.train) % recipe.batch_size
    rows = {
        "model": f"{recipe.model}, {sum(p.numel() for p in trainer.model.parameters()):,} parameters",
        "data": f"{data.name}: {len(data.train):,} {data.example} to train, {len(data.val):,} to test, " + _size(data),
        "a step": f"{recipe.batch_size} {data.example}: {_count(world.size, 'process', 'processes')}, "
        f"{_count(trainer.accumulation, 'pass', 'passes')} in each, of {trainer.micro_batch} {data.example}",
        "an epoch": f"{trainer.steps_per_epoch:,} steps" + (f"; {left} {data.example} are left over" if left else ""),
        "training": f"{trainer.total:,} steps, {trainer.warmup:,} of them warm-up, then a {recipe.schedule} to "
        f"{recipe.min_lr:g}",
        "learning rate": f"{recipe.peak_lr:.4g} at its peak"
        + (f" ({recipe.lr:g} at {recipe.lr_batch_size}, {recipe.lr_scaling})" if recipe.lr_scaling != "none" else ""),
        "optimizer": f"{_rule(recipe)}, scaling {recipe.scaling}, rates {recipe.rates}",
        "weight decay": _decay(recipe, trainer.model),
        "device": f"{world.device}, mixed precision {recipe.amp}",
    }
    return _table("What is trained", ("", ""), list(rows.items()))


def _rule(recipe: Recipe) -> str:
    """The optimizer with the options that act on it and have a value."""
    options = {name: getattr(recipe, name) for name in fields_of_choice("optimizer", recipe.optimizer)}
    return ", ".join([recipe.optimizer, *(f"{name} {value}" for name, value in options.items() if value is not None)])


def _decay(recipe: Recipe, model: nn.Module) -> str:
    """The weight decay, and the number of parameters that have it."""
    decayed, spared = split_by_decay(recipe, model)
    numel = sum(param.numel() for _, param in decayed)
    return f"{recipe.weight_decay:g} of {len(decayed)} of {len(decayed) + len(spared)} tensors, {numel:,} parameters"


def _size(data: Splits | Text) -> str:
    if isinstance(data, Text):
        return f"of {data.context} tokens; {len(data.classes)} different tokens"
    val_source = f"; images to test are from {data.val_source}" if data.val_source else ""
    return f"{len(data.classes)} classes, {data.image_size} x {data.image_size} pixels{val_source}"


def _memory(trainer: Trainer, small: Trainer, saved: int) -> Table:
    """The memory of a process, from the bytes that a small micro-batch keeps for its backward pass."""
    params, state = list(small.model.parameters()), small.optimizer.state.values()
    micro, measured, example = trainer.micro_batch, small.micro_batch, trainer.data.example
    # gradients are sharded in the last micro-batch of a step, and whole before it
    whole = trainer.recipe.fsdp and trainer.accumulation > 1
    sizes = {
        "weights": _bytes(params),
        "gradients": sum(p.numel() * p.element_size() for p in params) if whole else _bytes(params),
        "state of the optimizer": _bytes(t for s in state for name, t in s.items() if name != "ema"),
        "average of the weights": _bytes(s["ema"] for s in state if "ema" in s),
        "buffers": _bytes(small.model.buffers()),
        f"kept for the backward pass, {micro} {example}": int(saved / measured * micro),
    }
    rows = [(name, f"{size / GIB:.3f}") for name, size in sizes.items()]
    rows.append(("together; what layers need for a moment comes on top", f"{sum(sizes.values()) / GIB:.3f}"))
    if trainer.world.device.type == "cuda":
        highest = torch.cuda.max_memory_allocated(trainer.world.device)
        rows.append(("highest so far on this GPU", f"{highest / GIB:.3f}"))
    note = "" if micro == measured else f" (backward: from {measured} {example})"
    return _table(f"Memory of a process{note}", ("", "GiB"), rows)


def _waiting(trainer: Trainer) -> Table:
    """The peak memory of batches loaded ahead; batches of the training stay in memory during validation."""
    if isinstance(trainer.data.train, Stream):
        return _table("Batches loaded ahead: as many as the loader has", ("", "GiB"), [])
    recipe, world, data = trainer.recipe, trainer.world, trainer.data
    loaders = f"{world.local_size} x {_count(trainer.workers, 'worker', 'workers')}, {recipe.prefetch} passes each"
    parts = ("training", data.train, trainer.micro_batch), ("validation", data.val, trainer.val_batch)
    each = {}
    for kind, part, size in parts:
        ahead = bytes_ahead(part, batch_size=size, workers=trainer.workers, prefetch=recipe.prefetch)
        each[f"{kind}, {loaders} of {size} {data.example}"] = world.local_size * ahead
    each["together"] = sum(each.values())
    rows = [(name, f"{size / GIB:.3f}") for name, size in each.items()]
    if Path(SHARED).is_dir():
        rows.append((f"free in {SHARED}, where they are", f"{shutil.disk_usage(SHARED).free / GIB:.3f}"))
    return _table("Batches loaded ahead on this machine, at most", ("", "GiB"), rows)


def rates_by_kind(recipe: Recipe, model: nn.Module, rates: LayerRates | None) -> Table:
    """Peak learning rates of the layers of each kind."""
    peak, kinds = recipe.peak_lr, kinds_of(model)
    layers: list[tuple[str, int, float]]
    if rates is None:
        layers = [(kinds[name] or "other", param.numel(), 1.0) for name, param in model.named_parameters()]
    else:
        layers = [(layer.kind, layer.numel, layer.eta) for layer in rates.layers]
    rows = []
    for kind, group in groupby(sorted(layers), key=lambda layer: layer[0]):
        members = list(group)
        numel, etas = sum(m for _, m, _ in members), [eta for _, _, eta in members]
        mean = sum(m * eta for _, m, eta in members) / max(numel, 1)
        shown = [f"{peak * eta:.3g}" for eta in (min(etas), mean, max(etas))]
        rows.append((kind, f"{len(members)}", f"{numel:,}", *shown))
    title = "Learning rates at the peak" + (", calibrated on one minibatch" if recipe.rates == "layerwise" else "")
    return _table(title, ("layers", "number", "parameters", "lowest", "mean", "highest"), rows)


def _throughput(trainer: Trainer, small: Trainer, batch: Batch) -> Table:
    """The throughput of the loader without steps, and of steps without the loader."""
    data, workers, probe = trainer.data, trainer.workers, small.micro_batch
    loading = loader_throughput(data.train, batch_size=probe, workers=workers, batches=max(4, 64 // probe))
    rounds = 3
    _wait(small)
    start = time.perf_counter()
    for _ in range(rounds):
        small.gradients(repeat(batch))
        small.update()
    _wait(small)
    stepping = rounds * probe / (time.perf_counter() - start)
    # minutes for each step; the loader works during steps, so the slower of both sets the pace
    minutes = trainer.recipe.batch_size / trainer.world.size / min(loading, stepping) / 60
    hours, left = divmod(round(trainer.total * minutes), 60)
    epoch = trainer.steps_per_epoch
    rows = [
        (f"loader alone, {workers} workers", f"{loading:,.1f}"),
        (f"steps alone, passes of {probe} {data.example}", f"{stepping:,.1f}"),
        (f"an epoch at the lower of these, {epoch:,} steps", f"{epoch * minutes:,.1f} min"),
        (f"{trainer.total:,} steps at the lower of these, without validation", f"{hours} h {left:02} min"),
    ]
    return _table(f"{data.example.capitalize()} a second of a process", ("", f"{data.example}/s"), rows)


def _wait(trainer: Trainer) -> None:
    if trainer.world.device.type == "cuda":
        torch.cuda.synchronize(trainer.world.device)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or not any(columns) else "right")
    for row in rows:
        table.add_row(*row)
    return table
