"""The initialization at which LWLR measures gradients (Algorithm 1, line 3).

Convolution and linear weights are drawn from N(0, std = √(1/fan_out)), which preserves the variance of
gradients in the backward pass; scales are 1 and biases 0.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parallel import DistributedDataParallel

from fused_lwlr.measure.layers import Layer, fan_dims, fused_qkv, is_conv1d, layers_of
from fused_lwlr.methods.checks import check_choice, check_types, require
from fused_lwlr.methods.restoring import check_changeable
from fused_lwlr.shards import is_distributed, reshard

Kind = Literal["weight", "scale", "bias", "other"]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# position embeddings and relative-position tables: parameters, or modules that hold one
_POSITIONS = re.compile(r"wpe$|pos_?e(mb|nc)|(?<!com)position|rel_pos|(^|_)pos$|relative_attention_bias")
# class and register tokens; a module with such a name is a word embedding
_TOKENS = re.compile(r"token|class_emb")
_NORM = re.compile(r"norm(\dd)?$", re.IGNORECASE)
_SCALES = re.compile(r"gamma|gain|scale|layer_?scale|ls\d")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization: of torch, or of a class that is called ...Norm, or ...Norm1d to 3d.

    A class with this name and a matrix, such as a convolution with a normalization, is no normalization.
    """
    if isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        return True
    vectors = all(param.numel() == max(param.shape, default=1) for param in module.parameters(recurse=False))
    return vectors and _NORM.search(type(module).__name__) is not None


def kinds_of(model: nn.Module) -> dict[str, Kind | None]:
    """The kind of each parameter of a model: a weight, a scale, a bias, "other" (left alone), or None (unknown)."""
    names = {id(param): name for name, param in model.named_parameters()}
    kinds: dict[str, Kind | None] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            # the first owner of a tied parameter decides
            kinds.setdefault(names[id(param)], _kind(module, path.rpartition(".")[2], name, param))
    return kinds


def _kind(module: nn.Module, module_name: str, name: str, param: Tensor) -> Kind | None:
    if isinstance(module, nn.PReLU):
        return "other"
    if name.endswith(("bias", "biases")) or name.startswith("bias") or _is_token(module, module_name, name):
        return "bias"
    if isinstance(module, EMBEDDINGS) and name == "weight":
        return "weight"
    if name == "weight_g":
        # torch.nn.utils.weight_norm keeps the norms of another parameter here
        return None
    vector = param.numel() == max(param.shape, default=1)
    if is_norm(module) or (param.dim() <= 1 and name == "weight") or (vector and _SCALES.match(name)):
        return "scale"
    if param.dim() >= 2 and (name.endswith("weight") or name.startswith("weight")):
        return "weight"
    return None


def _is_token(module: nn.Module, module_name: str, name: str) -> bool:
    """Whether a parameter is a class token, a position embedding or a table of relative positions."""
    if isinstance(module, EMBEDDINGS) and name == "weight":
        return _POSITIONS.search(module_name) is not None
    return (_TOKENS.search(name) or _POSITIONS.search(name)) is not None


def zero_tokens(model: nn.Module) -> tuple[str, ...]:
    """The names of class tokens, position embeddings and tables of relative positions whose elements are all zero."""
    tokens = {
        id(param)
        for path, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if _is_token(module, path.rpartition(".")[2], name)
    }
    return tuple(name for name, param in model.named_parameters() if id(param) in tokens and not param.detach().any())


def fan_out(module: nn.Module, weight: Tensor) -> int:
    """Outputs that each input of a weight reaches: out_channels · kernel area ÷ groups, or out_features."""
    if isinstance(module, EMBEDDINGS):
        return weight.shape[1]
    # a transposed convolution has the outputs of a group in its weight
    groups = module.groups if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd) else 1
    return weight.shape[fan_dims(module)[1]] * math.prod(weight.shape[2:]) // groups


