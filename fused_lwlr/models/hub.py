"""Language models of transformers, built from a configuration, without loading weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fused_lwlr.integrations.extras import import_beside_torchvision, import_extra

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def language_model(name: str, *, context: int, classes: int, arguments: dict[str, Any]) -> nn.Module:
    """A causal language model with new weights, which takes (batch, tokens), int64, and returns logits.

    Conv1D of transformers, a linear layer whose weight is transposed, becomes nn.Linear of the same name, in which
    query, key and value can be separated (see `layers_of`).

    Args:
        name: a type of model that transformers has, such as gpt2, with its default configuration; a folder with
            config.json, or this file; or a name of the Hugging Face hub, whose configuration is downloaded.
        arguments: fields of the configuration.
    """
    import_extra("transformers", "hf")
    transformers: Any = import_beside_torchvision("transformers")
    config = _config(transformers, name, arguments, classes)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < context:
        raise ValueError(f"context={context} is more than the {positions} positions of hf:{name}: give fewer")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model=hf:{name} is not a model that predicts the next token: give one that is, such as hf:gpt2"
        )
    try:
        # not the configuration's, which is the dtype of pretrained weights
        dtype = arguments.get("dtype", torch.float32)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise _refused(name, arguments, error) from error
    linear_(model, transformers.pytorch_utils.Conv1D)
    model.register_forward_hook(lambda model, inputs, outputs: outputs.logits)
    _check_causal(model, f"hf:{name}", min(context, 8))
    return model


def _config(transformers: Any, name: str, arguments: dict[str, Any], classes: int) -> Any:
    # special tokens belong to another vocabulary
    fields = {**arguments, "vocab_size": classes, "use_cache": False, **dict.fromkeys(SPECIAL)}
    known = not Path(name).exists() and name in transformers.CONFIG_MAPPING
    try:
        config = transformers.CONFIG_MAPPING[name]() if known else transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model=hf:{name} cannot be loaded: give a type of model such as hf:gpt2, a folder with config.json, or a "
            f"name of the Hugging Face hub ({str(error).partition(chr(10))[0]})"
        ) from error
    for field in arguments:
        if not hasattr(config, field):
            raise ValueError(f"hf:{name} does not take {field}: its configuration has no such field")
    try:
        # in a default configuration, dependent sizes follow from the new sizes
        return type(config)(**fields) if known else type(config).from_dict({**config.to_dict(), **fields})
    except Exception as error:
        raise _refused(name, arguments, error) from error


def _refused(name: str, arguments: dict[str, Any], error: Exception) -> ValueError:
    given = f" with {', '.join(f'{field}={value}' for field, value in arguments.items())}" if arguments else ""
    return ValueError(f"hf:{name} cannot be made{given}: {type(error).__name__}: {' '.join(str(error).split()):.300}")


@torch.no_grad()
def linear_(model: nn.Module, transposed: type[nn.Module]) -> None:
    """Replace modules that compute x @ weight + bias by nn.Linear."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, transposed):
                weight: Any = child.weight
                linear = nn.Linear(weight.shape[0], weight.shape[1], dtype=weight.dtype, device=weight.device)
                linear.weight.copy_(weight.T)
                linear.bias.copy_(child.bias)  # type: ignore[arg-type]
                setattr(parent, name, linear)


@torch.no_grad()
def _check_causal(model: nn.Module, name: str, tokens: int) -> None:
    """Refuse a model that sees the tokens that it must predict."""
    model.eval()
    one, other = torch.zeros(2, 1, tokens, dtype=torch.int64)
    other[0, -1] = 1
    before, after = (model(ids)[0, : tokens - 1] for ids in (one, other))
    model.train()
    if not torch.allclose(before, after, rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"model={name} sees the tokens that it must predict: give another model, or model_args "
            "is_decoder=True if it has this field"
        )
