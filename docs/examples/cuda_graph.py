"""A training step in a CUDA graph: forward and backward pass and optimizer are replayed by one call.

    python cuda_graph.py

`capturable=True` lets a replay read the rate from the GPU, so that schedules keep working. The rate is a tensor
on the GPU, and is changed in place.
"""

import argparse

import torch
from torch import nn

import fused_lwlr

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()
if not torch.cuda.is_available():
    raise SystemExit("cuda_graph.py needs a CUDA GPU")

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
lr = torch.tensor(1e-3, device="cuda")
optimizer = fused_lwlr.AdamW(model.parameters(), lr=lr, scaling=fused_lwlr.LAMB(), capturable=True)
# the graph reads its batch from here
images, targets = torch.zeros(32, 64, device="cuda"), torch.zeros(32, dtype=torch.int64, device="cuda")


def step():
    """One training step; gradients are allocated again, in the memory of the graph."""
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(images), targets)
    loss.backward()
    optimizer.step()
    return loss


# Warm up on a side stream, which compiles the kernels and makes the state.
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)

optimizer.zero_grad(set_to_none=True)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()

losses = []
for i in range(args.steps):
    batch = torch.randn(32, 64, device="cuda")
    images.copy_(batch)
    targets.copy_(batch[:, :10].argmax(1))
    lr.fill_(1e-3 * (1 - i / args.steps))
    graph.replay()
    losses.append(loss.clone())
print(f"training loss {torch.stack(losses[:10]).mean():.3f} at first, {torch.stack(losses[-10:]).mean():.3f} at last")
