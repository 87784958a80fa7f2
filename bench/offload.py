"""Step time and GPU memory with an optimizer on the GPU, on the CPU after backward, and on the CPU during backward.

    python -m bench.offload                # a GPU: a Transformer of 24 blocks and width 1024
    python -m bench.offload --rehearsal    # the CPU: a small one, no measurement

AdamW in float32 with LAMB. Contestants are timed one after the other, each on its own model. A step is forward,
backward and update, until the device is done; the time is the median of ten. Memory is the peak of the GPU's allocator.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import fused_lwlr
from bench.rows import write
from fused_lwlr.models.gpt import GPT

MIB = 1 << 20
STEPS = 10


def on_the_gpu(model: nn.Module) -> Callable[[], None]:
    """Returns a step of an optimizer whose state is where the model is."""
    optimizer = adamw(model.named_parameters())
    return lambda: take(optimizer)


def after_backward(model: nn.Module) -> Callable[[], None]:
    """Returns a step that copies all gradients, steps on the CPU, and copies all weights back."""
    pinned = next(model.parameters()).is_cuda
    copies = {name: nn.Parameter(pin(p.detach().cpu(), pinned)) for name, p in model.named_parameters()}
    grads = {name: pin(torch.empty_like(copy.detach()), pinned) for name, copy in copies.items()}
    optimizer = adamw(copies.items())

    @torch.no_grad()
    def step() -> None:
        for name, param in model.named_parameters():
            copies[name].grad = grads[name].copy_(param.grad, non_blocking=True)  # type: ignore[arg-type]
            param.grad = None
        wait(model)
        take(optimizer)
        for name, param in model.named_parameters():
            param.copy_(copies[name], non_blocking=True)

    return step


def beside_backward(model: nn.Module) -> Callable[[], None]:
    """Returns the step of `offload_to_cpu`."""
    optimizer = adamw(model.named_parameters())
    fused_lwlr.offload_to_cpu(model, optimizer)
    return lambda: take(optimizer)


CONTESTANTS = {"on the GPU": on_the_gpu, "CPU, after backward": after_backward, "offload_to_cpu": beside_backward}


def adamw(named: object) -> fused_lwlr.AdamW:
    """Returns the optimizer of all contestants."""
    return fused_lwlr.AdamW(named, lr=1e-4, scaling=fused_lwlr.LAMB())  # type: ignore[arg-type]


def take(optimizer: fused_lwlr.AdamW) -> None:
    """Takes a step and frees gradients."""
    optimizer.step()
    optimizer.zero_grad()


def pin(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    """Returns a tensor in pinned memory, where there is a GPU."""
    return tensor.pin_memory() if pinned else tensor


def wait(model: nn.Module) -> None:
    """Waits for the device of a model."""
    torch.get_device_module(next(model.parameters()).device).synchronize()


def measure(name: str, *, rehearsal: bool) -> None:
    """Writes the row of a contestant."""
    device = torch.device("cpu" if rehearsal else "cuda")
    layers, width, batch, tokens = (2, 32, 2, 8) if rehearsal else (24, 1024, 8, 512)
    torch.manual_seed(0)
    with device:
        model = GPT(layers, post=False, context=tokens, classes=256, width=width, heads=width // 16)
        x = torch.randint(256, (batch, tokens))
    step = CONTESTANTS[name](model)
    if not rehearsal:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(3 + STEPS):
        wait(model)
        begin = time.perf_counter()
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        step()
        wait(model)
        seconds.append(time.perf_counter() - begin)
    peak = None if rehearsal else round(torch.cuda.max_memory_allocated() / MIB)
    size = sum(param.numel() for param in model.parameters())
    write({"optimizer": name, "parameters": size, "ms": statistics.median(seconds[3:]) * 1e3, "peak MiB": peak})


def main() -> None:
    """Measures all contestants."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearsal", action="store_true", help="on the CPU with a small model: no measurement")
    options = parser.parse_args()
    for name in CONTESTANTS:
        measure(name, rehearsal=options.rehearsal)
        # memory of the last contestant must not count for the next one
        gc.collect()


if __name__ == "__main__":
    main()
