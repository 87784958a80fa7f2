"""Kinds of a model's parameters: normalizations, embeddings, and the projections of a transformer."""

import re
from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn

from fused_lwlr.layers import layers_of, split_name

Role = Literal["norm", "embedding", "qk", "vo", "ffn"]

_NORM = re.compile(r"norm(\dd)?$", re.IGNORECASE)
# the name of a weight's module
_QK = re.compile(r"q|k|wq|wk|to_q|to_k|query|key|[qk]_proj(_weight)?|[qk]_lin")
_VO = re.compile(r"v|o|wv|wo|to_v|to_out|value|[vo]_proj(_weight)?|out_proj|[vo]_lin|out_lin|proj")
_FUSED = re.compile(r"qkv|in_proj_weight|in_proj_bias")
_FFN = re.compile(r"fc\d|linear\d|lin\d|w\d|c_fc|(gate|up|down)_proj|wi(_\d)?")
# names of projections in attention modules, and of feed-forward modules
_OUTPUT = re.compile(r"out|c_proj|dense")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_FFN_PART = re.compile(r"mlp|ffn|feed_?forward|intermediate|\d\.output$", re.IGNORECASE)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization: its class is called ...Norm, or ...Norm1d to 3d."""
    return _NORM.search(type(module).__name__) is not None


def own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yields every module with each parameter that it owns."""
    for module in model.modules():
        for param in module.parameters(recurse=False):
            yield module, param


def roles_of(model: nn.Module) -> dict[str, Role | None]:
    """Returns the role of every layer, and None for layers without one: heads, convolutions, tokens.

    Normalizations and embeddings are found by the type of their module, and embeddings also by "embed" in their name;
    projections by the usual names. Each third of a fused query, key and value projection is a layer.
    """
    by_type: dict[int, Role] = {}
    for module, param in own_parameters(model):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            by_type[id(param)] = "embedding"
        elif is_norm(module):
            by_type.setdefault(id(param), "norm")
    return {layer.name: by_type.get(id(layer.param)) or _by_name(layer.name) for layer in layers_of(model)}


def _by_name(name: str) -> Role | None:
    parameter, start, stop = split_name(name)
    parts = parameter.split(".")
    # these parts do not tell the kind of a module
    while len(parts) > 1 and (parts[-1] in ("weight", "bias") or parts[-1].isdigit()):
        parts.pop()
    *outer, own = parts
    within = ".".join(outer)
    if "embed" in parameter:
        return "embedding"
    if _FFN_PART.search(within) or _FFN.fullmatch(own):
        return "ffn"
    if _FUSED.fullmatch(own):
        # query, key and value follow one another
        return None if stop is None else "vo" if start // (stop - start) == 2 else "qk"
    if _QK.fullmatch(own):
        return "qk"
    if _VO.fullmatch(own) or (_OUTPUT.fullmatch(own) and _ATTENTION.search(within)):
        return "vo"
    return None
