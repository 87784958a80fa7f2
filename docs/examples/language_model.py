"""A Transformer with layer normalization after its branches, trained without warm-up: GradInit scales its weights.

    python language_model.py
    python language_model.py --no-gradinit         # the same from PyTorch's initialization

The text is the reference of the language that Python itself carries, as bytes. GradInit (Zhu et al., 2021) scales each
parameter so that the first step of Adam at this rate brings the loss down the furthest.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn

import fused_lwlr

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--gradinit", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--gradinit-steps", type=int, default=50)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--depth", type=int, default=6)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--context", type=int, default=32)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))


class Model(nn.Module):
    """Predicts the next byte. `nn.TransformerEncoderLayer` normalizes after each sum unless it is told not to."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, args.width)
        self.positions = nn.Parameter(0.02 * torch.randn(args.context, args.width))
        layer = nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, args.depth)
        self.head = nn.Linear(args.width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(args.context))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


def batches(count):
    """Minibatches of 32 sequences at random places, with the byte that follows each of theirs."""
    for _ in range(count):
        starts = torch.randint(len(text) - args.context, (32, 1))
        sequences = text[starts + torch.arange(args.context + 1)].to(device)
        yield sequences[:, :-1], sequences[:, 1:]


def loss_fn(logits, targets):
    """Nats a byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(args.seed)
model = Model().to(device)
if args.gradinit:
    sample = list(batches(3 * args.gradinit_steps))
    steps = args.gradinit_steps
    fused_lwlr.gradinit_(model, sample, loss_fn, optimizer="adam", lr=args.lr, relative_gamma=0.8, steps=steps)
optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=args.lr, weight_decay=0.0)
losses = []
for step, (inputs, targets) in enumerate(batches(args.steps), 1):
    loss = loss_fn(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 50 == 0 or step == args.steps:
        print(f"step {step}: training loss {sum(losses[-50:]) / len(losses[-50:]):.3f}")
