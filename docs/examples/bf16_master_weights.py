"""Train in bfloat16 with master weights: the optimizer keeps the bits that bfloat16 rounds away.

    pip install '.[cli]'
    python bf16_master_weights.py

A step is often smaller than half a unit in the last place of a bfloat16 weight, and then changes nothing.
`master_weights=True` keeps 16 more bits of each weight, `stochastic_rounding=True` needs no memory and rounds up or
down at random, without bias.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import fused_lwlr

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=3e-4)
args = parser.parse_args()

images, targets = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
half = {"state_dtype": torch.float32}  # moments in float32
runs = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, half),
    "bfloat16, master weights": (torch.bfloat16, {**half, "master_weights": True}),
    "bfloat16, stochastic rounding": (torch.bfloat16, {**half, "stochastic_rounding": True}),
}
losses = {}
for run, (dtype, options) in runs.items():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
    optimizer = fused_lwlr.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, **options)
    for _ in range(args.epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch].to(dtype)).float(), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        losses[run] = nn.functional.cross_entropy(model(images.to(dtype)).float(), targets).item()
    print(f"{run:30} training loss {losses[run]:.4f}")
