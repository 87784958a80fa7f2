"""Step time and GPU memory with an optimizer on the GPU, on the CPU after backward, and on the CPU during backward.

    python -m bench.offload                # a GPU: a Transformer of 24 blocks and width 1024
    python -m bench.offload --rehearsal    # the CPU: a small one, no measurement

AdamW in float32 with LAMB. Contestants are timed one after the other, each on its own model. A step is forward,
backward and update, until the device is done; the time is the median of ten. Memory is the peak of the GPU's allocator.
"""

import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fused_lwlr
from bench.clock import Clock, CudaClock
from bench.rows import command, write
from fused_lwlr.models.gpt import GPT

MIB = 1 << 20
STEPS = 10


def after_backward(model: nn.Module) -> Callable[[], None]:
    """Returns a step that copies all gradients, steps on the CPU, and copies all weights back."""
    params: list[Any] = list(model.parameters())
    pinned = params[0].is_cuda
    copies: list[Any] = [nn.Parameter(torch.empty_like(p, device="cpu", pin_memory=pinned)) for p in params]
    grads = [torch.empty_like(copy, pin_memory=pinned) for copy in copies]
    for copy, param in zip(copies, params, strict=True):
        copy.data.copy_(param.detach())
    optimizer = adamw([(name, copy) for (name, _), copy in zip(model.named_parameters(), copies, strict=True)])

    @torch.no_grad()
    def step() -> None:
        for param, copy, grad in zip(params, copies, grads, strict=True):
            copy.grad = grad.copy_(param.grad, non_blocking=True)
            param.grad = None
        if pinned:
            torch.cuda.synchronize()
        optimizer.step()
        torch._foreach_copy_(params, copies, non_blocking=True)

    return step


def adamw(named: Any) -> fused_lwlr.AdamW:
    """Returns the optimizer of all contestants."""
    return fused_lwlr.AdamW(named, lr=1e-4, scaling=fused_lwlr.LAMB())


def step_of(name: str, model: nn.Module) -> Callable[[], None]:
    """Returns the step of a contestant."""
    if name == "CPU, after backward":
        return after_backward(model)
    optimizer = adamw(model.named_parameters())
    if name == "offload_to_cpu":
        fused_lwlr.offload_to_cpu(model, optimizer)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, clock: Clock, *, rehearsal: bool) -> None:
    """Writes the row of a contestant."""
    layers, width, batch, tokens = (2, 32, 2, 8) if rehearsal else (24, 1024, 8, 512)

    def steps() -> tuple[list[float], int]:
        torch.manual_seed(0)
        with clock.device:
            model = GPT(layers, post=False, context=tokens, classes=256, width=width, heads=width // 16)
            x = torch.randint(256, (batch, tokens))
        update = step_of(name, model)

        def step() -> None:
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            update()

        size = sum(param.numel() for param in model.parameters())
        return [clock.wall_seconds(step)[1] for _ in range(3 + STEPS)], size

    # the memory of the model counts too
    (seconds, size), peak = clock.peak_bytes(steps)
    ms = statistics.median(seconds[3:]) * 1e3
    write({"optimizer": name, "parameters": size, "ms": ms, "peak MiB": round(peak / MIB)})


def main() -> None:
    """Measures all contestants."""
    rehearsal = command(__doc__, "--rehearsal").parse_args().rehearsal
    if not (rehearsal or torch.cuda.is_available()):
        print("Not measured: there is no GPU here. --rehearsal runs a small model on the CPU.")
        return
    clock = Clock() if rehearsal else CudaClock()
    for name in ("on the GPU", "CPU, after backward", "offload_to_cpu"):
        measure(name, clock, rehearsal=rehearsal)
        # memory of the last contestant must not count for the next one
        gc.collect()


if __name__ == "__main__":
    main()
