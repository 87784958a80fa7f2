"""Steps during backward equal a step after it, with the gradients of one bucket in memory at a time."""

import gc
import shutil
import weakref
from copy import deepcopy

import pytest
import torch
from cases import BACKENDS, KINDS, SCALINGS, long, name_of
from fuzzing import REPLACED
from hypothesis import given
from hypothesis import strategies as st
from steps import ALL, OPTIONS, compare, identical, parameters, saved, uniform
from tolerances import same
from torch import nn

import fused_lwlr
from fused_lwlr import ELR, LAMB, LARS, ClipByLayer, StepStatistics
from fused_lwlr.optim import base
from fused_lwlr.scaling import everything

STEPS, FEATURES = 3, 6
# one parameter each, two or three, all of them
SIZES = (1, 200, 1 << 30)
RULES = {**ALL, "lr in momentum": ALL["sgd"]}
RULE_OPTIONS = {**OPTIONS, "lr in momentum": {**OPTIONS["sgd"], "lr_in_momentum": True}}


class Net(nn.Module):
    """Tied weights, a frozen parameter, a parameter without a gradient, and a 0-dimensional one."""

    def __init__(self, frozen=True):
        super().__init__()
        self.embedding = nn.Linear(FEATURES, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.temperature = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.blocks[0].weight
        if frozen:
            self.blocks[1].weight.requires_grad_(False)

    def forward(self, x, order=(0, 1, 2)):
        x = self.norm(self.embedding(x))
        for i in order:
            x = x + self.blocks[i](x).tanh()
        return self.head(x) * self.temperature


def twins(cls, device, dtype=torch.float32, size=200, groups=None, net=Net, **options):
    """Two models of the same weights, each with its optimizer; the second is stepped in backward."""
    model = net().to(device, dtype)
    sides = []
    for one in (model, deepcopy(model)):
        named = list(one.named_parameters())
        sides.append((one, cls(named if groups is None else groups(named), **deepcopy(options))))
    if size is not None:
        fused_lwlr.step_in_backward(*sides[1], max_bytes=size)
    return sides


def train(sides, steps=STEPS):
    for _ in range(steps):
        param = next(sides[0][0].parameters())
        x = uniform((5, FEATURES), torch.float32, param.device).to(param.dtype)
        for model, optimizer in sides:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def check(sides):
    """The same bits of parameters and state, and no gradient where the step was in backward."""
    (model, optimizer), (other, in_backward) = sides
    compare(same, optimizer, in_backward, list(model.named_parameters()), list(other.named_parameters()))
    assert all(param.grad is None for param in other.parameters())


# buckets do not depend on rules and formulas: each scaling runs once, and one of each kind with other dtypes, with
# kernels and with other rules
ROWS = [
    *(("adamw", "torch", scaling, torch.float32) for scaling in (None, *SCALINGS)),
    *(("adamw", "torch", None, dtype) for dtype in (torch.bfloat16, torch.float64)),
    *(long("adamw", "torch", scaling, dtype) for dtype in (torch.bfloat16, torch.float64) for scaling in KINDS),
    *(("adamw", "triton", scaling, torch.float32) for scaling in (None, *KINDS)),
    *((name, "torch", None, torch.float32) for name in ("sgd", "lion")),
    *(long(name, "torch", scaling, torch.float32) for name in ("sgd", "lion") for scaling in KINDS),
    *((name, "triton", None, torch.float32) for name in ("sgd", "lion")),
    *(("lr in momentum", backend, ELR(0.1), torch.float32) for backend in BACKENDS),
    ("adamw", "triton", None, torch.bfloat16),
]


@pytest.mark.parametrize(("name", "backend", "scaling", "dtype"), ROWS, ids=name_of)
def test_same_bits(name, backend, scaling, dtype, device):
    # buckets are the same for all rules, backends and dtypes
    every_size = scaling is None or (scaling in KINDS and name == "adamw" and dtype == torch.float32)
    for size in SIZES if every_size else SIZES[1:2]:
        options = {**RULE_OPTIONS[name], "backend": backend, "scaling": scaling}
        sides = twins(RULES[name], device, dtype, size, **options)
        train(sides)
        check(sides)
        if scaling is not None:
            expected, found = (optimizer.layer_stats() for _, optimizer in sides)
            assert isinstance(found, StepStatistics)
            assert (found.names, found.constrained) == (expected.names, expected.constrained)
            same(found.values, expected.values)


def two_groups(named):
    return [{"params": named[::2]}, {"params": named[1::2], "lr": 0.003, "weight_decay": 0.0}]


MORE = {
    "ema": ("adamw", torch.float32, {"ema": 0.9}),
    "master weights": ("adamw", torch.bfloat16, {"master_weights": True, "ema": 0.9, "scaling": LAMB()}),
    "state_dtype": ("sgd", torch.float32, {"state_dtype": torch.bfloat16}),
    "multipliers": ("sgd", torch.float32, {"layers": {"blocks.0.weight[0:3]": 2.0, "norm.bias": 0.5}}),
    "groups": ("adamw", torch.float32, {"groups": two_groups}),
    "groups and clipping": ("sgd", torch.bfloat16, {"groups": two_groups, "scaling": ClipByLayer(1e-3)}),
    "amsgrad": ("adamw", torch.float32, {"amsgrad": True, "maximize": True}),
    "nesterov": ("sgd", torch.float32, {"nesterov": True}),
    "no state": ("sgd", torch.float32, {"momentum": 0}),
    "counts on the device": ("adamw", torch.float32, {"capturable": True}),
    "tensor lr": ("adamw", torch.float32, {"lr": torch.tensor(0.01)}),
    "stochastic rounding": ("sgd", torch.bfloat16, {"stochastic_rounding": True}),
    "patterns": ("sgd", torch.float32, {"scaling": LARS(select="blocks.*")}),
}


# the rows whose kernels other tests use, too
SHARED = [row for row in MORE if row not in ("master weights", "groups and clipping", "state_dtype", "amsgrad")]


@pytest.mark.parametrize(
    ("row", "backend"),
    [(row, "torch") for row in MORE]
    + [(row, "triton") for row in SHARED]
    + [long(row, "triton") for row in MORE if row not in SHARED],
)
def test_options(row, backend, device):
    name, dtype, options = MORE[row]
    sides = twins(ALL[name], device, dtype, **{**OPTIONS[name], "backend": backend, **options})
    train(sides)
    check(sides)


def unnamed(named):
    return [param for _, param in named]


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_without_names(backend, device):
    """Hooks are called with the parameter's position in the optimizer, not in the bucket."""
    sides = twins(ALL["sgd"], device, groups=unnamed, lr=0.1, scaling=ELR(0.1), backend=backend)
    train(sides)
    expected, found = (optimizer.layer_stats() for _, optimizer in sides)
    assert found.names == expected.names
    same(found.values, expected.values)


@pytest.mark.parametrize("size", SIZES)
def test_plans_are_kept(size, monkeypatch, device):
    made = []

    class Counted(base.StepPlan):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(base, "StepPlan", Counted)
    sides = twins(ALL["adamw"], device, size=size, **OPTIONS["adamw"])[1:]
    train(sides, 1)
    buckets = len(made)
    assert buckets == {1: 9, 200: 3, 1 << 30: 1}[size]
    train(sides, 3)
    assert len(made) == buckets
    # members of one bucket only
    model, optimizer = sides[0]
    stepped = [
        row.layer_index for each in optimizer._last_plans for plan in each.launch_plans for row in plan.table.rows
    ]
    assert sorted(stepped) == [i for i, p in enumerate(model.parameters()) if optimizer.state.get(p)]


# memory


def deep(layers=12, features=32):
    return nn.Sequential(*(nn.Sequential(nn.Linear(features, features), nn.Tanh()) for _ in range(layers)))


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("take", "layers_at_once"),
    [*((fused_lwlr.step_in_backward, count) for count in (None, 0, 1, 3)), (fused_lwlr.offload_to_cpu, 1)],
)
def test_peak_of_gradients(take, layers_at_once, device):
    model = deep().to(device)
    params = list(model.parameters())
    total, largest = bytes_of(params), max(bytes_of([param]) for param in params)
    sampled = []
    for param in params:
        # before the hooks of the optimizer, when there are most
        param.register_post_accumulate_grad_hook(
            lambda _: sampled.append(bytes_of(p.grad for p in params if p.grad is not None))
        )
    optimizer = ALL["adamw"](model.named_parameters(), lr=0.01)
    max_bytes = None if layers_at_once is None else max(layers_at_once * largest, 1)
    if max_bytes is not None:
        take(model, optimizer, max_bytes=max_bytes)
    for _ in range(3):
        optimizer.zero_grad()
        model(uniform((4, 32), torch.float32, device)).sum().backward()
        optimizer.step()
    assert len(sampled) == 3 * len(params)
    if max_bytes is None:
        assert max(sampled) == total
    else:
        assert max(sampled) <= max_bytes + largest < total / 2


