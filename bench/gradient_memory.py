"""Memory of gradients, with steps after backward and during it: a Transformer of 12 blocks, on the CPU.

    python -m bench.gradient_memory

Every line comes from a separate process, which takes three steps of AdamW. `.grad`: the most bytes of gradients that
parameters held at once, checked whenever a gradient was made. Resident: the peak memory of the process.
"""

import resource
import subprocess
import sys

import torch
from torch import nn

import fused_lwlr
from fused_lwlr.models.gpt import GPT

MIB = 1 << 20
SIZES = (0, 64 * MIB, 16 * MIB, 1)
"""Bytes of a bucket; 0 for steps after backward."""


def measure(max_bytes: int) -> str:
    """Returns a line of the table."""
    torch.manual_seed(0)
    model = GPT(12, post=False, context=64, classes=256, width=768, heads=12)
    optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=1e-4, scaling=fused_lwlr.ClipByLayer(1.0))
    params = list(model.parameters())
    largest = 0

    def look(param: nn.Parameter) -> None:
        nonlocal largest
        largest = max(largest, _bytes([p.grad for p in params if p.grad is not None]))

    for param in params:
        param.register_post_accumulate_grad_hook(look)
    if max_bytes:
        fused_lwlr.step_in_backward(model, optimizer, max_bytes=max_bytes)
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(256, (1, 64))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
    name = f"in backward, `max_bytes={max_bytes:,}`" if max_bytes else "after backward"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    total, one = _bytes(params), max(_bytes([param]) for param in params)
    return f"| {name} | {largest / MIB:.0f} | {resident / MIB:.0f} | {total / MIB:.0f} | {one / MIB:.0f} |"


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    """Prints the table."""
    print("| step | `.grad`, MiB | resident, MiB | parameters, MiB | largest parameter, MiB |")
    print("|---|---|---|---|---|")
    for max_bytes in SIZES:
        command = [sys.executable, "-m", "bench.gradient_memory", str(max_bytes)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    print(measure(int(sys.argv[1]))) if len(sys.argv) > 1 else main()
