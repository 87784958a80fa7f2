"""A gradient that is not finite raises an error with the parameter's name, and training can continue."""

import math
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from cases import every_backend, every_case, every_name, nan_arithmetic
from pairs import compare_weights
from skipping import every_row, pair_of, spoil, state_of
from steps import OURS, gradients, identical, parameters
from tolerances import close

from fused_lwlr.optim.gate import SkipReport


def report(optimizer, device):
    """A step that raises; on a GPU the next step or `state_dict()` does, so that the step does not wait."""
    optimizer.step()
    assert device.type == "cuda", "the step did not raise"
    optimizer.state_dict()


@nan_arithmetic
@every_backend
@every_row
def test_raise_names_the_layer_and_training_continues(name, row, backend, device):
    ours, other, named, expected = pair_of(name, row, backend, device, nonfinite="raise")
    for step in range(4):
        gradients(named, expected)
        if step % 2 == 0:
            spoil(named, math.inf, layer=step // 2)
            before = [p.detach().clone() for _, p in named], state_of(ours, named)
            with pytest.raises(FloatingPointError, match=f"the gradient of 'p{step // 2}' is not finite"):
                report(ours, device)
            assert identical(([p.detach() for _, p in named], state_of(ours, named)), before)
        else:
            ours.step()
            other.step()
    # no error is left to report
    ours.state_dict()
    compare_weights(close, named, expected, 2)


@nan_arithmetic
@every_case
def test_raise_names_slices_and_the_first_few(name, backend, device):
    named = parameters([(4, 2), *[(2,)] * 7], torch.float32, device)
    ours = OURS[name](named, lr=0.1, layers={"p0[1:3]": 0.5}, nonfinite="raise", backend=backend)
    gradients(named)
    spoil(named, at=5)
    with pytest.raises(FloatingPointError, match=r"the gradient of 'p0\[1:3\]' is not finite: the step was skipped"):
        report(ours, device)
    for _, p in named:
        p.grad.fill_(math.nan)
    expected = r"'p0\[0:1\]', 'p0\[1:3\]', 'p0\[3:4\]', 'p1', 'p2' and 5 more is not finite"
    with pytest.raises(FloatingPointError, match=expected):
        report(ours, device)


@nan_arithmetic
@every_name
def test_raise_without_names(name, device):
    params = [p for _, p in parameters([(2,), (3,)], torch.float32, device)]
    ours = OURS[name]([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, nonfinite="raise", backend="torch")
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"the gradient of '1:0' is not finite"):
        report(ours, device)


@every_name
def test_a_loaded_state_has_no_skipped_step(name, device):
    """On a GPU the report of the last step may be under way then."""
    named = parameters([(4, 2)], torch.float32, device)
    ours = OURS[name](named, lr=0.1, nonfinite="raise")
    gradients(named)
    ours.step()
    saved = deepcopy(ours.state_dict())
    event = SimpleNamespace(synchronize=lambda: None)
    report = ours._skip_report = SkipReport(torch.ones(()), event, ["p0"], torch.ones(1))
    with pytest.raises(ValueError, match="must be a dict"):
        ours.load_state_dict(None)
    assert ours._skip_report is report
    ours.load_state_dict(saved)
    gradients(named)
    ours.step()
    ours.state_dict()
