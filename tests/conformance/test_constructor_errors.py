"""Every error input of torch's own harness: the same error, with the same words, from ours and from torch's."""

import pytest
import torch
from cases import BACKENDS
from harness import DEVICE, INFO
from steps import OURS, TORCH
from torch.testing._internal.common_optimizers import OptimizerErrorEnum


def _errors(name):
    # a mistake that needs no parameters is listed for one device only
    devices = ["cpu", *(["cuda"] if DEVICE.type == "cuda" else [])]
    return [
        entry for device in devices for entry in INFO[name].optim_error_inputs_func(device=device, dtype=torch.float32)
    ]


ROWS = [(name, i, backend) for name in OURS for i in range(len(_errors(name))) for backend in BACKENDS]


def provoke(cls, entry, **more):
    """The error or warning that an input is meant to end in."""
    given = entry.optimizer_error_input
    kind = pytest.warns if issubclass(entry.error_type, Warning) else pytest.raises
    if entry.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with kind(entry.error_type, match=entry.error_regex) as caught:
            cls(given.params, **given.kwargs, **more)
    else:
        optimizer = cls(given.params, **given.kwargs, **more)
        with kind(entry.error_type, match=entry.error_regex) as caught:
            optimizer.step()
    return [str(w.message) for w in caught] if kind is pytest.warns else [str(caught.value)]


@pytest.mark.parametrize(("name", "number", "backend"), ROWS)
def test_errors_equal_torchs(name, number, backend):
    ours = provoke(OURS[name], _errors(name)[number], backend=backend)
    assert ours == provoke(TORCH[name], _errors(name)[number])


@pytest.mark.parametrize("flags", [{"fused": True, "foreach": True}, {"fused": True, "differentiable": True}])
@pytest.mark.parametrize("name", OURS)
def test_implementations_that_exclude_each_other(name, flags):
    params = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(RuntimeError) as expected:
        TORCH[name](params, **flags)
    with pytest.raises(RuntimeError) as raised:
        OURS[name](params, **flags)
    assert str(raised.value) == str(expected.value)
