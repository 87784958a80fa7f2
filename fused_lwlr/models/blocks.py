"""Attention and blocks of Transformers, with normalization before their branches or after their sums."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments that models of text have in common.

    Attributes:
        width, heads: of the embeddings, and the number of attention heads, which divides it.
        hidden: width between the layers of the perceptron; four times the width by default.
        tied: the head has the weight of the token embedding.
        fused: query, key and value are one projection.
        layernorm: "usual", or "every": a normalization after each layer of the perceptron, before its activation, and
            after the attention's layer as well (Spreads in Effective Learning Rates, Appendix C).
        dropout: dropout of each branch, in training.

    Raises:
        ValueError: one is out of range.
    """

    width: int = 64
    heads: int = 4
    hidden: int | None = None
    tied: bool = False
    fused: bool = True
    layernorm: str = "usual"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.layernorm not in ("usual", "every"):
            raise ValueError(f"layernorm={self.layernorm} is unknown: choose from usual, every")
        if min(self.width, self.heads, self.inner) < 1 or self.width % self.heads:
            raise ValueError(
                f"width={self.width}, heads={self.heads}, hidden={self.inner}: all must be 1 or more, and heads divide "
                "the width"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")

    @property
    def inner(self) -> int:
        """The width between the layers of the perceptron."""
        return 4 * self.width if self.hidden is None else self.hidden

    def norm(self, width: int) -> nn.Module:
        """A normalization that only `layernorm="every"` has."""
        return nn.LayerNorm(width) if self.layernorm == "every" else nn.Identity()

    def head(self, embedding: nn.Embedding) -> nn.Linear:
        """The layer that gives logits.

        A tied embedding is redrawn with variance 1 / width, so that logits start with variance one.
        """
        head = nn.Linear(self.width, embedding.num_embeddings, bias=False)
        if self.tied:
            head.weight = embedding.weight
            nn.init.normal_(embedding.weight, std=self.width**-0.5)
        return head


class Attention(nn.Module):
    """Attention to the sequence itself, or to `memory`, another one; `mask` is True where a key counts.

    Args:
        fused: query, key and value are one projection; not with `memory`.
        causal: no token attends to later tokens.
    """

    def __init__(self, arguments: Arguments, *, fused: bool, causal: bool) -> None:
        super().__init__()
        width = arguments.width
        self.heads, self.fused, self.causal = arguments.heads, fused, causal
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.norm = arguments.norm(width)

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

    def __init__(self, arguments: Arguments, *, post: bool, causal: bool = True) -> None:
        super().__init__()
        width, hidden = arguments.width, arguments.inner
        self.post = post
        self.attention = Attention(arguments, fused=arguments.fused, causal=causal)
        self.norm1 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc1_norm = arguments.norm(hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.fc2_norm = arguments.norm(width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(arguments.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.post:
            x = self.norm1(x + self.dropout(self.attention(x, mask=mask)))
            return self.norm2(x + self.dropout(self.mlp(x)))  # type: ignore[no-any-return]
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]

    def mlp(self, x: Tensor) -> Tensor:
        activation = functional.relu if self.post else functional.gelu
        return self.fc2_norm(self.fc2(activation(self.fc1_norm(self.fc1(x)))))  # type: ignore[no-any-return]
