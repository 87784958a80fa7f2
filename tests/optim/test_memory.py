"""Memory of an optimizer, without parameters and state: small, constant over steps, and freed in time."""

import gc
import sys
import tracemalloc
import weakref
from types import FunctionType, ModuleType

import pytest
import torch
from cases import KINDS, every_backend, every_name, name_of
from steps import OPTIONS, OURS, gradients, parameters, train
from tables import TILE
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime import jit

from bench.bytes_moved import without_kernels
from fused_lwlr import LAMB
from fused_lwlr.kernels.constants import GPU

# Triton 3.4 has no `JITCallable`
KERNEL = getattr(jit, "JITCallable", jit.JITFunction)
pytestmark = pytest.mark.filterwarnings("ignore:scaling=.* selects none of the:UserWarning")
PER_TILE, PER_TENSOR = 64, 256
CONTROLS = [{}, {"clip_global_norm": 1.0}, {"nonfinite": "skip"}, {"nonfinite": "raise"}]
MORE = [*CONTROLS, {"ema": 0.9}, *({"scaling": scaling} for scaling in KINDS)]
every_control = pytest.mark.parametrize("more", MORE, ids=lambda more: "-".join([*more, *map(name_of, more.values())]))
# each of these holds objects that the other one does not
FULLEST = [{}, {"scaling": LAMB(), "clip_global_norm": 1.0, "nonfinite": "raise"}]
every_kind = pytest.mark.parametrize("more", FULLEST, ids=["plain", "controlled"])


@pytest.fixture(autouse=True, scope="module")
def _warm():
    """The first step of any optimizer imports parts of torch, which keep its frames until they are collected."""
    named = parameters([(2,)], torch.float32, torch.device("cpu"))
    train((torch.optim.SGD(named),), (named,), 1)
    gc.collect()


@pytest.fixture
def _no_collector():
    """Memory is freed without the garbage collector: there are no reference cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def _no_launch():
    with without_kernels():
        yield


def made(name, shapes, device, backend, **more):
    named = parameters(shapes, torch.float32, device)
    return OURS[name](named, **OPTIONS[name], backend=backend, **more), named


def tensors_within(*things):
    """All objects that can be reached from the given ones, except members of modules, classes and functions."""
    found, seen, waiting = {}, set(), list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType, KERNEL)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing
        else:
            waiting += gc.get_referents(thing)
    return list(found.values())


@pytest.mark.parametrize(
    ("name", "shapes"),
    # SGD has a table of fewer columns
    [
        ("sgd", [(1,)] * 40),
        *(("adamw", [*each]) for each in ([(1,)] * 40, [(TILE * 50 + 1,)], [(TILE + 1,), (3, 5)] * 20)),
    ],
)
@every_control
@pytest.mark.usefixtures("_no_launch")
def test_tables_are_small(name, more, shapes, device):
    optimizer, named = made(name, shapes, device, "triton", **more)
    train((optimizer,), (named,), 2)
    own = tensors_within([p for _, p in named], [p.grad for _, p in named], *optimizer.state.values())
    own = {t.untyped_storage().data_ptr() for t in own}
    rest = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", "defaults")}
    held = [t for t in tensors_within(rest) if t.device.type == device.type]
    size = sum(t.untyped_storage().nbytes() for t in held if t.untyped_storage().data_ptr() not in own)
    tiles = sum(-(-p.numel() // TILE) for _, p in named)
    assert size >= 8 * tiles, "the tables were not found"
    tiles = sum(-(-p.numel() // GPU.queue_tile) for _, p in named)
    assert size < PER_TILE * tiles + PER_TENSOR * len(named)


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


STEPS = 6_000
TRACED = 1_000
"""Steps for which allocations are counted by the byte, which takes ten times as long."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend", "more"),
    [("sgd", "torch", FULLEST[1]), ("adamw", "torch", {}), ("sgd", "triton", {}), ("adamw", "triton", FULLEST[1])],
)
@pytest.mark.usefixtures("_no_launch")
def test_nothing_grows(name, backend, more, device):
    """Steps leak no tensor, object or pointer, with new rates and gradients in every step."""
    optimizer, named = made(name, [(3,)], device, backend, **more)
    [(_, p)] = named
    memory = [torch.rand_like(p) for _ in range(3)]
    taken = 0

    def advance(steps):
        nonlocal taken
        for _ in range(steps):
            taken += 1
            optimizer.param_groups[0]["lr"] = 0.01 / taken
            # a new tensor, at an address that varies
            p.grad = memory[taken % 3].view_as(p)
            optimizer.step()
        # Python caches about a thousand attribute names, and torch's C++ makes new ones each time
        sys._clear_type_cache()
        return live_tensors(), sys.getallocatedblocks()

    tensors, blocks = advance(TRACED)
    tensors_later, blocks_later = advance(STEPS - 3 * TRACED)
    assert tensors_later == tensors
    # torch's profiler and the interpreter itself keep a few
    assert blocks_later - blocks < (STEPS - 3 * TRACED) / 10
    tracemalloc.start()
    try:
        sizes = [(advance(TRACED)[0], tracemalloc.get_traced_memory()[0]) for _ in range(2)]
    finally:
        tracemalloc.stop()
    assert taken == STEPS
    assert sizes[1][0] == tensors
    assert sizes[1][1] - sizes[0][1] < 8 * TRACED


