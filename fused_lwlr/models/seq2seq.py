"""A Transformer that translates: an encoder of the source, and a decoder that attends to it."""

import torch
from torch import Tensor, nn

from fused_lwlr.models.blocks import Attention, Block, options_of

PAD = 0
"""The token that fills a source up, and is not attended to."""


class DecoderBlock(Block):
    """Causal self-attention, attention to the encoder's output, and a two-layer perceptron, in the original order."""

    def __init__(self, *, width: int, heads: int, every: bool, **options: int | float) -> None:
        super().__init__(width=width, heads=heads, every=every, post=True, **options)  # type: ignore[arg-type]
        self.cross = Attention(width, heads, fused=False, every=every, causal=False)
        self.cross_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = self.norm1(x + self.dropout(self.attention(x)))
        x = self.cross_norm(x + self.dropout(self.cross(x, memory, mask)))
        return self.norm2(x + self.dropout(self.mlp(x)))  # type: ignore[no-any-return]


class Seq2Seq(nn.Module):
    """The encoder and decoder of Attention Is All You Need, each of `depth` blocks, normalized after each sum.

    It takes (batch, 2, tokens), int64: a source, filled up with token 0, and the target that the decoder has so far.
    It returns logits of (batch, tokens, classes), of the token after each of the target.

    Source and target have one vocabulary and one token embedding; positions are learned, and drawn from N(0, 0.02²).

    Args:
        depth: number of blocks of the encoder, and of the decoder.
        context: the most tokens of a source, and of a target.
        classes: number of different tokens.
        width, heads, hidden, tied, fused, layernorm, dropout: as in `GPT`. Attention to the source is not fused.
    """

    def __init__(
        self, depth: int, *, context: int, classes: int, width: int = 64, heads: int = 4, hidden: int | None = None,
        tied: bool = False, fused: bool = True, layernorm: str = "usual", dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        options = options_of(
            width=width, heads=heads, hidden=hidden, fused=fused, layernorm=layernorm, dropout=dropout
        )  # fmt: skip
        self.tok_embed = nn.Embedding(classes, width)
        self.pos_embed = nn.Parameter(torch.randn(2, context, width) * 0.02)
        self.encoder = nn.ModuleList(Block(post=True, causal=False, **options) for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderBlock(**options) for _ in range(depth))
        self.head = nn.Linear(width, classes, bias=False)
        if tied:
            self.head.weight = self.tok_embed.weight
            nn.init.normal_(self.tok_embed.weight, std=width**-0.5)

    def forward(self, pairs: Tensor) -> Tensor:
        mask = (pairs[:, 0] != PAD)[:, None, None]  # (batch, heads, queries, keys)
        source, x = (self.tok_embed(pairs) + self.pos_embed[:, : pairs.shape[2]]).unbind(1)
        for block in self.encoder:
            source = block(source, mask)
        for block in self.decoder:
            x = block(x, source, mask)
        return self.head(x)  # type: ignore[no-any-return]
