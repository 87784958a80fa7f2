"""An optimizer on the CPU for a model elsewhere: same bits as steps on the CPU, whenever copies are made."""

import threading
from copy import deepcopy

import pytest
import torch
from steps import ALL, OPTIONS, identical, saved, through_pickle, uniform
from test_in_backward import FEATURES, Net, deep
from tolerances import same
from torch import nn
from torch.autograd.graph import increment_version

import fused_lwlr
from fused_lwlr import ClipByLayer, offload_to_cpu
from fused_lwlr.optim import offload


class LateStream:
    """A stream of a CPU that copies as late as it may: when something waits for it. It logs the order of calls."""

    def __init__(self, device):
        assert device.type == "cpu"
        self.queue, self.log, self.lock = [], [], threading.Lock()

    def wait_for_device(self):
        self.log.append("follow")

    def copy(self, pairs):
        pairs = [*pairs]
        self.log.append(f"copy {len(pairs)}")
        # at once, as by a copy that has only begun
        increment_version([target for target, _ in pairs])
        with self.lock:
            self.queue += pairs

    def record(self):
        self.log.append("mark")
        with self.lock:
            until = len(self.queue) and self.queue[-1]

        def wait():
            self.log.append("arrived")
            self.run(until)

        return wait

    def make_device_wait(self):
        self.log.append("lead")
        self.run(None)

    @torch.no_grad()
    def run(self, until):
        with self.lock:
            while self.queue and until != 0:
                pair = self.queue.pop(0)
                pair[0].data.copy_(pair[1])
                if pair is until:
                    break


@pytest.fixture(params=["late", "own"])
def stream(request, monkeypatch, device):
    """The stream of the device, or the late one of a CPU."""
    if request.param == "own":
        return offload.CopyStream
    if device.type != "cpu":
        pytest.skip("copies of a CPU are made late; other devices have streams")
    made = []

    class Kept(LateStream):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(offload, "CopyStream", Kept)
    return made


class ByHand:
    """The loop of a user: gradients to the CPU after backward, a step there, weights back."""

    def __init__(self, cls, model, **options):
        self.model = model
        self.copies = {name: nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for name, p in named(model)}
        self.optimizer = cls(self.copies.items(), **deepcopy(options))

    def step(self):
        for name, param in named(self.model):
            if param.grad is not None:
                if hasattr(param, "grad_dtype"):
                    self.copies[name].grad_dtype = param.grad.dtype
                self.copies[name].grad = param.grad.cpu()
            param.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.write()

    @torch.no_grad()
    def write(self):
        for name, param in named(self.model):
            param.copy_(self.copies[name])


def named(model):
    return list(model.named_parameters())


def held(handle):
    """Buckets wait until the result is set, as where the CPU has other work."""
    go, mark = threading.Event(), handle._stream.record

    def late():
        arrived = mark()
        return lambda: (go.wait(30), arrived())

    handle._stream.record = late
    return go


def sides(cls, device, dtype=torch.float32, size=200, **options):
    """Two models of the same weights: one stepped by hand, and one that is offloaded."""
    model = Net().to(device, dtype)
    other = deepcopy(model)
    by_hand = ByHand(cls, model, **options)
    optimizer = cls(named(other), **deepcopy(options))
    offload_to_cpu(other, optimizer, max_bytes=size)
    return by_hand, other, optimizer


def backward(model, x, **forward):
    model(x, **forward).square().mean().backward()


def train(by_hand, other, optimizer, steps=3, **forward):
    for _ in range(steps):
        param = next(other.parameters())
        x = uniform((5, FEATURES), torch.float32, param.device).to(param.dtype)
        backward(by_hand.model, x, **forward)
        by_hand.step()
        optimizer.zero_grad()
        backward(other, x, **forward)
        optimizer.step()
        check(by_hand, other, optimizer)


def check(by_hand, other, optimizer):
    """The same bits in both models and in both states, no gradient, and state on the CPU."""
    assert identical(*([p.detach() for p in model.parameters()] for model in (by_hand.model, other)))
    states = [saved(it.state_dict()) for it in (by_hand.optimizer, optimizer)]
    assert identical(*states)
    assert states[0]["state"]
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert all(p.grad is None for p in [*other.parameters(), *optimizer.state])


