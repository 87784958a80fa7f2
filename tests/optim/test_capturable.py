"""capturable=True outside of a graph: counts on the device, numbers on the device, and torch's state dicts."""

from collections import Counter
from functools import partial

import pytest
import torch
from cases import every_backend, every_case, long
from pairs import beside_torch, compare_weights, twin_parameters
from steps import ALL, OPTIONS, OURS, TORCH, gradients, parameters, saved, train, twin
from tolerances import close, same
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES, CAPTURABLE = [(6, 5), (), (0,)], {"capturable": True}
ROWS = [
    ("sgd", {"nesterov": True, "maximize": True}), ("sgd", {"dampening": 0.3}), ("sgd", {"momentum": 0.0}),
    ("adamw", {"amsgrad": True, "maximize": True}), ("adamw", {"betas": (0.5, 0.99), "eps": 1e-3}),
]  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts the operations of torch. On a GPU each one is a launch."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def ours_of(name, named, backend, **more):
    return OURS[name](named, **{**OPTIONS[name], **more}, capturable=True, backend=backend)


def torchs_of(name, named, **more):
    return TORCH[name](named, **{**OPTIONS[name], **more}, foreach=False)


@pytest.mark.parametrize(
    ("name", "options", "backend"),
    [(*row, "torch") for row in ROWS]
    + [(*ROWS[i], "triton") for i in (0, 1, 4)]
    + [long(*ROWS[i], "triton") for i in (2, 3)],
)
def test_as_not_capturable(name, options, backend, device):
    """torch's single-tensor optimizer, which counts on the host; one gradient comes late."""
    ours, torchs, named, expected = beside_torch(name, SHAPES, device, backend, own=CAPTURABLE, **options)
    for step in range(8):
        gradients(named, expected)
        if step < 2:
            named[0][1].grad = expected[0][1].grad = None
        ours.step(), torchs.step()
        for i, ((_, p), (_, q)) in enumerate(zip(named, expected, strict=True)):
            close(p.detach(), q.detach(), steps=4 * (step + 1))
            state = ours.state.get(p, {})
            taken = step + 1 if i else max(step - 1, 0)
            # SGD counts too: otherwise a replay cannot recognize a first step
            assert ("step" in state) == (taken > 0)
            if taken:
                assert state["step"].item() == taken
                assert (state["step"].device, state["step"].dtype) == (p.device, torch.float32)
            for key in state.keys() - {"step"}:
                close(state[key], torchs.state[q][key], steps=4 * (step + 1))


@pytest.mark.parametrize("name", ALL)
def test_tensors_take_no_more_operations(name, device):
    """Kernels read the learning rate and the weight decay: the host computes nothing of them."""
    found = []
    for tensors in ((), ("lr",), ("weight_decay",), ("lr", "weight_decay")):
        named = parameters(SHAPES, torch.float32, device)
        ours = ALL[name](named, **OPTIONS[name], capturable=True, backend="triton")
        ours.param_groups[0].update({option: torch.tensor(0.1, device=device) for option in tensors})
        train((ours,), (named,), 2)
        with Operations() as operations:
            ours.step()
        found.append(operations.counts)
    assert found == [found[0]] * 4


@pytest.mark.parametrize("lazy", [False, True], ids=["", "lazy sign"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_case
def test_numbers_that_are_changed_in_place(name, backend, dtype, lazy, device):
    """Tensors for the rate and, in SGD, the weight decay, compared with torch's optimizer that is given numbers."""
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    lr, weight_decay = (torch.tensor(x, dtype=dtype, device=device) for x in (0.1, 0.2))
    if lazy:
        lr, weight_decay = torch._neg_view(-lr), torch._neg_view(-weight_decay)
    ours, torchs = ours_of(name, named, backend, lr=lr), torchs_of(name, expected)
    ours.param_groups[0]["weight_decay"] = weight_decay
    for step, (rate, decay) in enumerate([(0.1, 0.2), (0.05, 0.0), (0.0, 0.1), (0.3, 0.3)]):
        lr.fill_(rate), weight_decay.fill_(decay)
        torchs.param_groups[0].update(lr=lr.item(), weight_decay=weight_decay.item())
        train((ours, torchs), (named, expected), 1)
        compare_weights(close, named, expected, 4 * (step + 1))
    assert ours.param_groups[0]["lr"] is lr


def test_weight_decay_of_float64_keeps_its_bits(device):
    """A rate in float32 does not round a decay that does not depend on it."""
    param, expected = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=device)) for _ in range(2))
    param.grad, expected.grad = torch.zeros_like(param), torch.zeros_like(param)
    lr = torch.tensor(1.0, device=device)
    OURS["sgd"]([param], lr=lr, weight_decay=0.1, capturable=True).step()
    TORCH["sgd"]([expected], lr=1.0, weight_decay=0.1).step()
    same(param.detach(), expected.detach())


