"""Attention and blocks of Transformers, with normalization before their branches or after their sums."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Attention to the sequence itself, or to `memory`, another one; `mask` is True where a key counts.

    Args:
        fused: query, key and value are one projection; not with `memory`.
        every: the output is normalized.
        causal: no token attends to later tokens.
    """

    def __init__(self, width: int, heads: int, *, fused: bool, every: bool, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.fused, self.causal = heads, fused, causal
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width) if every else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if self.fused:
            parts = self.qkv(x).chunk(3, dim=-1)
        else:
            memory = x if memory is None else memory
            parts = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (batch, heads, tokens, ·)
        attended = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.norm(self.proj(attended.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron.

    With `post`, the order of Attention Is All You Need (Section 3.1): norm(x + branch(x)), and ReLU. Without:
    x + branch(norm(x)), and GELU.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, post: bool, fused: bool, every: bool, dropout: float,
        causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.post = post
        self.attention = Attention(width, heads, fused=fused, every=every, causal=causal)
        self.norm1 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc1_norm = nn.LayerNorm(hidden) if every else nn.Identity()
        self.fc2 = nn.Linear(hidden, width)
        self.fc2_norm = nn.LayerNorm(width) if every else nn.Identity()
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.post:
            x = self.norm1(x + self.dropout(self.attention(x, mask=mask)))
            return self.norm2(x + self.dropout(self.mlp(x)))  # type: ignore[no-any-return]
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]

    def mlp(self, x: Tensor) -> Tensor:
        activation = functional.relu if self.post else functional.gelu
        return self.fc2_norm(self.fc2(activation(self.fc1_norm(self.fc1(x)))))  # type: ignore[no-any-return]


def options_of(
    *, width: int, heads: int, hidden: int | None, fused: bool, layernorm: str, dropout: float
) -> dict[str, Any]:
    """The arguments of a `Block` that all blocks of a model have in common.

    Raises:
        ValueError: one is out of range.
    """
    if layernorm not in ("usual", "every"):
        raise ValueError(f"layernorm={layernorm} is unknown: choose from usual, every")
    hidden = 4 * width if hidden is None else hidden
    if min(width, heads, hidden) < 1 or width % heads:
        raise ValueError(
            f"width={width}, heads={heads}, hidden={hidden}: all must be 1 or more, and heads divide the width"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
    sizes = {"width": width, "heads": heads, "hidden": hidden}
    return {**sizes, "fused": fused, "every": layernorm == "every", "dropout": dropout}
