"""Checks that a measurement changes nothing: tensors, gradients, modules and random number generators."""

import random
from contextlib import contextmanager

import numpy as np
import torch


def tensors_of(model, weights):
    return dict(model.state_dict(keep_vars=True) if weights else model.named_buffers())


def rest_of(model):
    modules = [(m.training, getattr(m, "eps", None), len(m._forward_pre_hooks)) for m in model.modules()]
    return modules, torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@contextmanager
def unchanged(model, *, weights=True):
    """Afterwards everything is the same, to the bit and in the same memory; without `weights`, except parameters."""
    tensors, rest = tensors_of(model, weights), rest_of(model)
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    grads = [(param.grad, None if param.grad is None else param.grad.clone()) for param in model.parameters()]
    yield
    now = tensors_of(model, weights)
    assert now.keys() == tensors.keys()
    for name, tensor in now.items():
        assert tensor is tensors[name], name
        assert torch.equal(tensor, values[name]), name
    for param, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert param.grad is grad
        assert grad is None or torch.equal(grad, value)
    assert rest_of(model) == rest