@every_kind
@every_backend
@every_name
@pytest.mark.usefixtures("_no_collector")
def test_gradients_go_with_zero_grad(name, backend, more, device):
    optimizer, named = made(name, [(3, 4), (5,)], device, backend, **more)
    for turned in (False, True, False):
        gradients(named)
        if turned:
            # strides for which a copy stands in
            named[0][1].grad = named[0][1].grad.T.contiguous().T
        refs = [weakref.ref(p.grad) for _, p in named]
        optimizer.step()
        optimizer.zero_grad()
        assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("taken", [0, 1])
@every_kind
@every_name
@pytest.mark.usefixtures("_no_collector")
def test_gradients_go_with_zero_grad_after_a_failure(name, more, taken, device, monkeypatch):
    optimizer, named = made(name, [(3, 4), (5,)], device, "torch", **more)
    train((optimizer,), (named,), taken)
    gradients(named)
    refs = [weakref.ref(p.grad) for _, p in named]

    def fail(*arguments, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["fused_lwlr.kernels.reference"], "prepare", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.zero_grad()
    assert [ref() for ref in refs] == [None, None]


@every_backend
@every_name
@pytest.mark.usefixtures("_no_collector")
def test_the_memory_of_a_moved_parameter_is_freed(name, backend, device):
    """At once, and not in the next step, also of a parameter whose gradient is absent now."""
    named = parameters([(3, 4), (5,)], torch.float32, device)
    optimizer = OURS[name]([p for _, p in named], **OPTIONS[name], backend=backend)
    train((optimizer,), (named,), 2)
    gradients(named)
    named[1][1].grad = None
    optimizer.step()
    memory = [StorageWeakRef(p.untyped_storage()) for _, p in named]
    for _, p in named:
        p.data = p.data.clone()
    assert all(storage.expired() for storage in memory)


@every_backend
@every_name
@pytest.mark.usefixtures("_no_collector")
def test_gradients_go_with_zero_grad_after_a_refusal(name, backend, device):
    """Includes the gradient of the first launch, which was prepared before the second one was refused."""
    named = parameters([(3, 4)], torch.float32, device) + parameters([(5,)], torch.bfloat16, device)
    optimizer = OURS[name]([p for _, p in named], **OPTIONS[name], backend=backend)
    train((optimizer,), (named,), 1)
    gradients(named)
    named[1][1].grad = named[1][1].grad.to_sparse()
    refs = [weakref.ref(p.grad) for _, p in named]
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    optimizer.zero_grad()
    assert [ref() for ref in refs] == [None, None]
    train((optimizer,), (named,), 1)


@every_kind
@every_backend
@every_name
@pytest.mark.usefixtures("_no_collector")
def test_a_removed_parameter_goes_with_the_next_step(name, backend, more, device):
    optimizer, named = made(name, [(3, 4), (5,)], device, backend, **more)
    train((optimizer,), (named,), 2)
    refs = [weakref.ref(thing) for thing in (named[1][1], *optimizer.state[named[1][1]].values())]
    assert len(refs) > 1
    group = optimizer.param_groups[0]
    optimizer.state.pop(group["params"].pop())
    group["param_names"].pop()
    named.pop()
    train((optimizer,), (named,), 1)
    assert [ref() for ref in refs] == [None] * len(refs)


@every_kind
@every_backend
@every_name
@pytest.mark.usefixtures("_no_collector")
def test_replaced_state_goes_with_release(name, backend, more, device):
    optimizer, named = made(name, [(3, 4), (5,)], device, backend, **more)
    train((optimizer,), (named,), 2)
    refs = [weakref.ref(entry) for state in optimizer.state.values() for entry in state.values()]
    for state in optimizer.state.values():
        state.update({key: entry.clone() for key, entry in state.items()})
    optimizer.release()
    assert len(refs) > 1
    assert [ref() for ref in refs] == [None] * len(refs)
    train((optimizer,), (named,), 1)


@every_kind
@every_backend
@every_name
@pytest.mark.usefixtures("_no_collector")
def test_an_optimizer_goes_at_once(name, backend, more, device):
    """With its state and its tables, while the parameters stay."""
    optimizer, named = made(name, [(3, 4), (5,)], device, backend, **more)
    train((optimizer,), (named,), 2)
    # not the arrays of numpy within
    things = tensors_within({key: value for key, value in vars(optimizer).items() if key != "param_groups"})
    refs = [
        weakref.ref(thing)
        for thing in (optimizer, optimizer._last_plans[0], *things)
        if all(thing is not p for _, p in named)
    ]
    assert len(refs) > 3
    del optimizer, things
    for _, p in named:
        p.grad = None
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("refused", [False, True])
@every_kind
@every_backend
@every_name
@pytest.mark.usefixtures("_no_collector")
def test_loading_frees_the_old_state(name, backend, more, refused, device):
    """Frees the old state, and a dict that was refused."""
    optimizer, named = made(name, [(3, 4), (5,)], device, backend, **more)
    train((optimizer,), (named,), 2)
    other, others = made(name, [(3, 4), (5,)], device, backend, **more)
    train((other,), (others,), 1)
    checkpoint = other.state_dict()
    if refused:
        checkpoint["param_groups"][0]["lr"] = -1.0
    mine = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    theirs = [weakref.ref(value) for state in other.state.values() for value in state.values()]
    if refused:
        with pytest.raises(ValueError, match="'lr'"):
            optimizer.load_state_dict(checkpoint)
    else:
        optimizer.load_state_dict(checkpoint)
        assert [ref() for ref in mine] == [None] * len(mine)
    del checkpoint, other
    assert [ref() for ref in theirs] == [None] * len(theirs)


@every_name
@pytest.mark.usefixtures("_no_collector")
def test_a_model_goes_at_once_where_its_optimizer_was_made(name, monkeypatch):
    """Also after an import of ZeroRedundancyOptimizer, whose hook inspects the callers of a constructor."""
    monkeypatch.setitem(
        sys.modules, "torch.distributed.optim.zero_redundancy_optimizer", ModuleType("zero_redundancy_optimizer")
    )
    model = torch.nn.Linear(3, 4)
    optimizer = OURS[name](model.parameters(), **OPTIONS[name])
    reference = weakref.ref(model)
    del model, optimizer
    assert reference() is None
