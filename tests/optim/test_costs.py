"""Launches of a step, the bytes it moves, and how its work grows."""

import sys

import pytest
import torch
from cases import KINDS, every_name, long, over
from pairs import twin_parameters
from steps import ALL, OPTIONS, OURS, compare, cost, gradients, parameters
from tables import change_sizes
from tolerances import same

from fused_lwlr import ELR, LAMB, LARS


@over(KINDS)
@pytest.mark.parametrize(
    ("name", "options", "memory", "state"),
    [
        ("sgd", {}, 12, 0), ("sgd", {"momentum": 0.9}, 20, 4), ("adamw", {}, 28, 8),
        ("adamw", {"amsgrad": True}, 36, 12)
    ],
)  # fmt: skip
def test_one_launch_and_its_bytes(name, options, memory, state, scaling, device):
    """w, g and state are read once; g, or all inputs of the direction, once more for the update."""
    named = parameters([(3, 5)], torch.float32, device)
    optimizer = OURS[name](named, lr=0.1, **options, scaling=scaling, backend="triton")
    target = scaling.factor_formula(OURS[name].rule).target
    again = 8 + state if target == "direction" else 4
    first = again if target == "direction" else 8
    assert cost(optimizer, named) == (1, memory, first)
    # ‖w‖ is known from the step before
    assert cost(optimizer, named) == (1, memory, again)


@pytest.mark.parametrize("more", [{"clip_global_norm": 1.0}, {"nonfinite": "skip"}])
@pytest.mark.parametrize(
    ("name", "scaling", "memory", "again"),
    [("sgd", None, 16, 0), ("sgd", LARS(), 16, 4), ("adamw", None, 32, 0), ("adamw", LAMB(), 32, 16)],
)
def test_a_gate_reads_the_gradients_once_more(name, scaling, memory, again, more, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    optimizer = OURS[name](named, lr=0.1, scaling=scaling, **more, backend="triton")
    for turn in range(2):
        launches, once, more_read = cost(optimizer, named)
        assert (launches, once) == (2, memory)
        assert turn == 0 or more_read == again


@pytest.mark.parametrize(
    ("name", "dtype", "options", "memory", "again"),
    [
        ("adamw", torch.bfloat16, {"stochastic_rounding": True}, 14, 0),
        ("adamw", torch.bfloat16, {"capturable": True}, 14, 0),
        ("adamw", torch.float32, {"cautious_decay": True}, 28, 0),
        ("lion", torch.float32, {"cautious_decay": True}, 20, 0), ("sgd", torch.float32, {"scaled": True}, 12, 0),
        ("adamw", torch.float32, {"scaled": True}, 28, 0),
        ("sgd", torch.float32, {"scaled": True, "scaling": ELR(0.1)}, 12, 4),
        ("adamw", torch.float32, {"scaled": True, "scaling": ELR(0.1)}, 28, 16),
    ],
)  # fmt: skip
def test_options_that_add_nothing(name, dtype, options, memory, again, device):
    """One launch and the bytes of a step without; `scaled` are gradients with the loss scale of a GradScaler."""
    named = parameters([(3, 5), (4,)], dtype, device)
    options = dict(options)
    scaled = options.pop("scaled", False)
    optimizer = ALL[name](named, lr=0.1, **options, backend="triton")
    if scaled:
        optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    cost(optimizer, named)
    assert cost(optimizer, named) == (1, memory, again)


@every_name
def test_groups_of_all_kinds_share_a_launch(name, device):
    named = parameters([(2, 3), (4,), (), (0,), (5, 2)], torch.float32, device)
    special = {"sgd": ({"momentum": 0.9}, {"nesterov": True, "momentum": 0.5}), "adamw": ({"amsgrad": True}, {})}[name]
    groups = [{"params": named[:2], **special[0]}, {"params": named[2:], **special[1], "weight_decay": 0.3}]
    optimizer = OURS[name](groups, lr=0.1, scaling=LARS(), layers={"p4[0:2]": 0.5}, backend="triton")
    assert [cost(optimizer, named)[0] for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(("name", "scaling"), [("sgd", LARS()), ("adamw", LAMB())])
def test_the_order_of_work_changes_no_result(name, scaling, device, monkeypatch):
    """One row has 60 elements and is alone in its group; the other has 4."""
    named, expected = twin_parameters([(20, 3), (2, 2)], torch.float32, device)
    plain = OURS[name](expected, lr=0.1, scaling=scaling, backend="triton")
    gradients(named, expected)
    plain.step()
    change_sizes(monkeypatch, window=64)
    optimizer = OURS[name](named, lr=0.1, scaling=scaling, backend="triton")
    optimizer.step()
    compare(same, optimizer, plain, named, expected)


def instructions(function):
    """The number of instructions of Python that a call executes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    # Python 3.12 reports instructions only if a frame asked for them before
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", ["sgd", long("adamw")])
def test_work_of_a_step_is_linear_in_the_number_of_tensors(name):
    """Eight times the tensors are at most eight times the work if it is linear, and 64 times if it is quadratic."""

    def work(count):
        params = [torch.nn.Parameter(torch.ones(1)) for _ in range(count)]
        optimizer = OURS[name](params, **OPTIONS[name], backend="torch")
        for param in params:
            param.grad = torch.ones(1)
        return [instructions(optimizer.step) for _ in range(2)]

    for few, many in zip(work(50), work(400), strict=True):
        assert few < many <= 8 * few
