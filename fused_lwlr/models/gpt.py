"""Transformers that predict the next token, with normalization before their branches or in the original order."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NAME = re.compile(r"(gpt|postln)([1-9]\d*)")
ARGUMENTS = {"width": int, "heads": int, "hidden": int, "tied": bool, "fused": bool, "dropout": float, "layernorm": str}
"""What a model takes besides its depth, and of which type."""


class Attention(nn.Module):
    """Causal self-attention; `fused`: query, key and value in one projection; `every`: its output is normalized."""

    def __init__(self, width: int, heads: int, *, fused: bool, every: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width) if every else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (batch, heads, tokens, ·)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.norm(self.proj(attended.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron.

    With `post`, the order of Attention Is All You Need (Section 3.1): norm(x + branch(x)), and ReLU. Without:
    x + branch(norm(x)), and GELU.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, post: bool, fused: bool, every: bool, dropout: float
    ) -> None:
        super().__init__()
        self.post = post
        self.attention = Attention(width, heads, fused=fused, every=every)
        self.norm1 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc1_norm = nn.LayerNorm(hidden) if every else nn.Identity()
        self.fc2 = nn.Linear(hidden, width)
        self.fc2_norm = nn.LayerNorm(width) if every else nn.Identity()
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.dropout(self.attention(x)))
            return self.norm2(x + self.dropout(self._mlp(x)))  # type: ignore[no-any-return]
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self._mlp(self.norm2(x)))  # type: ignore[no-any-return]

    def _mlp(self, x: Tensor) -> Tensor:
        activation = functional.relu if self.post else functional.gelu
        return self.fc2_norm(self.fc2(activation(self.fc1_norm(self.fc1(x)))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks, and a linear head.

    It takes (batch, tokens), int64, and returns logits of (batch, tokens, classes).

    Weights are PyTorch's, and the position embedding N(0, 0.02²); a tied token embedding is N(0, 1/width), so that
    logits begin with a variance of one.

    Args:
        depth: number of blocks.
        post: the original order, "post-LN"; otherwise "pre-LN", with one more normalization at the end.
        context: the most tokens of a sequence.
        classes: number of different tokens.
        width: of the embeddings.
        heads: of attention, which divide the width.
        hidden: width between the layers of the perceptron; four times the width by default.
        tied: the head has the weight of the token embedding.
        fused: query, key and value are one projection.
        layernorm: "usual", or "every": a normalization after each layer of the perceptron, before its activation, and
            after that of attention as well (Spreads in Effective Learning Rates, Appendix C).
        dropout: of each branch, when training.
    """

    def __init__(
        self, depth: int, post: bool, *, context: int, classes: int, width: int = 64, heads: int = 4,
        hidden: int | None = None, tied: bool = False, fused: bool = True, layernorm: str = "usual",
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if layernorm not in ("usual", "every"):
            raise ValueError(f"layernorm={layernorm} is unknown: choose from usual, every")
        hidden = 4 * width if hidden is None else hidden
        if min(width, heads, hidden) < 1 or width % heads:
            raise ValueError(
                f"width={width}, heads={heads}, hidden={hidden}: all must be 1 or more, and heads divide the width"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
        self.tok_embed = nn.Embedding(classes, width)
        self.pos_embed = nn.Parameter(torch.randn(context, width) * 0.02)
        options: dict[str, Any] = {"post": post, "fused": fused, "every": layernorm == "every", "dropout": dropout}
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, **options) for _ in range(depth)))
        self.norm = nn.Identity() if post else nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        if tied:
            self.head.weight = self.tok_embed.weight
            nn.init.normal_(self.tok_embed.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embed(tokens) + self.pos_embed[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]
