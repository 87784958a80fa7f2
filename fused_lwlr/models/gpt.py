"""Transformers that predict the next token, with normalization before their branches or in the original order."""

import torch
from torch import Tensor, nn

from fused_lwlr.models.blocks import Block, options_of

ARGUMENTS = {"width": int, "heads": int, "hidden": int, "tied": bool, "fused": bool, "dropout": float, "layernorm": str}
"""Further arguments of a model, and their types."""


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks, and a linear head.

    It takes (batch, tokens), int64, and returns logits of (batch, tokens, classes).

    Weights are PyTorch's, and the position embedding N(0, 0.02²); a tied token embedding is N(0, 1/width), so that
    logits begin with a variance of one.

    Args:
        depth: number of blocks.
        post: the original order, "post-LN"; otherwise "pre-LN", with one more normalization at the end.
        context, classes: the most tokens of a sequence, and the number of different tokens.
        width, heads: of the embeddings, and the number of attention heads, which divides it.
        hidden: width between the layers of the perceptron; four times the width by default.
        tied: the head has the weight of the token embedding.
        fused: query, key and value are one projection.
        layernorm: "usual", or "every": a normalization after each layer of the perceptron, before its activation, and
            after the attention's layer as well (Spreads in Effective Learning Rates, Appendix C).
        dropout: dropout of each branch, in training.
    """

    def __init__(
        self, depth: int, post: bool, *, context: int, classes: int, width: int = 64, heads: int = 4,
        hidden: int | None = None, tied: bool = False, fused: bool = True, layernorm: str = "usual",
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        options = options_of(
            width=width, heads=heads, hidden=hidden, fused=fused, layernorm=layernorm, dropout=dropout
        )  # fmt: skip
        self.tok_embed = nn.Embedding(classes, width)
        self.pos_embed = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(post=post, **options) for _ in range(depth)))
        self.norm = nn.Identity() if post else nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        if tied:
            self.head.weight = self.tok_embed.weight
            nn.init.normal_(self.tok_embed.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embed(tokens) + self.pos_embed[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]
