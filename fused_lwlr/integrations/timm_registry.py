"""Our optimizers in timm's registry."""

import importlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from fused_lwlr.integrations.extras import import_timm
from fused_lwlr.integrations.param_groups import layers_from_param_groups
from fused_lwlr.optim import SGD, AdamW, Lion
from fused_lwlr.scaling import LAMB, LARS

MOMENTUM = {"has_eps": False, "has_momentum": True}
# without "_", at which timm cuts names: name -> class, the arguments that it takes, defaults as of timm's namesake
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, bool], dict[str, Any]]] = {
    "fusedlwlrsgd": (SGD, MOMENTUM, {"nesterov": True}),
    "fusedlwlradamw": (AdamW, {"has_betas": True}, {}),
    "fusedlwlrlion": (Lion, {"has_eps": False, "has_betas": True}, {}),
    "fusedlwlrlars": (SGD, MOMENTUM, {"scaling": LARS()}),
    "fusedlwlrlamb": (AdamW, {"has_betas": True}, {"scaling": LAMB()}),
}


def register_timm() -> list[str]:
    """Adds our optimizers to timm's registry: `timm.optim.create_optimizer_v2(model, opt=name)` then makes them.

    So do `timm.optim.create_optimizer` and the option `--opt` of timm's `train.py`. The param groups that timm makes,
    one for each layer and weight decay with `layer_decay`, become one group with `layers`, see
    `layers_from_param_groups`. A second call changes nothing.

    Returns:
        The names: "fusedlwlrsgd" (with Nesterov momentum, as timm's "sgd"), "fusedlwlradamw", "fusedlwlrlion", and
        with `LARS` and `LAMB` "fusedlwlrlars" and "fusedlwlrlamb".

    Raises:
        ImportError: timm is not installed, or has no registry.
    """
    timm = import_timm("register_timm()")
    try:
        registry = importlib.import_module("timm.optim._optim_factory").default_registry
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"timm {timm.__version__} has no registry of optimizers: install timm 1.0.12 or newer"
        ) from error
    known = registry.list_optimizers()
    for name, (cls, takes, defaults) in OPTIMIZERS.items():
        if name not in known:
            about = f"fused_lwlr.{cls.__name__}, one launch with a learning rate for every layer"
            registry.register(timm.optim.OptimInfo(name, partial(_make, cls), about, **takes, defaults=defaults))
    return list(OPTIMIZERS)


def _make(cls: type[torch.optim.Optimizer], params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """Makes an optimizer of parameters, or of param groups as one group."""
    given = list(params)
    if given and all(isinstance(group, Mapping) for group in given):
        given = [layers_from_param_groups(given)]
    return cls(given, **options)
