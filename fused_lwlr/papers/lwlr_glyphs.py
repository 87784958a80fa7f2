"""The study lwlr-fashion on letters and digits in many fonts, in longer trainings."""

from dataclasses import replace

from fused_lwlr.papers import lwlr_fashion
from fused_lwlr.papers.framework import OPTIONS

STUDY = replace(
    lwlr_fashion.STUDY,
    name="lwlr-glyphs",
    doc="A ViT with SGD on letters and digits in many fonts: one rate and layer-wise rates, with and without tokens "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    epochs=20,
    steps=None,
    data="glyphs",
    options=OPTIONS,
)
