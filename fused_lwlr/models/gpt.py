"""Transformers that predict the next token of a text, or of a translation."""

from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr.models.blocks import Arguments, Attention, Block

PAD = 0
"""The token that fills a source up, and is not attended to."""


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks, and a linear head.

    It takes (batch, tokens), int64, and returns logits of (batch, tokens, classes).

    Weights are PyTorch's, and the position embedding N(0, 0.02²); a tied token embedding is N(0, 1/width), so that
    logits begin with a variance of one.

    Args:
        depth: number of blocks.
        post: the original order, "post-LN"; otherwise "pre-LN", with one more normalization at the end.
        context, classes: the most tokens of a sequence, and the number of different tokens.
        arguments: as in `Arguments`.
    """

    def __init__(self, depth: int, post: bool, *, context: int, classes: int, **arguments: Any) -> None:
        super().__init__()
        given = Arguments(**arguments)
        self.tok_embed = nn.Embedding(classes, given.width)
        self.pos_embed = nn.Parameter(torch.randn(context, given.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(given, post=post) for _ in range(depth)))
        self.norm = nn.Identity() if post else nn.LayerNorm(given.width)
        self.head = given.head(self.tok_embed)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embed(tokens) + self.pos_embed[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class DecoderBlock(Block):
    """Causal self-attention, attention to the encoder's output, and a two-layer perceptron, in the original order."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments, post=True)
        self.cross = Attention(arguments, fused=False, causal=False)
        self.cross_norm = nn.LayerNorm(arguments.width)

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
        arguments: as in `Arguments`. Attention to the source is not fused.
    """

    def __init__(self, depth: int, *, context: int, classes: int, **arguments: Any) -> None:
        super().__init__()
        given = Arguments(**arguments)
        self.tok_embed = nn.Embedding(classes, given.width)
        self.pos_embed = nn.Parameter(torch.randn(2, context, given.width) * 0.02)
        self.encoder = nn.ModuleList(Block(given, post=True, causal=False) for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderBlock(given) for _ in range(depth))
        self.head = given.head(self.tok_embed)

    def forward(self, pairs: Tensor) -> Tensor:
        mask = (pairs[:, 0] != PAD)[:, None, None]  # (batch, heads, queries, keys)
        source, x = (self.tok_embed(pairs) + self.pos_embed[:, : pairs.shape[2]]).unbind(1)
        for block in self.encoder:
            source = block(source, mask)
        for block in self.decoder:
            x = block(x, source, mask)
        return self.head(x)  # type: ignore[no-any-return]
