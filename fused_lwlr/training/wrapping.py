"""How a model is wrapped for training: dtypes, synchronized statistics, recomputed activations, several ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe


def check_wrapping(model: nn.Module, recipe: Recipe, world: World) -> None:
    """Raise ValueError for options that the model, the device or the number of ranks excludes."""
    if recipe.fsdp and world.size == 1:
        raise ValueError("--fsdp shards a model over processes, but there is only one: start several with torchrun")
    if recipe.compile_mode == "reduce-overhead" and world.device.type != "cuda":
        raise ValueError(
            f"--compile-mode reduce-overhead records CUDA graphs, but the device is {world.device}: leave it out"
        )
    norms = any(isinstance(module, _BatchNorm) for module in model.modules())
    if recipe.sync_bn:
        if world.size == 1:
            raise ValueError("--sync-bn is for several processes, but there is only one: start several with torchrun")
        if world.device.type != "cuda":
            raise ValueError(f"--sync-bn needs GPUs, but the device is {world.device}: leave it out")
        if not norms:
            raise ValueError(f"--sync-bn has no effect: {recipe.model} has no batch normalization")
    if recipe.grad_checkpointing:
        if not _with_parts(model):
            raise ValueError(f"--grad-checkpointing has no effect: {recipe.model} has no list of blocks")
        if recipe.compile and norms:
            raise ValueError(
                f"--grad-checkpointing and --compile exclude each other for models with batch normalization, such as "
                f"{recipe.model}: give one of them"
            )


def wrap(model: nn.Module, recipe: Recipe, world: World) -> nn.Module:
    """Returns a callable for a model, as in `distribute`, and changes the model in place as the recipe says.

    Names of parameters and buffers do not change.

    Args:
        model: with the weights that training starts from, on its device.
    """
    if recipe.master_weights:
        for module in model.modules():
            # autocast would convert the same weights in every forward pass
            if isinstance(module, (nn.Linear, _ConvNd)):
                for name, param in module.named_parameters(recurse=False):
                    if name == "weight":
                        param.data = param.data.to(torch.bfloat16)
    if recipe.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if recipe.grad_checkpointing:
        for block in _with_parts(model):
            recompute(block)
    return distribute(model, recipe, world)


def distribute(model: nn.Module, recipe: Recipe, world: World) -> nn.Module:
    """Returns a callable for the model whose gradients are averages over all ranks.

    This is the model itself for one rank, `DistributedDataParallel` around it, or with `fsdp` the model itself, sharded
    in place, each block of a list of blocks separately.
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
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    return _with_final_buckets(DistributedDataParallel(model, device_ids=device_ids))


def _with_final_buckets(model: DistributedDataParallel) -> DistributedDataParallel:
    """Lets DDP make its final buckets, in the order in which the gradients of its first backward pass come.

    Sums over three or more ranks depend on the place in a bucket. A backward pass of zeros comes first here, since the
    first step of a resumed run would have other buckets than this step of a run without a stop.
    """
    inner, params = model.module, [param for param in model.parameters() if param.requires_grad]
    # a module may have its own forward, which recomputes activations
    own = {name: value for name, value in vars(inner).items() if name == "forward"}
    inner.forward = lambda: torch.stack([0 * param.sum().float() for param in params]).sum()
    model().backward()
    del inner.forward
    vars(inner).update(own)
    model.zero_grad(set_to_none=True)
    return model


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with parameters in a list of modules."""
    for child in module.children():
        inside = isinstance(module, (nn.Sequential, nn.ModuleList))
        if isinstance(child, (nn.Sequential, nn.ModuleList)) or not inside:
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def unsynchronized(model: Any, wanted: bool) -> Any:
    """Keeps gradients of a micro-batch in this rank, for the micro-batches of a step before its last one."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(not wanted)
        return nullcontext()
    return model.no_sync() if wanted and hasattr(model, "no_sync") else nullcontext()


def _with_parts(model: nn.Module) -> list[nn.Module]:
    """Blocks with several modules; a single module has no activations but its inputs."""
    return [block for block in blocks(model) if any(True for _ in block.children())]


def recompute(block: nn.Module) -> None:
    """Let a module keep only its inputs for the backward pass, which computes its activations again."""
    forward = block.forward
    norms = [module for module in block.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    contexts: dict[str, Any] = {"context_fn": lambda: (nullcontext(), _kept_statistics(norms))} if norms else {}

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    block.forward = recomputed


@contextmanager
def _kept_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Within the context, passes do not change running statistics, which the first pass changed already."""
    own = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    for norm, name, buffer in own:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in own:
            setattr(norm, name, buffer)
