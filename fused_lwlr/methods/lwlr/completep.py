"""Options of layers by width and depth: CompleteP."""

from typing import Any

from torch import nn

from fused_lwlr.methods.checks import check_types, number, positive
from fused_lwlr.methods.lwlr.depth import Blocks, blocks_of
from fused_lwlr.methods.lwlr.mup import growth


def completep(
    model: nn.Module, base: nn.Module, *, alpha: float = 1.0, eps: float = 1e-8, blocks: Blocks = None
) -> dict[str, dict[str, Any]]:
    """Options for AdamW that transfer rates, decay and ε tuned on a small transformer to a wide and deep one.

        in blocks:   η = m_L^(α−1) / m_N of weights, m_L^(α−1) of others,   λ · m_N of weights,   ε / (m_N · m_L^α)
        elsewhere:   η = 1,                                                 λ,                    ε / m_N
        output:      η = 1 / m_N,                                           λ · m_N,              ε

    with m_N and m_L the ratios of width and number of blocks to the base (Don't be lazy: CompleteP enables
    compute-efficient deep transformers, arXiv 2505.01618, Table 1; η and λ are multipliers of lr and weight_decay). The
    paper multiplies logits by 1 / m_N instead, with η = 1, λ and ε / m_N for the output layer. The row above is the
    same update of the product of the two, for a model without that factor.

    These are the options of the optimizer alone. The model must add m_L^(−α) times each block to its residual stream,
    and draw hidden weights with variance 1 / m_N of the base's, and output weights with 1 / m_N².

    Args:
        model: the model to train.
        base: the same model with the width and the number of blocks at which lr, weight_decay and eps were tuned. Its
            blocks are alike: the first one replaces missing ones.
        alpha: α, from 0 to 1; 1 is CompleteP. The paper has values from 0.5 on.
        eps: ε that was tuned on the base.
        blocks: as in `layer_decay`, in both models.

    Returns:
        Parameter name -> {"lr", "weight_decay", "eps"}, for `layers=` of an optimizer; multipliers are 1 if `model`
        has the width and depth of `base`.

    Raises:
        ValueError: α or ε is out of range, no blocks are found, a weight is parametrized, or the base has other
            parameters or dimensions.
        TypeError: the model or the base is no module.
    """
    check_types(model)
    check_types(base, name="base")
    alpha = number("alpha", alpha, "from 0 to 1; 1 is CompleteP", lambda found: 0 <= found <= 1)
    eps = positive("eps", eps)
    own, small = blocks_of(model, blocks), blocks_of(base, blocks)
    depth = len(own) / len(small)
    based, twins, options = {name for name, _ in base.named_parameters()}, {}, {}
    for name, _ in model.named_parameters():
        block = next((block for block in own if name.startswith(f"{block}.")), None)
        twins[name] = name if block is None or name in based else small[0] + name.removeprefix(block)
        if twins[name] not in based:
            raise ValueError(f"base= must have the parameters of the model, but it lacks {twins[name]!r}")
    for name, fan_in, fan_out in growth(model, base, twins):
        inside = any(name.startswith(f"{block}.") for block in own)
        slower, smaller = (depth ** (alpha - 1), depth**alpha) if inside else (1.0, 1.0)
        options[name] = {"lr": slower / fan_in, "weight_decay": fan_in, "eps": eps / (fan_out * smaller)}
    return options