ROWS = {
    "sgd": ("sgd", torch.float32, {}),
    "adamw": ("adamw", torch.float32, {"scaling": fused_lwlr.LAMB()}),
    "lion": ("lion", torch.float32, {}),
    "bfloat16": ("adamw", torch.bfloat16, {"master_weights": True, "ema": 0.9}),
    "layers": ("adamw", torch.float32, {"layers": {"blocks.0.weight[0:3]": 2.0, "norm.bias": {"weight_decay": 0.0}}}),
    "clipping": ("sgd", torch.float32, {"scaling": ClipByLayer(1e-3)}),
    "stochastic rounding": ("sgd", torch.bfloat16, {"stochastic_rounding": True}),
    "counts on the device": ("adamw", torch.float32, {"capturable": True}),
}


# each row runs with both backends, and one row with all sizes and streams, since buckets do not depend on options
@pytest.mark.parametrize(
    ("row", "size", "backend", "stream"),
    [(row, 200, *with_stream) for row in ROWS for with_stream in (("torch", "late"), ("triton", "own"))]
    + [("bfloat16", size, "torch", "late") for size in (1, 1 << 30)]
    + [("bfloat16", size, "torch", "own") for size in (1, 200, 1 << 30)],
    indirect=["stream"],
)
def test_same_bits(row, size, backend, stream, device):
    name, dtype, options = ROWS[row]
    train(*sides(ALL[name], device, dtype, size, **{**OPTIONS[name], "backend": backend, **options}))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_gradients_of_another_dtype(stream, device):
    pair = sides(ALL["adamw"], device, **OPTIONS["adamw"])
    for model in (pair[0].model, pair[1]):
        for param in model.parameters():
            param.grad_dtype = torch.bfloat16
    train(*pair)
    for model in (pair[0].model, pair[1]):
        for param in model.parameters():
            param.grad_dtype = param.dtype
    train(*pair)


def test_another_order_of_layers(stream, device):
    pair = sides(ALL["adamw"], device, **OPTIONS["adamw"])
    for order in [(0, 1, 2), (2, 1, 0), (0, 2), (0, 1, 2)]:
        train(*pair, 2, order=order)


def test_order_of_calls(stream):
    """Copies follow backward, a step follows its copies, and the model follows the last step."""
    if stream is offload.CopyStream:
        pytest.skip("the order is logged by the late stream")
    device = torch.device("cpu")
    model = deep(2).to(device)
    optimizer = ALL["sgd"](named(model), lr=0.1)
    offload_to_cpu(model, optimizer, max_bytes=1 << 30)
    for _ in range(2):
        model(uniform((4, 32), torch.float32, device)).sum().backward()
        optimizer.step()
    one_step = ["follow", "copy 4", "mark", "arrived", "copy 4", "lead"]
    assert stream[0].log == one_step * 2


def test_steps_run_beside_backward(device):
    """The first bucket is stepped in another thread, before backward ends."""
    model = deep(4).to(device)
    optimizer = ALL["adamw"](named(model), lr=0.1)
    offload_to_cpu(model, optimizer, max_bytes=1)
    stepped, threads = threading.Event(), set()
    step_bucket = optimizer.step_bucket

    def noted(plans, params):
        threads.add(threading.current_thread())
        result = step_bucket(plans, params)
        stepped.set()
        return result

    optimizer.step_bucket = noted
    in_time = []

    def wait_for_a_step(_):
        in_time.append(stepped.wait(30))

    next(model.parameters()).register_hook(wait_for_a_step)
    model(uniform((4, 32), torch.float32, device)).sum().backward()
    optimizer.step()
    assert in_time == [True]
    assert len(threads) == 1
    assert threading.current_thread() not in threads


# weights that others change, and state


def test_changed_weights(stream, device):
    """In-place changes of the model are stepped from, not overwritten."""
    by_hand, other, _ = pair = sides(ALL["adamw"], device, **OPTIONS["adamw"])
    train(*pair)
    weights = {name: value * 2 for name, value in other.state_dict().items()}
    other.load_state_dict(weights)
    with torch.no_grad():
        by_hand.model.load_state_dict(weights)
        for name, param in named(by_hand.model):
            by_hand.copies[name].copy_(param)
    train(*pair)