def test_gradients_are_freed(device):
    """References outside `.grad` are gone too."""
    model = deep(4).to(device)
    optimizer = ALL["adamw"](model.named_parameters(), lr=0.01)
    fused_lwlr.step_in_backward(model, optimizer, max_bytes=1)
    seen = []
    for param in model.parameters():
        param.register_hook(lambda grad: seen.append(weakref.ref(grad)))
    model(uniform((4, 32), torch.float32, device)).sum().backward()
    assert len(seen) == 8
    gc.collect()
    assert all(grad() is None for grad in seen)


def test_nothing_is_kept_alive(device):
    model = deep(4).to(device)
    optimizer = ALL["adamw"](model.named_parameters(), lr=0.01)
    fused_lwlr.step_in_backward(model, optimizer, max_bytes=5000)
    model(uniform((4, 32), torch.float32, device)).sum().backward()
    optimizer.step()
    references = [weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
    del model, optimizer
    gc.collect()
    assert all(reference() is None for reference in references)


# training loops


def test_scheduler_and_hooks(device):
    """Schedulers and hooks of the optimizer see one step for each `optimizer.step()`."""
    sides = twins(ALL["adamw"], device, **OPTIONS["adamw"])
    counts = [[], []]
    for (_, optimizer), count in zip(sides, counts, strict=True):
        optimizer.register_step_post_hook(lambda *args, count=count: count.append(1))
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9) for _, optimizer in sides]
    for _ in range(8):
        train(sides, 1)
        for scheduler in schedulers:
            scheduler.step()
    check(sides)
    assert [len(count) for count in counts] == [8, 8]
    assert {float(state["step"]) for state in sides[1][1].state.values()} == {8.0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_dicts(backend, device):
    """Both ways, in the middle of training; a scaling that is replaced."""
    sides = twins(ALL["adamw"], device, backend=backend, ema=0.9, **OPTIONS["adamw"])
    train(sides, 2)
    dicts = [saved(optimizer.state_dict()) for _, optimizer in sides]
    assert identical(*dicts)
    train(sides, 1)
    for (_, optimizer), state_dict in zip(sides, reversed(dicts), strict=True):
        optimizer.load_state_dict(state_dict)
    train(sides, 2)
    check(sides)
    for _, optimizer in sides:
        optimizer.scaling = ClipByLayer(1e-3)
    train(sides, 2)
    check(sides)


def test_a_copy_has_no_hooks(device):
    _, pair = twins(ALL["adamw"], device, **OPTIONS["adamw"])
    check_untouched(*deepcopy(pair))


@pytest.mark.parametrize("backend", BACKENDS)
def test_remove(backend, device):
    """Also in the middle of a step: `step()` then steps the remaining parameters."""
    sides = twins(ALL["adamw"], device, size=None, backend=backend, **OPTIONS["adamw"])
    model, optimizer = sides[1]
    handle = fused_lwlr.step_in_backward(model, optimizer, max_bytes=200)
    train(sides)
    x = uniform((5, FEATURES), torch.float32, device)
    before = model.blocks[2].weight.detach().clone()
    for one, each in sides:
        each.zero_grad()
        one(x).square().mean().backward()
    assert not torch.equal(model.blocks[2].weight, before)
    handle.remove()
    for _, each in sides:
        each.step()
        each.zero_grad()
    check(sides)
    check_untouched(model, optimizer)
    optimizer.zero_grad()
    fused_lwlr.step_in_backward(model, optimizer)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(reentrant, device):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.norm(self.embedding(x))
            for block in self.blocks[1:]:
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant).tanh()
            return x

    sides = twins(ALL["adamw"], device, net=Checkpointed, **OPTIONS["adamw"])
    train(sides)
    check(sides)


