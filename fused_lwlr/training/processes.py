"""One process or many: the present process, a model spread over processes, and sums over all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fused_lwlr.training.recipe import Recipe, is_in_memory


@dataclass(frozen=True)
class World:
    """The processes of a training; this process is number `rank`.

    Attributes:
        local_size: number of processes on this machine.
    """

    rank: int
    size: int
    device: torch.device
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and talks to the user."""
        return self.rank == 0

    def micro_batch(self, recipe: Recipe) -> int:
        """Images in one pass of one process. The batch must divide into equal passes of equal processes."""
        share, rest = divmod(recipe.batch_size, self.size)
        if rest or share == 0:
            fix = max(1, round(recipe.batch_size / self.size)) * self.size
            raise ValueError(
                f"batch_size {recipe.batch_size} does not divide among {self.size} processes: take {fix}, for example"
            )
        micro = min(recipe.micro_batch or share, share)
        if share % micro:
            fits = max(size for size in range(1, micro) if share % size == 0)
            raise ValueError(
                f"micro_batch {micro} does not divide the {share} examples that each process has of a batch: "
                f"take {fits}"
            )
        return micro

    def accumulation(self, recipe: Recipe) -> int:
        """Passes of each process in one step."""
        return recipe.batch_size // (self.size * self.micro_batch(recipe))

    def workers(self, recipe: Recipe) -> int:
        """Processes that load data for this one: as asked for, or its share of cores.

        0 for data in memory and text, and with `loader`, whose data may be in memory or come from its own processes.
        """
        if recipe.workers is not None:
            return recipe.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        alone = is_in_memory(recipe.data) or recipe.is_text or recipe.loader is not None
        return 0 if alone else min(8, max(1, cores // self.local_size))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, model: nn.Module, *, params: bool = False) -> None:
        """Gives every process the buffers of the first, which depend on each process's images, or also all weights."""
        if self.size > 1:
            for tensor in [*model.buffers(), *(model.parameters() if params else ())]:
                dist.broadcast(tensor.data, src=0)


@contextmanager
def world_of(device: str) -> Iterator[World]:
    """The processes of the existing group, or of a new group if `torchrun` started them, or this process alone."""
    existing = dist.is_initialized()
    if not existing and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(0, 1, pick_device(device))
        return
    place = pick_device(device, gpu=None if existing else int(os.environ.get("LOCAL_RANK", "0")))
    if not existing:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        size = dist.get_world_size()
        # without torchrun, all processes are on this machine
        yield World(dist.get_rank(), size, place, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    finally:
        if not existing:
            dist.destroy_process_group()


def spread(model: nn.Module, recipe: Recipe, world: World) -> nn.Module:
    """Returns a callable for the model whose gradients are averages over all processes.

    This is the model itself for one process, `DistributedDataParallel` around it, or with `fsdp` the model itself,
    sharded in place, each block of a list of blocks separately.
    """
    if recipe.fsdp:
        from torch.distributed.fsdp import fully_shard  # takes a while

        mesh = init_device_mesh(world.device.type, (world.size,))
        for block in list(blocks(model)):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    if world.size == 1:
        return model
    # gradients are no views of buckets: their addresses differ between the first step and later ones, which changes the
    # last bits of norms, so that a resumed run would differ
    return DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with parameters in a list of modules."""
    for child in module.children():
        inside = isinstance(module, (nn.Sequential, nn.ModuleList))
        if isinstance(child, (nn.Sequential, nn.ModuleList)) or not inside:
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def unsynchronized(model: Any, wanted: bool) -> Any:
    """Keeps gradients of a pass in this process, for the passes of a step before its last one."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(not wanted)
        return nullcontext()
    return model.no_sync() if wanted and hasattr(model, "no_sync") else nullcontext()


def pick_device(name: str, *, gpu: int | None = None) -> torch.device:
    """Return the device `name`, which must be usable; "auto" is the GPU, or the CPU on a machine without one.

    Args:
        gpu: the number of the GPU that this process uses, if the device is a GPU; it becomes the current one.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(name)
        if place.type == "cuda" and gpu is not None:
            place = torch.device("cuda", gpu)
            # set first: an allocation on "cuda" makes a context on GPU 0, which takes memory there
            torch.cuda.set_device(place)
        torch.empty(0, device=place).cpu()  # meta has no values
    except (RuntimeError, AssertionError) as error:
        of_process = "" if gpu is None else f" by process {gpu} of this machine"
        reason = str(error).splitlines()[0].partition(". ")[0]  # torch lists all of its dispatch keys after it
        raise ValueError(f"device={name!r} cannot be used{of_process} here: {reason}") from error
    return place