def test_averaged(stream, device):
    """The model has the averages within the context, and the trained and changed weights after it."""
    by_hand, other, optimizer = pair = sides(ALL["sgd"], device, ema=0.5, **OPTIONS["sgd"])
    train(*pair)
    with torch.no_grad():
        for one in (other.norm.weight, by_hand.model.norm.weight, by_hand.copies["norm.weight"]):
            one.fill_(3.0)
    trained = deepcopy(other.state_dict())
    with optimizer.averaged(), by_hand.optimizer.averaged():
        by_hand.write()
        assert identical(other.state_dict(), by_hand.model.state_dict())
        assert not identical(other.state_dict(), trained)
    by_hand.write()
    assert identical(other.state_dict(), trained)
    train(*pair)


def test_state_moves(stream, device):
    """State from before is kept, and goes back to the device of the model; checkpoints fit both ways."""
    model = Net().to(device)
    optimizer = ALL["adamw"](named(model), **OPTIONS["adamw"])
    x = uniform((5, FEATURES), torch.float32, device)
    backward(model, x)
    optimizer.step()
    optimizer.zero_grad()
    before = saved(optimizer.state_dict(), map_location="cpu")
    handle = offload_to_cpu(model, optimizer)
    assert identical(saved(optimizer.state_dict()), before)
    backward(model, x)
    optimizer.step()
    after = saved(optimizer.state_dict())
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    handle.remove()
    assert identical(saved(optimizer.state_dict(), map_location="cpu"), after)
    moved = {value.device.type for state in optimizer.state.values() for key, value in state.items() if key != "step"}
    assert moved == {device.type}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    weights = deepcopy(model.state_dict())
    backward(model, x)
    optimizer.step()
    assert not identical(model.state_dict(), weights)
    optimizer.load_state_dict(before)


def test_copies(device):
    """A copy of the model is a model without hooks, whose optimizer is made from the state dict."""
    model = Net().to(device)
    optimizer = ALL["adamw"](named(model), **OPTIONS["adamw"])
    handle = offload_to_cpu(model, optimizer)
    x = uniform((5, FEATURES), torch.float32, device)
    for _ in range(2):
        backward(model, x)
        optimizer.step()
    for copy in (deepcopy, through_pickle):
        with pytest.raises(RuntimeError, match=r"an optimizer cannot be copied after offload_to_cpu\(\)"):
            copy((model, optimizer))
    other = deepcopy(model)
    its = ALL["adamw"](named(other), **OPTIONS["adamw"])
    its.load_state_dict(optimizer.state_dict())
    handle.remove()
    pairs = (model, optimizer), (other, its), deepcopy((model, optimizer))
    for one, stepped in pairs:
        backward(one, x)
        stepped.step()
    for one, stepped in pairs[1:]:
        assert identical(one.state_dict(), model.state_dict())
        assert identical(stepped.state_dict(), optimizer.state_dict())


