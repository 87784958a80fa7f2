"""Gradients that are not finite, and a twin that never meets them."""

import math
from copy import deepcopy

import pytest
import torch
from steps import OPTIONS, OURS, parameters, twin

SGD_ROWS = [
    {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}, {"maximize": True}
]  # fmt: skip
ADAMW_ROWS = [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.0}]
ROWS = [("sgd", row) for row in SGD_ROWS] + [("adamw", row) for row in ADAMW_ROWS]
every_row = pytest.mark.parametrize(("name", "row"), ROWS)


def spoil(named, bad=math.nan, layer=0, at=-1):
    named[layer][1].grad.view(-1)[at] = bad


def pair_of(name, row, backend, device, shapes=((3, 5), (4,)), scaling=None, nonfinite="skip", **more):
    """An optimizer that skips, and a twin that never has to; their parameters."""
    named = parameters(shapes, torch.float32, device)
    expected = twin(named)
    options = {**OPTIONS[name], **row, "scaling": scaling, **more, "backend": backend}
    return OURS[name](named, **options, nonfinite=nonfinite), OURS[name](expected, **options), named, expected


def state_of(optimizer, named):
    """State by parameter: absent moments count as zeros, and absent step counts as 0."""
    keys = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    found = [optimizer.state.get(p, {}) for _, p in named]
    steps = [float(state.get("step", 0.0)) for state in found]
    moments = [{key: value for key, value in state.items() if key in keys and value.any()} for state in deepcopy(found)]
    return steps, moments