@pytest.mark.parametrize("capturable", [True, False])
@every_case
def test_state_dicts_go_to_torch_and_back(name, backend, capturable, device):
    """torch's capturable AdamW asks for a GPU; its dict, which says so, does not."""
    ours, torchs, named, expected = beside_torch(name, SHAPES, device, backend, own=CAPTURABLE)
    train((ours,), (named,), 3)
    state = saved(ours.state_dict())
    for group in state["param_groups"]:
        assert group["capturable"] is True
        group["capturable"] = capturable and device.type == "cuda" and name == "adamw"
    torchs.load_state_dict(state)
    with torch.no_grad():
        for (_, p), (_, q) in zip(named, expected, strict=True):
            q.copy_(p)
    train((ours, torchs), (named, expected), 3)
    check = partial(close, steps=12)
    compare_weights(check, named, expected)
    back = saved(torchs.state_dict())
    if "capturable" in back["param_groups"][0]:
        back["param_groups"][0]["capturable"] = capturable
    again = twin(expected)
    resumed = ours_of(name, again, backend)
    resumed.load_state_dict(back)
    # implementation options do not change after construction
    assert resumed.param_groups[0]["capturable"] is True
    train((resumed, torchs), (again, expected), 3)
    for (_, p), (_, q) in zip(again, expected, strict=True):
        check(p.detach(), q.detach())
        if name == "adamw":
            assert resumed.state[p]["step"].item() == 9
            assert resumed.state[p]["step"].device == p.device


@every_case
def test_groups_that_differ(name, backend, device):
    """One capturable group makes the device count for all groups; the other groups may have tensors or numbers."""
    named, expected = twin_parameters([(6, 5), (130,)], torch.float32, device)
    rates = [torch.tensor(x, device=device) for x in (0.1, 0.02)]
    groups = [{"params": [named[i]], "lr": rates[i], "capturable": i == 1} for i in range(2)]
    ours = OURS[name](groups, **OPTIONS[name], backend=backend)
    torchs = torchs_of(name, [{"params": [expected[i]], "lr": rates[i].item()} for i in range(2)])
    for step in range(3):
        train((ours, torchs), (named, expected), 1)
        for (_, p), (_, q) in zip(named, expected, strict=True):
            close(p.detach(), q.detach(), steps=4 * (step + 1))
            assert ours.state[p]["step"].item() == step + 1
            assert ours.state[p]["step"].device == p.device


@every_case
def test_switched_on_and_off(name, backend, device):
    """In the middle of training: counts move to the device and back."""
    ours, torchs, named, expected = beside_torch(name, [(6, 5), (130,)], device, backend)
    for step, capturable in enumerate([False, True, True, False, False, True]):
        ours.param_groups[0]["capturable"] = capturable
        train((ours, torchs), (named, expected), 1)
        for (_, p), (_, q) in zip(named, expected, strict=True):
            close(p.detach(), q.detach(), steps=4 * (step + 1))
            if name == "adamw":
                assert ours.state[p]["step"].item() == step + 1


@pytest.mark.parametrize("name", ["adamw", "lion"])
@every_backend
def test_slices_go_by_the_same_count(backend, name, device):
    """All slices of a parameter share one step count, as in AdamW's bias correction."""
    named, whole = twin_parameters([(6, 5)], torch.float32, device)
    etas = {"p0[0:2]": 2.0, "p0[2:6]": 2.0}
    sliced = ALL[name](named, **OPTIONS[name], layers=etas, capturable=True, backend=backend)
    plain = ALL[name](whole, **{**OPTIONS[name], "lr": 0.02}, backend=backend)
    train((sliced, plain), (named, whole), 3)
    close(named[0][1].detach(), whole[0][1].detach(), steps=3)
    assert sliced.state[named[0][1]]["step"].item() == 3
