"""One rank or many: this rank, its device, and sums over all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist


@dataclass(frozen=True)
class World:
    """The ranks of a training, each a process; this one is `rank`.

    Attributes:
        local_size: number of ranks on this machine.
    """

    rank: int
    size: int
    device: torch.device
    local_size: int = 1

    @property
    def is_rank0(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, model: nn.Module, *, params: bool = False) -> None:
        """Gives every rank the buffers of rank 0, which depend on each rank's images, or also all weights."""
        if self.size > 1:
            for tensor in [*model.buffers(), *(model.parameters() if params else ())]:
                dist.broadcast(tensor.data, src=0)


@contextmanager
def world_of(device: str) -> Iterator[World]:
    """The ranks of the existing group, or of a new group if `torchrun` started them, or this process alone."""
    existing = dist.is_initialized()
    if not existing and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(0, 1, pick_device(device))
        return
    place = pick_device(device, gpu=None if existing else int(os.environ.get("LOCAL_RANK", "0")))
    if not existing:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        size = dist.get_world_size()
        # without torchrun, all ranks are on this machine
        yield World(dist.get_rank(), size, place, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    finally:
        if not existing:
            dist.destroy_process_group()


def pick_device(name: str, *, gpu: int | None = None) -> torch.device:
    """Return the device `name`, which must be usable; "auto" is the GPU, or the CPU on a machine without one.

    Args:
        gpu: the number of the GPU that this process uses, if the device is a GPU; it becomes the current one.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(name)
        if place.type == "cpu" and place.index:
            raise RuntimeError("all cores together are one device, cpu")
        if place.type == "cuda" and gpu is not None:
            if place.index is not None:
                raise RuntimeError("each process of torchrun takes its own GPU, so give cuda")
            place = torch.device("cuda", gpu)
            # set first: an allocation on "cuda" makes a context on GPU 0, which takes memory there
            torch.cuda.set_device(place)
        torch.empty(0, device=place).cpu()  # meta has no values
    except (RuntimeError, AssertionError, ImportError) as error:  # ImportError: torch has no module for it
        of_process = "" if gpu is None else f" by process {gpu} of this machine"
        reason = str(error).splitlines()[0].partition(". ")[0]  # torch lists all of its dispatch keys after it
        raise ValueError(f"device={name!r} cannot be used{of_process} here: {reason}") from error
    return place