def test_backward_that_raises(stream, device):
    """`zero_grad()` waits for the buckets that were stepped, and the next step is whole."""
    model = deep(4).to(device)
    optimizer = ALL["adamw"](named(model), lr=0.1)
    offload_to_cpu(model, optimizer, max_bytes=1)
    x = uniform((4, 32), torch.float32, device)
    handle = model[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    assert {float(optimizer.state[p]["step"]) for p in optimizer.param_groups[0]["params"]} == {1.0, 2.0}


def fails_in_backward(device):
    """A model that was stepped once, its optimizer, the handle, and a backward pass that raised while buckets wait."""
    model = deep(4).to(device)
    optimizer = ALL["adamw"](named(model), lr=0.1)
    handle = offload_to_cpu(model, optimizer, max_bytes=1)
    x = uniform((4, 32), torch.float32, device)
    model(x).sum().backward()
    optimizer.step()
    checkpoint = deepcopy((model.state_dict(), optimizer.state_dict()))
    go, hook = held(handle), model[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    hook.remove()
    return model, optimizer, handle, checkpoint, go


@pytest.mark.parametrize("order", ["zero_grad model optimizer", "optimizer model", "model optimizer"])
def test_a_checkpoint_after_backward_that_raises(order, stream, device):
    """Weights and state equal the checkpoint: no waiting bucket steps them or is copied over them."""
    model, optimizer, handle, (weights, state), go = fails_in_backward(device)
    calls = {
        "zero_grad": optimizer.zero_grad,
        "model": lambda: model.load_state_dict(weights),
        "optimizer": lambda: optimizer.load_state_dict(state),
    }
    for name in order.split():
        if name != "model":
            threading.Timer(0.1, go.set).start()
        calls[name]()
    # all steps are taken, and all copies have landed
    optimizer.zero_grad()
    handle._stream.make_device_wait()
    assert identical(model.state_dict(), weights)
    assert identical(saved(optimizer.state_dict()), saved(state))


def test_removed_after_backward_that_raises(stream, device):
    """The model has the weights of the buckets that were stepped."""
    model, optimizer, handle, (weights, _), go = fails_in_backward(device)
    threading.Timer(0.1, go.set).start()
    handle.remove()
    stepped = {name for name, param in named(model) if optimizer.state[param]["step"] == 2}
    assert 0 < len(stepped) < len(weights)
    assert stepped == {name for name, weight in model.state_dict().items() if not identical(weight, weights[name])}


def test_interrupted_while_a_step_waits(device, monkeypatch):
    """Ctrl-C loses no bucket: the next step() waits for all of them."""
    model = deep(2).to(device)
    optimizer = ALL["adamw"](named(model), lr=0.1)
    go = held(offload_to_cpu(model, optimizer, max_bytes=1))
    model(uniform((4, 32), torch.float32, device)).sum().backward()

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(offload, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    threading.Timer(0.1, go.set).start()
    optimizer.step()
    copies = optimizer.param_groups[0]["params"]
    assert [float(optimizer.state[copy]["step"]) for copy in copies] == [1.0] * 4
    assert identical([copy.detach() for copy in copies], [param.detach().cpu() for param in model.parameters()])


def test_gradients_that_are_dropped(stream, device):
    """`zero_grad()` in place of a step drops the gradients of the model."""
    by_hand, other, optimizer = pair = sides(ALL["adamw"], device, size=1 << 30, **OPTIONS["adamw"])
    backward(other, uniform((5, FEATURES), torch.float32, device))
    assert any(p.grad is not None for p in other.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in other.parameters())
    train(*pair)
    assert by_hand.optimizer.state


@pytest.mark.parametrize("call", ["step", "remove"])
def test_error_of_a_step(call, device):
    """An error of the other thread is raised by the next call that waits for it."""
    model = deep(2).to(device)
    optimizer = ALL["adamw"](named(model), lr=0.1)
    handle = offload_to_cpu(model, optimizer, max_bytes=1)
    optimizer.param_groups[0]["layers"] = "high"
    model(uniform((4, 32), torch.float32, device)).sum().backward()
    with pytest.raises(ValueError, match="'layers' of a state dict must be None or JSON"):
        getattr(optimizer if call == "step" else handle, call)()
    handle.remove()
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_refused_option_leaves_the_gradients(device):
    """As in `step_in_backward`, the step can be repeated."""
    model = nn.Linear(2, 2, bias=False).to(device)
    optimizer = fused_lwlr.SGD(model.parameters(), lr=1.0)
    offload_to_cpu(model, optimizer)
    model(torch.ones(1, 2, device=device)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="'lr' of a param group must be a finite number, at least 0, not -1"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    same(model.weight.detach(), before - 0.5)


def test_a_parameter_of_a_group_is_not_added_again(device):
    """The groups have copies of the model's parameters."""
    model, other = nn.Linear(3, 2).to(device), nn.Linear(3, 2).to(device)
    optimizer = fused_lwlr.SGD(model.parameters(), lr=0.1)
    offload_to_cpu(model, optimizer)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [other.bias, model.bias]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [other.bias]})
    assert len(optimizer.param_groups) == 2


def test_the_optimizer_stays_as_it_is(device):
    """State moves without hooks and checks of checkpoints, and the tensor of a rate stays the tensor of the user."""
    model, rate = nn.Linear(3, 2).to(device), torch.tensor(0.1)
    optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=rate)
    optimizer.register_state_dict_post_hook(lambda optimizer, found: {**found, "state": {}})

    def step():
        model(torch.randn(2, 3, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    handle = offload_to_cpu(model, optimizer)
    assert [state["step"].item() for state in optimizer.state.values()] == [1, 1]
    step()
    rate.fill_(0.0)
    before = deepcopy(model.state_dict())
    step()
    assert identical(model.state_dict(), before)
    # refused in a state dict
    optimizer.param_groups[0]["weight_decay"] = -1
    handle.remove()
    assert [state["step"].item() for state in optimizer.state.values()] == [3, 3]
    assert list(optimizer.state) == list(model.parameters())