def test_a_weight_of_two_reentrant_checkpoints(device):
    """Both parts compute a gradient for the weight."""
    model = nn.Linear(4, 4).to(device)
    fused_lwlr.step_in_backward(model, ALL["sgd"](model.parameters(), lr=0.1))
    x = uniform((5, 4), torch.float32, device).requires_grad_()
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="has a second gradient before"):
        x.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_backward_still_needs(backend, device):
    """A use without a gradient does not delay the step: PyTorch says so, and the result is correct."""
    first, second = (nn.Linear(4, 4).to(device) for _ in range(2))
    model = nn.Sequential(first, second)
    optimizer = ALL["sgd"](model.parameters(), lr=0.1, backend=backend)
    fused_lwlr.step_in_backward(model, optimizer, max_bytes=1)
    x = first(uniform((5, 4), torch.float32, device)) @ second.weight.detach()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second(x).sum().backward()


def test_two_optimizers(device):
    """Two optimizers on one model: each steps its parameters, also where only one of them does so in backward."""
    models, sides = [Net().to(device)], []
    models += [deepcopy(models[0]) for _ in range(2)]
    for model in models:
        named = list(model.named_parameters())
        sides.append([ALL["adamw"](named[::2], lr=0.01), ALL["sgd"](named[1::2], lr=0.01)])
    fused_lwlr.step_in_backward(models[1], sides[1][0], max_bytes=1)
    for optimizer in sides[2]:
        fused_lwlr.step_in_backward(models[2], optimizer, max_bytes=200)
    for _ in range(3):
        x = uniform((5, FEATURES), torch.float32, device)
        for model, optimizers in zip(models, sides, strict=True):
            model.zero_grad()
            model(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    weights = [list(model.parameters()) for model in models]
    assert identical(weights[0], weights[1])
    assert identical(weights[0], weights[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_of_two_buckets(backend, device):
    named = parameters([(4000,), (4000,)], torch.bfloat16, device)
    model = nn.ParameterDict(dict(named))
    for param in model.values():
        nn.init.ones_(param)
    optimizer = ALL["sgd"](named, lr=1e-3, stochastic_rounding=True, backend=backend)
    fused_lwlr.step_in_backward(model, optimizer, max_bytes=1)
    sum(param.sum() for param in model.values()).backward()
    optimizer.step()
    first, second = ((param != 1).float() for param in model.values())
    # a step of 1e-3 is 0.256 of the distance to the next number below 1
    for moved in (first, second):
        assert abs(moved.mean() - 0.256) < 0.03
    assert abs((first * second).mean() - 0.256**2) < 0.02


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
# torch 2.14 looks for the gradient of each input of a compiled block
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiled", ["model", "loop"])
def test_compiled(compiled, device):
    import torch._dynamo

    torch._dynamo.reset()
    sides = twins(ALL["adamw"], device, **OPTIONS["adamw"])
    if compiled == "model":
        # one graph for each block, or all gradients are made at once
        for model, _ in sides:
            for block in model.blocks:
                block.compile()
        train(sides)
    else:
        step = torch.compile(train, backend="eager")
        for side in sides:
            torch.manual_seed(1)
            step([side])
    check(sides)


def check_untouched(model, optimizer):
    """No parameter is stepped by backward."""
    before = [param.detach().clone() for param in model.parameters()]
    model(uniform((5, FEATURES), torch.float32, before[0].device)).sum().backward()
    assert identical(before, [param.detach() for param in model.parameters()])
    assert not optimizer.options.in_backward


# random sequences

SHAPES = [(3,), (2, 3), (), (2, 2, 2, 2), (0,)]
WHICH = st.integers(0, 3)
OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.permutations(range(4)), st.sampled_from([4, 4, 3, 1, 0])),
    st.tuples(st.just("step"), st.permutations(range(4)), st.just(4)),
    st.tuples(st.just("reload")),
    st.tuples(st.just("forget")),
    st.tuples(st.just("edit"), WHICH, st.sampled_from([0.5, -1.0])),
    st.tuples(st.just("replace"), WHICH, st.sampled_from([*REPLACED])),
    st.tuples(st.just("lr"), st.sampled_from([0.5, 0.05])),
)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torch") for name in ALL), long("sgd", "triton"), ("adamw", "triton")],
)
def test_fuzz(name, backend, device):
    """Gradients arrive in any order, some not at all, mixed with other operations on an optimizer."""

    @given(
        st.lists(st.sampled_from(SHAPES), min_size=4, max_size=4), st.sampled_from([1, 20, 50, 1000]),
        st.sampled_from([None, ClipByLayer(0.5), LAMB(select=everything)]), st.sampled_from([None, 0.9]),
        st.lists(OPERATIONS, max_size=8),
    )  # fmt: skip
    def run(shapes, size, scaling, ema, operations):
        torch.manual_seed(0)
        sides = []
        named = parameters(shapes, torch.float32, device)
        for own in (named, deepcopy(named)):
            options = {**OPTIONS[name], "scaling": scaling, "ema": ema, "backend": backend}
            sides.append(([param for _, param in own], ALL[name](own, **options)))
        fused_lwlr.step_in_backward(nn.ParameterList(sides[1][0]), sides[1][1], max_bytes=size)
        for operation, *arguments in operations:
            if operation == "step":
                order, count = arguments
                for i in order[:count]:
                    grad = uniform(shapes[i], torch.float32, device)
                    for params, _ in sides:
                        params[i].backward(grad.clone())
            for params, optimizer in sides:
                if operation == "step":
                    optimizer.step()
                    optimizer.zero_grad()
                elif operation == "reload":
                    optimizer.load_state_dict(saved(optimizer.state_dict()))
                elif operation == "forget":
                    optimizer.state.clear()
                elif operation == "edit":
                    params[arguments[0]].data.mul_(arguments[1])
                elif operation == "replace":
                    params[arguments[0]].data = REPLACED[arguments[1]](params[arguments[0]].data)
                else:
                    optimizer.param_groups[0]["lr"] = arguments[0]
            own, other = ([(str(i), param) for i, param in enumerate(params)] for params, _ in sides)
            compare(same, sides[0][1], sides[1][1], own, other)

    run()


