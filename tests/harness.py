"""Inputs of torch's own optimizer tests, `torch.testing._internal.common_optimizers`, for our SGD and AdamW."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import BACKENDS
from steps import OURS, TORCH, uniform
from tolerances import close, same
from torch import nn

pytest.importorskip("expecttest", reason="torch's optimizer harness needs expecttest")

# importing it disables `torch.backends.x = ...` to the whole process, other tests included; in later versions of torch
# an object without these globals replaces the module
_FLAG, _globals = "__allow_nonbracketed_mutation_flag", torch.backends.flags_frozen.__globals__
_kept = _globals[_FLAG]
from torch.testing._internal.common_optimizers import optim_db  # noqa: E402

_globals[_FLAG] = _kept

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# it distinguishes optimizers by the name of their class
INFO = {name: next(info for info in optim_db if info.name == cls.__name__) for name, cls in OURS.items()}


def _inputs(name):
    """Maps test ids to options. On a GPU numbers may be tensors; on a CPU `capturable` is removed."""
    found = {}
    for entry in INFO[name].optim_inputs_func(device="cuda"):
        options = dict(entry.kwargs)
        if not HAS_GPU:
            options.pop("capturable", None)
        if repr(options) not in map(repr, found.values()):
            found[entry.desc.replace(" ", "_")] = options
    return found


_INPUTS = {name: _inputs(name) for name in OURS}


def options_of(name, desc):
    """New options for each optimizer, since options may hold tensors."""
    return deepcopy(_INPUTS[name][desc])


INPUTS = [(name, desc) for name in OURS for desc in _INPUTS[name]]
every_input_and_backend = pytest.mark.parametrize(
    ("name", "desc", "backend"), [(*entry, backend) for entry in INPUTS for backend in BACKENDS]
)


def ours_of(name, params, backend, **options):
    return OURS[name](params, **options, backend=backend)


def pair_of(name, desc, params, expected, backend):
    """Our optimizer and torch's single-tensor one, without shared parameters or option tensors."""
    ours = ours_of(name, params, backend, **options_of(name, desc))
    return ours, TORCH[name](expected, **options_of(name, desc), foreach=False)


def check_of(name, desc, backend, steps):
    """Bit for bit if both use the same arithmetic. torch's AdamW uses float32 for numbers on the device."""
    options = options_of(name, desc)
    numbers = (options.get("lr"), *options.get("betas", ()))
    on_device = name == "adamw" and (options.get("capturable", False) or any(map(torch.is_tensor, numbers)))
    return same if backend == "torch" and not on_device else partial(close, steps=steps)


class Regression:
    """The mean of (W x + b)² for a contiguous or non-contiguous weight and bias, for closures."""

    def __init__(self, dtype=torch.float32, contiguous=True, device=DEVICE):
        weight, bias = uniform((10, 5, 2), dtype, device), uniform((10, 2), dtype, device)
        if contiguous:
            self.weight, self.bias = nn.Parameter(weight[..., 0].contiguous()), nn.Parameter(bias[..., 0].contiguous())
        else:
            self.weight, self.bias = nn.Parameter(weight[..., 0]), nn.Parameter(bias[..., 0])
        self.named = [("weight", self.weight), ("bias", self.bias)]
        self.input = uniform((5,), dtype, device)
        self.evaluations = 0

    def loss(self):
        return (self.weight.mv(self.input) + self.bias).square().mean()

    def closure(self, optimizer):
        def evaluate():
            self.evaluations += 1
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return evaluate
