"""Memory of gradients, with steps after backward and during it: a Transformer of 12 blocks, on the CPU.

    python -m bench.gradient_memory [--out FOLDER]

Every row comes from a separate process, which takes three steps of AdamW. Gradients: the most bytes of gradients that
parameters held at once, checked whenever a gradient was made. Resident: the peak memory of the process. Writes
`bench/results/gradient-memory.json` and its figure.
"""

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

import torch
from torch import nn

import fused_lwlr
from bench import rows
from bench.figures import memory
from fused_lwlr.models.gpt import GPT

MIB = 1 << 20
SIZES = (0, 64 * MIB, 16 * MIB, 1)
"""Bytes of a bucket; 0 for steps after backward."""


def measure(max_bytes: int) -> dict[str, Any]:
    """Returns a row: the name of the step, and bytes."""
    torch.manual_seed(0)
    model = GPT(12, post=False, context=64, classes=256, width=768, heads=12)
    optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=1e-4, scaling=fused_lwlr.ClipByLayer(1.0))
    params = list(model.parameters())
    largest = 0

    def look(_: nn.Parameter) -> None:
        nonlocal largest
        largest = max(largest, _bytes([p.grad for p in params if p.grad is not None]))

    for param in params:
        param.register_post_accumulate_grad_hook(look)
    if max_bytes:
        fused_lwlr.step_in_backward(model, optimizer, max_bytes=max_bytes)
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(256, (1, 64))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    size = f"{max_bytes // MIB} << 20" if max_bytes >= MIB else str(max_bytes)
    return {
        "step": f"during backward, max_bytes={size}" if max_bytes else "after backward",
        "parameters": _bytes(params),
        "state": _bytes([value for entries in optimizer.state.values() for value in entries.values() if value.dim()]),
        "gradients": largest,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    """Measures all sizes."""
    parser = rows.command(__doc__, "--out")
    parser.add_argument("--max-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.max_bytes is not None:
        rows.write(measure(options.max_bytes))
        return
    measured = []
    for max_bytes in SIZES:
        command = [sys.executable, "-m", "bench.gradient_memory", "--max-bytes", str(max_bytes)]
        measured.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        rows.write(measured[-1])
    path = rows.save(options.out / "gradient-memory.json", {"torch": torch.__version__, "rows": measured})
    memory(measured, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
