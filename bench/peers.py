"""Other libraries' optimizers, where they are installed."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from bench import reference as numbers
from bench.contestants import Contestant, Named, options_of
from fused_lwlr.extras import import_beside_torchvision

SGD = {"momentum": numbers.MOMENTUM, "weight_decay": numbers.DECAY["sgd"]}
ADAMW = options_of("adamw")
LARS = {**SGD, "trust_coeff": numbers.TRUST, "eps": numbers.LARS_EPS}
EXACT = {"quantize": False, "master_weight_bits": None}

# package -> rule, method, who, module, class, options. `.grad` counts as changed: some releases of some do
PEERS: dict[str, list[tuple[str, str, str, str, str, dict[str, Any]]]] = {
    "timm": [
        ("sgd", "LARS", "timm", "timm.optim.lars", "Lars", LARS),
        ("adamw", "LAMB", "timm", "timm.optim.lamb", "Lamb", {**ADAMW, "max_grad_norm": None}),
    ],
    "apex": [
        ("sgd", "plain", "apex", "apex.optimizers", "FusedSGD", SGD),
        ("adamw", "plain", "apex", "apex.optimizers", "FusedAdam", ADAMW),
        ("adamw", "LAMB", "apex", "apex.optimizers", "FusedLAMB", {**ADAMW, "max_grad_norm": 1e30}),
    ],
    "flashoptim": [
        ("sgd", "plain", "flashoptim", "flashoptim", "FlashSGD", {**SGD, **EXACT}),
        ("adamw", "plain", "flashoptim", "flashoptim", "FlashAdamW", {**ADAMW, **EXACT}),
    ],
    "bitsandbytes": [
        ("adamw", "plain", "bitsandbytes", "bitsandbytes.optim", "AdamW32bit", ADAMW),
        ("adamw", "LAMB", "bitsandbytes", "bitsandbytes.optim", "LAMB32bit", {**ADAMW, "max_unorm": 0.0}),
    ],
    "torchao": [("adamw", "plain", "torchao", "torchao.optim", "_AdamW", ADAMW)],
    "heavyball": [("adamw", "plain", "heavyball", "heavyball", "AdamW", ADAMW)],
}  # fmt: skip


def peers() -> tuple[list[Contestant], dict[str, str]]:
    """Contestants from the installed packages, and package -> the reason why it is missing."""
    found, absent = [], {}
    for package, rows in PEERS.items():
        if importlib.util.find_spec(package) is None:
            absent[package] = "not installed"
            continue
        try:
            modules = {row[3]: import_beside_torchvision(row[3]) for row in rows}
        except (ImportError, RuntimeError) as error:
            # for example a package that was built for another torch; the report names it
            absent[package] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        for rule, method, who, module, name, options in rows:
            build = _builder(getattr(modules[module], name), options)
            found.append(Contestant(rule, method, who, build, graph=False, mutates=True))
    return found, absent


def _builder(cls: Any, options: dict[str, Any]) -> Callable[[Named, float, bool], Any]:
    return lambda named, lr, capturable: cls([param for _, param in named], lr=lr, **options)
