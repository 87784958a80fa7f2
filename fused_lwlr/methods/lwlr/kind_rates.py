"""Options of layers by kind: weight decay, and rates for the parts of a transformer."""

import re
from typing import Literal

from torch import nn

from fused_lwlr.measure.layers import layers_of
from fused_lwlr.methods.checks import check_types, require
from fused_lwlr.methods.lwlr.init import EMBEDDINGS, is_norm
from fused_lwlr.methods.minibatches import unwrapped
from fused_lwlr.patterns import split_name
from fused_lwlr.rescaling import ScaleInvariant

Role = Literal["norm", "embedding", "qk", "vo", "ffn"]

BLOCKWISE: dict[Role, float] = {"norm": 1.0, "vo": 4.0, "ffn": 6.0, "qk": 8.0, "embedding": 10.0}
"""Multipliers of the paper, tuned on language models with AdamW."""
# the name of a weight's module
_QK = re.compile(r"q|k|wq|wk|to_q|to_k|query|key|[qk]_proj(_weight)?|[qk]_lin")
_VO = re.compile(r"v|o|wv|wo|to_v|to_out|value|[vo]_proj(_weight)?|out_proj|[vo]_lin|out_lin|proj")
_FUSED = re.compile(r"qkv|c_attn|in_proj_weight|in_proj_bias")
_FFN = re.compile(r"fc\d|linear\d|lin\d|w\d|c_fc|(gate|up|down)_proj|wi(_\d)?")
# names of projections in attention modules, and of feed-forward modules
_OUTPUT = re.compile(r"out|c_proj|dense")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_FFN_PART = re.compile(r"mlp|ffn|feed_?forward|dense\w*dense|intermediate|\d\.output$", re.IGNORECASE)


def no_decay(model: nn.Module) -> dict[str, dict[str, float]]:
    """No weight decay for biases, normalizations and embeddings, as usual for language and vision models.

    These are parameters with fewer than two dimensions, parameters of normalizations and of `torch.nn.Embedding`, and
    the parameters named by `model.no_weight_decay()` if the model has such a method, as in timm, also within a wrapper.

    Args:
        model: the model whose parameters the optimizer gets.

    Returns:
        Parameter name -> {"weight_decay": 0}, for `layers=` of an optimizer; with rates,
        `layers=[rates, no_decay(model)]`.

    Raises:
        TypeError: the model is no module.
        ValueError: a parameter of the model is not initialized yet.
    """
    check_types(model)
    owners = (module for module in model.modules() if isinstance(module, EMBEDDINGS) or is_norm(module))
    spared = {id(param) for module in owners for param in module.parameters(recurse=False)}
    inner = unwrapped(model)
    named = set(getattr(inner, "no_weight_decay", set)())
    spared |= {id(param) for name, param in inner.named_parameters() if name in named}
    return {
        name: {"weight_decay": 0.0}
        for name, param in model.named_parameters()
        if param.dim() < 2 or id(param) in spared
    }


def corrected_decay(invariant: ScaleInvariant) -> dict[str, dict[str, bool]]:
    """Weight decay that follows lr, for scale-invariant layers.

        weight_decay · lr / max_lr

    In a steady state weight decay keeps ‖g‖ / ‖w‖ of such a layer at √(2 weight_decay / lr), which grows as lr falls;
    with the correction it is √(2 weight_decay / max_lr) (Why Gradients Rapidly Increase Near the End of Training, arXiv
    2506.02285: AdamC and SGDC).

    Args:
        invariant: the result of `fused_lwlr.scale_invariant`. Slices that are invariant alone are included.

    Returns:
        Layer name -> {"corrected_decay": True}, for `layers=` of an optimizer.

    Raises:
        ValueError: `invariant` is something else, such as a model.
    """
    result = "the result of fused_lwlr.scale_invariant(model, batch, loss_fn)"
    require(isinstance(invariant, ScaleInvariant), "invariant", invariant, result)
    return {name: {"corrected_decay": True} for name in (*invariant.names, *invariant.slices)}


def blockwise(model: nn.Module) -> dict[str, float]:
    """Rates for the parts of a transformer, lower for sharper parts.

        η: normalizations 1, value and output projections 4, feed-forward 6, query and key projections 8, embeddings 10

    (The Sharpness Disparity Principle in Transformers for Accelerating Language Model Pre-Training, ICML 2025, arXiv
    2502.19002. lr is the rate of the normalizations, which limit the best single rate to about this value.) Slices
    distinguish fused query, key and value projections. Other layers get 1, such as the head, whose rate the paper's
    code leaves to its user.

    Args:
        model: normalizations and embeddings are found by the types of modules, projections by the usual names, such as
            `q_proj`, `qkv`, `out_proj`, `fc1`, `mlp`.

    Returns:
        Layer name -> η, for `layers=` of an optimizer. `optimizer.layers()` shows the result.

    Raises:
        ValueError: no query, key, value or feed-forward projection was found by its name.
        TypeError: the model is no module.
    """
    check_types(model)
    by_type: dict[int, Role] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if isinstance(module, EMBEDDINGS):
                by_type[id(param)] = "embedding"
            elif is_norm(module):
                by_type.setdefault(id(param), "norm")
    roles = {layer.name: by_type.get(id(layer.param)) or _by_name(layer.name) for layer in layers_of(model)}
    if not {"qk", "vo", "ffn"} <= set(roles.values()):
        missing = ", ".join(sorted({"qk", "vo", "ffn"} - {role or "" for role in roles.values()}))
        raise ValueError(
            f"blockwise() finds no layers of the kind {missing} by the usual names in this model, which has "
            f"{', '.join(list(roles)[:4])}, ...: give layers= patterns of its names"
        )
    return {name: 1.0 if role is None else BLOCKWISE[role] for name, role in roles.items()}


def _by_name(name: str) -> Role | None:
    """The role of a layer by usual names; None for layers without one: heads, convolutions, tokens."""
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