class FailsOnce(nn.Module):
    """Raises in the first backward pass, as if memory were exhausted."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 8)
        self.fails = True

    def forward(self, x):
        y = self.first(x)
        if self.fails:
            y.register_hook(self._fail)
        return self.second(y)

    def _fail(self, grad):
        self.fails = False
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("recovery", ["zero_grad", "load_state_dict"])
@pytest.mark.parametrize("size", SIZES)
def test_after_an_exception_in_backward(size, recovery, device):
    """zero_grad() and loading a checkpoint begin again: the next steps equal the steps of a twin that never failed."""
    model = FailsOnce().to(device)
    optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=0.1, backend="torch")
    before = deepcopy((model.state_dict(), optimizer.state_dict()))
    fused_lwlr.step_in_backward(model, optimizer, max_bytes=size)
    x = torch.randn(5, FEATURES, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        model(x).square().sum().backward()
    model.load_state_dict(before[0])
    if recovery == "zero_grad":
        optimizer.zero_grad()
        optimizer.state.clear()
    else:
        optimizer.load_state_dict(before[1])
    other = FailsOnce().to(device)
    other.fails = False
    other.load_state_dict(before[0])
    plain = fused_lwlr.AdamW(other.named_parameters(), lr=0.1, backend="torch")
    for _ in range(3):
        for each, its in ((model, optimizer), (other, plain)):
            its.zero_grad()
            each(x).square().sum().backward()
            its.step()
    assert identical(model.state_dict(), other.state_dict())


def test_loading_that_fails_keeps_the_gradients(device):
    """A hook raises after the state was read: the step that follows is the step without the attempt."""
    models = [Net(frozen=False).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(5, FEATURES, device=device)

    def fail(optimizer):
        raise KeyboardInterrupt

    for model in models:
        optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=0.1, backend="torch")
        fused_lwlr.step_in_backward(model, optimizer, max_bytes=1 << 20)
        state = optimizer.state_dict()
        model(x).square().sum().backward()
        if model is models[0]:
            optimizer.register_load_state_dict_post_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(state)
        optimizer.step()
        assert optimizer.state
    assert identical(models[0].state_dict(), models[1].state_dict())