@torch.no_grad()
def lwlr_init_(
    model: nn.Module, *, kinds: Mapping[str, Kind] | None = None, generator: torch.Generator | None = None
) -> None:
    """Initialize a model in place as LWLR does before it measures gradients (Algorithm 1, line 3).

    Convolution, linear and embedding weights: N(0, std = √(1/fan_out)), with the fan-out of PyTorch
    (out_channels · kernel area, divided by groups); a fused query / key / value projection is three layers,
    each with a third of the outputs. Scales of normalizations and of LayerScale are set to 1. Biases, class
    tokens, position embeddings and tables of relative positions are set to 0. A position embedding that is an
    `nn.Embedding` is recognised by its name, such as "wpe", "pos_emb" or "position_embeddings". Buffers, parameters
    without `requires_grad` and the padding row of an embedding do not change.

    A weight that an embedding shares with an output layer has the fan-out of the output layer, which is the number of
    outputs. (The paper's rule is about linear layers, and does not mention embeddings of words.)

    Args:
        model: the model to initialize, on any device; it may be sharded.
        kinds: parameter name -> "weight", "scale", "bias" or "other" (left alone), for parameters that
            cannot be recognised or should be treated differently.
        generator: the generator of random numbers; PyTorch's global one when None. All processes of a model that is
            sharded or in `DistributedDataParallel` get the weights that the first one draws.

    Raises:
        ValueError: a parameter is not recognised or cannot be changed, an entry of `kinds` is wrong, or `generator` is
            on another device. The model does not change then.
    """
    check_types(model)
    rule = "a torch.Generator, or None for torch's global one"
    require(generator is None or isinstance(generator, torch.Generator), "generator", generator, rule)
    reshard(model)
    frozen: dict[str, Kind] = {name: "other" for name, p in model.named_parameters() if not p.requires_grad}
    found = {**kinds_of(model), **frozen, **_checked(model, kinds or {})}
    unknown = [name for name, kind in found.items() if kind is None]
    if unknown:
        raise ValueError(
            f"cannot tell whether {', '.join(map(repr, unknown[:5]))} is a weight, a scale or a bias: pass "
            f"kinds={{{unknown[0]!r}: 'weight' | 'scale' | 'bias' | 'other'}} to lwlr_init_, or initialize the model "
            "yourself and calibrate with init=False"
        )
    for name, param in model.named_parameters():
        if found[name] == "weight" and generator is not None and generator.device.type != param.device.type:
            raise ValueError(
                f"generator= is on {generator.device}, but {name!r} is on {param.device}: give a "
                f"torch.Generator({param.device.type!r})"
            )
        if found[name] != "other":
            check_changeable(name, param, expanded=found[name] != "weight")
    # the first owner of a tied weight decides on its fan-out, but an embedding only if no other module has the weight
    modules = sorted(model.modules(), key=lambda module: isinstance(module, EMBEDDINGS))
    owners = {id(param): module for module in reversed(modules) for param in module.parameters(recurse=False)}
    parameters = dict(model.named_parameters())
    name_of = {id(param): name for name, param in parameters.items()}
    # also of a tied embedding
    padding_of = {id(module.weight): module.padding_idx for module in modules if isinstance(module, EMBEDDINGS)}
    for name, kind in found.items():
        if kind in ("scale", "bias"):
            parameters[name].fill_(1.0 if kind == "scale" else 0.0)
    # their thirds are not separate layers, but are drawn as if they were
    thirds = {name for name, module in fused_qkv(model) if is_conv1d(module)}
    for layer in layers_of(model):
        if found[name_of[id(layer.param)]] == "weight" and layer.numel:
            parts = 3 if layer.name in thirds else 1
            owner = owners[id(layer.param)]
            fan = fan_out(owner, layer.of(layer.param)) // parts
            _draw(layer, fan, generator, padding_of.get(id(layer.param)))
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            for name, param in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    drawn = param.contiguous()
                    torch.distributed.broadcast(drawn, group_src=0, group=module.process_group)
                    param.copy_(drawn)


def _draw(layer: Layer, outputs: int, generator: torch.Generator | None, padding: int | None) -> None:
    param: Any = layer.param
    # a slice of shards is a copy
    whole = param.full_tensor() if is_distributed(param) else param
    weight = layer.of(whole)
    kept = None if padding is None else weight[padding].clone()
    weight.normal_(0.0, outputs**-0.5, generator=generator)
    if kept is not None:
        weight[padding] = kept
    if is_distributed(param):
        from torch.distributed.tensor import distribute_tensor

        # processes may draw different numbers: all get the numbers of the first
        drawn, mesh = whole.contiguous(), param.device_mesh
        for dim in range(mesh.ndim):
            torch.distributed.broadcast(drawn, group_src=0, group=mesh.get_group(dim))
        # without scatter, which refuses uneven shards of FSDP2 with tensor parallelism
        param.copy_(distribute_tensor(drawn, mesh, param.placements, src_data_rank=None))


def _checked(model: nn.Module, kinds: Mapping[str, Kind]) -> Mapping[str, Kind]:
    params = dict(model.named_parameters())
    require(isinstance(kinds, Mapping), "kinds", kinds, "a dict from names of parameters to kinds")
    for name, kind in kinds.items():
        if name not in params:
            raise ValueError(
                f"kinds= names {name!r}, but the model has no such parameter: use names of model.named_parameters()"
            )
        check_choice(f"kinds[{name!r}]", kind, get_args(Kind))
        if kind == "weight" and params[name].dim() < 2:
            raise ValueError(f"kinds[{name!r}]='weight' is for two dimensions or more: give 'scale', 'bias' or 'other'")
    return kinds
