"""Scaled steps at their edges: launches and bytes, norms that are carried, zeros and NaN, statistics, copies."""

import math
import pickle
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from steps import OPTIONS, OURS, compare, gradients, identical, parameters, snapshot, train, twin
from tolerances import close, same

from fused_lwlr import (
    ELR,
    LAMB,
    LARC,
    LARS,
    ClipByLayer,
    LayerStatsLogger,
    NormalizedGradient,
    NormalizedGradientAdaptive,
    StepStatistics,
)
from fused_lwlr.kernels import triton
from fused_lwlr.kernels.triton import queue, workspace
from fused_lwlr.scaling import everything

BACKENDS = ("torch", "triton")
ALL = {"select": everything}
SCALINGS = [
    ELR(0.1), LARS(), LARC(), NormalizedGradient(), NormalizedGradientAdaptive(), ClipByLayer(0.5), LAMB()
]  # fmt: skip


def name_of(value):
    return value if isinstance(value, str) else type(value).__name__


CASES = [(name, backend) for name in OURS for backend in BACKENDS]
every_case = pytest.mark.parametrize(("name", "backend"), CASES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_name = pytest.mark.parametrize("name", OURS)
every_scaling = pytest.mark.parametrize("scaling", SCALINGS, ids=name_of)


def cost(optimizer, named):
    """Launches, and bytes from memory and from L2 for each element, of one step."""
    gradients(named)
    triton.counters.reset()
    optimizer.step()
    numel = sum(p.numel() for _, p in named)
    return triton.counters.launches, triton.counters.bytes / numel, triton.counters.cached / numel


@every_scaling
@pytest.mark.parametrize(
    ("name", "options", "memory", "state"),
    [
        ("sgd", {}, 12, 0), ("sgd", {"momentum": 0.9}, 20, 4), ("adamw", {}, 28, 8),
        ("adamw", {"amsgrad": True}, 36, 12)
    ],
)  # fmt: skip
def test_one_launch_and_its_bytes(name, options, memory, state, scaling, device):
    """w, g and state once from memory; again from L2 g, or all that the direction is made of."""
    named = parameters([(3, 5)], torch.float32, device)
    optimizer = OURS[name](named, lr=0.1, **options, scaling=scaling, backend="triton")
    place = scaling.scale(name).place
    again = 8 + state if place == "direction" else 4
    first = again if place == "direction" else 8
    assert cost(optimizer, named) == (1, memory, first)
    # ‖w‖ is known from the step before
    assert cost(optimizer, named) == (1, memory, again)


@pytest.mark.parametrize("more", [{"clip_global_norm": 1.0}, {"nonfinite": "skip"}])
@pytest.mark.parametrize(
    ("name", "scaling", "memory", "cached"),
    [("sgd", None, 16, 0), ("sgd", LARS(), 16, 4), ("adamw", None, 32, 0), ("adamw", LAMB(), 32, 16)],
)
def test_a_gate_reads_the_gradients_once_more(name, scaling, memory, cached, more, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    optimizer = OURS[name](named, lr=0.1, scaling=scaling, **more, backend="triton")
    for turn in range(2):
        launches, from_memory, from_cache = cost(optimizer, named)
        assert (launches, from_memory) == (2, memory)
        assert turn == 0 or from_cache == cached


@pytest.mark.parametrize(("dtype", "memory", "cached"), [(torch.bfloat16, 10, 2), (torch.float16, 10, 2)])
def test_bytes_of_half_precision(dtype, memory, cached, device):
    named = parameters([(3, 5)], dtype, device)
    optimizer = OURS["sgd"](named, lr=0.1, momentum=0.9, scaling=ELR(0.1), backend="triton")
    cost(optimizer, named)
    assert cost(optimizer, named) == (1, memory, cached)


@every_name
def test_groups_of_all_kinds_share_a_launch(name, device):
    named = parameters([(2, 3), (4,), (), (0,), (5, 2)], torch.float32, device)
    special = {"sgd": ({"momentum": 0.9}, {"nesterov": True, "momentum": 0.5}), "adamw": ({"amsgrad": True}, {})}[name]
    groups = [{"params": named[:2], **special[0]}, {"params": named[2:], **special[1], "weight_decay": 0.3}]
    optimizer = OURS[name](groups, lr=0.1, scaling=LARS(), multipliers={"p4[0:2]": 0.5}, backend="triton")
    assert [cost(optimizer, named)[0] for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(("name", "scaling", "from_memory"), [("sgd", LARS(), 4), ("adamw", LAMB(), 16)])
def test_rows_beyond_the_window_come_from_memory_twice(name, scaling, from_memory, device, monkeypatch):
    """A row of 60 elements, and one of 4 that stays within; results do not depend on it."""
    named, inside = parameters([(2, 2), (20, 3)], torch.float32, device), 4 / 64
    expected = twin(named)
    plain = OURS[name](expected, lr=0.1, scaling=scaling, backend="triton")
    gradients(named, expected)
    plain.step()
    monkeypatch.setattr(workspace, "WINDOW", 256)
    optimizer = OURS[name](named, lr=0.1, scaling=scaling, backend="triton")
    optimizer.step()
    compare(same, optimizer, plain, named, expected)
    memory = {"sgd": 12, "adamw": 28}[name]
    assert cost(optimizer, named) == (1, memory + from_memory * (1 - inside), from_memory * inside)


@pytest.mark.parametrize("window", [0, 200, 1 << 30])
def test_order_of_the_items_does_not_matter(window, device, monkeypatch):
    results = []
    for size in (window, workspace.WINDOW):
        torch.manual_seed(1)
        monkeypatch.setattr(workspace, "WINDOW", size)
        named = parameters([(2, 3), (4, 9), (3,)], torch.float32, device)
        train((OURS["adamw"](named, lr=0.1, scaling=LAMB(), backend="triton"),), (named,), 1)
        results.append([p.detach() for _, p in named])
    assert identical(*results)


def test_many_tiles_and_rows_for_the_slots(device, monkeypatch):
    """Partials, and step counts, that are read in more than one go."""
    monkeypatch.setattr(queue, "SLOTS", 2)
    named = parameters([(2, 4099), (3,), (2, 2), (1,), (2, 1)], torch.float32, device)
    expected = twin(named)
    options = {**OPTIONS["adamw"], "scaling": ELR(0.1), "nonfinite": "skip"}
    ours = OURS["adamw"](named, **options, multipliers={"p2[0:1]": 0.5}, backend="triton")
    other = OURS["adamw"](expected, **options, multipliers={"p2[0:1]": 0.5}, backend="torch")
    train((ours, other), (named, expected), 2)
    compare(partial(close, steps=2), ours, other, named, expected)
    assert [ours.state[p]["step"].item() for _, p in named] == [2] * 5


def items_of(numel, itemsize, measured=True, tile=4096):
    numel = np.array(numel, dtype=np.int64)
    segments, within = workspace.schedule(numel * itemsize, numel * 4, measured=measured)
    items = workspace.item_list(segments, numel, tile)
    counts = -(-numel // tile)
    assert items.dtype == np.int32
    # nothing wrapped around
    assert (items >= 0).all()
    return items[:, 0].astype(int), items[:, 1] % 2, items[:, 1] // 2, counts, within


LISTS = [
    [10**9], [1, 10**9, 5, 0, 10**8, 4096, 4097], [4_000_000] * 40, [0], [0, 3], [1] * 3000,
    [10**8, *[1000] * 50, 10**8]
]  # fmt: skip


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("numel", LISTS)
def test_items(numel, measured):
    """Every tile once, or once for its norms and once later for its update."""
    row, kind, slot, counts, _ = items_of(numel, 12, measured)
    total = counts.sum()
    assert len(row) == total * (1 + measured)
    first = np.cumsum(counts) - counts
    for k in (0, 1) if measured else (1,):
        assert (np.sort(slot[kind == k]) == np.arange(total)).all()
        assert (
            (slot[kind == k] >= first[row[kind == k]])
            & (slot[kind == k] - first[row[kind == k]] < counts[row[kind == k]])
        ).all()
    if measured:
        at = np.arange(len(row))
        last, begin = np.full(len(numel), -1), np.full(len(numel), len(row))
        np.maximum.at(last, row[kind == 0], at[kind == 0])
        np.minimum.at(begin, row[kind == 1], at[kind == 1])
        assert (last < begin).all()


@pytest.mark.parametrize("numel", LISTS)
def test_what_counts_as_read_from_l2_is_read_soon(numel):
    """Little passes between the norms of such a row and its update, and no row misses without need."""
    row, kind, _, counts, within = items_of(numel, 12)
    sizes = np.array(numel) * 12
    # tiles count in full, so rows that are far smaller than one are left out
    passed = np.cumsum(np.where(kind == 0, 4, 12) * np.minimum(np.array(numel)[row], 4096))
    for r in np.flatnonzero((counts > 0) & (sizes > 4096))[:60]:
        begin, end = np.flatnonzero((row == r) & (kind == 0))[0], np.flatnonzero((row == r) & (kind == 1))[-1]
        between = passed[end] - passed[begin]
        assert between <= 2.1 * workspace.WINDOW if within[r] else between > 1.9 * workspace.WINDOW
        after_large = r > 0 and sizes[r - 1] > workspace.WINDOW
        assert within[r] == (sizes[r] <= workspace.WINDOW and not after_large)


def swap(p):
    other = torch.nn.Parameter(torch.rand_like(p))
    with torch.no_grad():
        p.copy_(other)


def edit(p):
    with torch.no_grad():
        p[0, 0] = 3.0


def edit_last(p):
    with torch.no_grad():
        p[-1, -1] = 3.0


def double(p):
    with torch.no_grad():
        p.mul_(2)


def double_behind(p):
    p.data.mul_(2)


def halve_behind(p):
    p.data.div_(2)


def shift_behind(p):
    p.data.add_(0.25)


def replace_behind(p):
    p.data = torch.rand_like(p) * 2


def copy_behind(p):
    p.data.copy_(torch.rand_like(p))


def load(p):
    model = torch.nn.Module()
    model.weight = p
    model.load_state_dict({"weight": torch.rand_like(p)})


def detached(p):
    p.detach().mul_(3)


def nothing(p):
    pass


CHANGES = [
    nothing, double, double_behind, halve_behind, shift_behind, replace_behind, copy_behind, load, swap, edit,
    edit_last, detached,
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "shape"),
    [(change, shape) for change in CHANGES for shape in ((2, 3), (5, 30))]
    + [(change, (2, 2050)) for change in (nothing, double_behind, edit_last)],
)
def test_carried_norms(change, shape, device):
    """Whoever changes a weight between two steps, the next one goes by its norm as it is."""
    named = parameters([shape], torch.float32, device)
    # no zeros, and exponents of either parity
    named[0][1].data.add_(1.5)
    expected = twin(named)
    options = {"lr": 0.1, "scaling": ELR(0.3)}
    ours = OURS["sgd"](named, **options, backend="triton")
    other = OURS["sgd"](expected, **options, backend="torch")
    train((ours, other), (named, expected), 1)
    for pairs in (named, expected):
        torch.manual_seed(5)
        change(pairs[0][1])
    norm = named[0][1].detach().double().norm()
    train((ours, other), (named, expected), 1)
    torch.testing.assert_close(ours.layer_stats().weight_norm[0], norm, rtol=1e-5, atol=0)
    close(named[0][1].detach(), expected[0][1].detach(), 2)


@pytest.mark.parametrize("zeros", [31, 32, 40])
def test_carried_norms_of_a_weight_that_begins_with_zeros(zeros, device):
    """As an embedding with padding does; its gradient is zero there, too."""
    named = parameters([(3, zeros)], torch.float32, device)
    named[0][1].data[0] = 0
    ours = OURS["sgd"](named, lr=0.1, scaling=NormalizedGradientAdaptive(), backend="triton")
    for _ in range(2):
        gradients(named)
        named[0][1].grad[0] = 0
        norm = named[0][1].detach().double().norm()
        ours.step()
        torch.testing.assert_close(ours.layer_stats().weight_norm[0], norm, rtol=1e-5, atol=0)
        named[0][1].data.mul_(2)


@pytest.mark.parametrize(
    ("change", "again"), [(nothing, 4), (double, 8), (load, 8), (swap, 8), (edit, 8), (detached, 8)]
)
def test_weights_are_read_again_only_if_changed(change, again, device):
    named = parameters([(3, 7)], torch.float32, device)
    optimizer = OURS["sgd"](named, lr=0.1, scaling=LARS(), backend="triton")
    cost(optimizer, named)
    change(named[0][1])
    assert cost(optimizer, named) == (1, 12, again)
    assert cost(optimizer, named) == (1, 12, 4)


def test_another_optimizer_steps_the_same_weights(device):
    """As in GAN training or fine-tuning in turns: norms are of the weights as they are."""
    named = parameters([(3, 20)], torch.float32, device)
    ours = OURS["sgd"](named, lr=0.1, scaling=LARS(0.5), backend="triton")
    other = OURS["adamw"](named, lr=0.3, scaling=ELR(0.5), backend="triton")
    for optimizer in (ours, other, ours, other, ours):
        norm = named[0][1].detach().double().norm()
        train((optimizer,), (named,), 1)
        torch.testing.assert_close(optimizer.layer_stats().weight_norm[0], norm, rtol=1e-5, atol=0)


GATES = [{}, {"clip_global_norm": 0.5}, {"nonfinite": "skip"}]


@pytest.mark.parametrize(
    ("name", "backend", "scaling", "more"),
    [(name, "torch", s, more) for name in OURS for s in SCALINGS for more in GATES]
    + [(name, "triton", s, {}) for name in OURS for s in SCALINGS]
    + [(name, "triton", s, more) for name in OURS for s in (LARS(), LAMB()) for more in GATES[1:]],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(value) if isinstance(value, dict) else name_of(value)
    ),
)
def test_gradients_stay_as_they_are(name, backend, scaling, more, device):
    named = parameters([(3, 5)], torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], scaling=scaling, **more, backend=backend)
    for _ in range(2):
        gradients(named)
        grads, version = [p.grad.clone() for _, p in named], [p._version for _, p in named]
        counts, addresses = [p.grad._version for _, p in named], [p.grad.data_ptr() for _, p in named]
        optimizer.step()
        assert identical([p.grad for _, p in named], grads)
        assert [p.grad._version for _, p in named] == counts
        assert [p.grad.data_ptr() for _, p in named] == addresses
        assert all(p._version > v for (_, p), v in zip(named, version, strict=True))


SYNCHRONIZING = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "nonzero",
    "is_nonzero",
)


@pytest.fixture
def unsynchronized(monkeypatch):
    """Arms methods that wait for the device so that they raise; Triton's interpreter may use them in kernels."""
    armed = []
    for method in SYNCHRONIZING:
        original = getattr(torch.Tensor, method)

        def guarded(self, *args, method=method, original=original, **kwargs):
            assert not armed, f"Tensor.{method} waits for the device"
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, guarded)
    if triton.supports(torch.device("cpu"), torch.float32):
        from triton.runtime import interpreter

        original_call = interpreter.GridExecutor.__call__

        def call(self, *args, **kwargs):
            kept = armed.copy()
            armed.clear()
            try:
                return original_call(self, *args, **kwargs)
            finally:
                armed[:] = kept

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    return armed


@every_scaling
@every_case
def test_no_step_waits_for_the_device(name, backend, scaling, unsynchronized, device):
    named = parameters([(3, 5)], torch.float32, device)
    more = {"clip_global_norm": 0.5, "nonfinite": "skip"}
    optimizer = OURS[name](named, **OPTIONS[name], scaling=scaling, **more, backend=backend)
    train((optimizer,), (named,), 1)
    for _ in range(2):
        gradients(named)
        unsynchronized.append(True)
        optimizer.step()
        stats = optimizer.layer_stats()
        unsynchronized.clear()
    assert stats.grad_norm.isfinite().all()


# the factor of zero weights and of zero gradients is 1, save where a direction is left, or φ has a lower bound
ZEROS = [*(replace(s, **ALL) for s in SCALINGS), LAMB(min_norm=0.5, **ALL), ELR(0.1, eps=0.0, **ALL)]
every_zero = pytest.mark.parametrize("scaling", ZEROS, ids=name_of)


@every_zero
@every_name
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("weight", "gradient"), [(0, 1), (1, 0), (0, 0)])
def test_zeros(name, scaling, weight, gradient, weight_decay, device):
    """Of layers of zeros nothing becomes NaN, and they step as without a scaling if it says nothing else."""
    options = {"lr": 0.1, "weight_decay": weight_decay, "scaling": scaling, "backend": "torch"}
    named = parameters([(3, 5), (4,), ()], torch.float32, device)
    for _, p in named:
        p.data.mul_(weight)
    expected = twin(named)
    if name == "sgd":
        options["momentum"] = 0.9
    ours = OURS[name](named, **options)
    plain = OURS[name](expected, **{**options, "scaling": None})
    gradients(named, expected)
    for _, p in (*named, *expected):
        p.grad.mul_(gradient)
    ours.step()
    plain.step()
    direction = scaling.scale(name).place == "direction"
    bounded = isinstance(scaling, LAMB) and scaling.min_norm > 0
    moves = direction and (weight_decay > 0 or gradient) and (weight or (gradient and bounded))
    clipped = isinstance(scaling, ClipByLayer) or (isinstance(scaling, NormalizedGradient) and gradient)
    for (_, p), (_, q) in zip(named, expected, strict=True):
        assert p.isfinite().all()
        if not (moves or (clipped and gradient)):
            same(p.detach(), q.detach())
    assert ours.layer_stats().trust_ratio.isfinite().all()


@pytest.mark.parametrize(
    ("name", "scaling"),
    [("sgd", s) for s in (*ZEROS[:4], ZEROS[8])] + [("adamw", s) for s in (ZEROS[0], *ZEROS[6:9])],
    ids=name_of,
)
def test_zeros_in_triton(name, scaling, device):
    named = parameters([(3,), (3,), (3,)], torch.float32, device)
    named[0][1].data.zero_()
    named[1][1].data.zero_()
    expected = twin(named)
    ours, other = (
        OURS[name](t, **OPTIONS[name], scaling=scaling, backend=backend)
        for t, backend in ((named, "triton"), (expected, "torch"))
    )
    for _ in range(2):
        gradients(named, expected)
        for i in (0, 2):
            named[i][1].grad.zero_()
            expected[i][1].grad.zero_()
        ours.step()
        other.step()
    assert all(p.isfinite().all() for _, p in named)
    compare(partial(close, steps=2), ours, other, named, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every_scaling
@every_case
def test_poison_stays_in_its_layer(name, backend, scaling, bad, device):
    """What torch would make of a bad element is lost; with it at most the rest of its layer."""
    named = parameters([(3, 5), (2, 2)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **OPTIONS[name], scaling=scaling, backend=backend)
    other = OURS[name](expected, **OPTIONS[name], scaling=scaling, backend="torch")
    gradients(named, expected)
    named[0][1].grad[1, 2] = bad
    ours.step()
    other.step()
    assert not named[0][1][1, 2].isfinite()
    close(named[1][1].detach(), expected[1][1].detach())
    assert ours.layer_stats().nonfinite.tolist() == [1, 0]
    if backend == "triton":
        again = twin(expected)
        for (_, p), (_, q) in zip(again, named, strict=True):
            p.grad = q.grad.clone()
        # from the same start
        torch.manual_seed(0)
        for (_, p), (_, q) in zip(again, parameters([(3, 5), (2, 2)], torch.float32, device), strict=True):
            p.data.copy_(q)
        OURS[name](again, **OPTIONS[name], scaling=scaling, backend="torch").step()
        close(named[0][1].detach(), again[0][1].detach())


@every_case
def test_single_tensor(name, backend, device):
    for shape in ((1, 1), ()):
        named = parameters([shape], torch.float32, device)
        expected = twin(named)
        scaling = LAMB(**ALL)
        a, b = (
            OURS[name](t, **OPTIONS[name], scaling=scaling, backend=k)
            for t, k in ((named, backend), (expected, "torch"))
        )
        train((a, b), (named, expected), 2)
        compare(partial(close, steps=2), a, b, named, expected)


@every_case
def test_nothing_but_empty_tensors(name, backend, device):
    named = parameters([(0, 3), (0,)], torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], scaling=ELR(0.1), clip_global_norm=1.0, backend=backend)
    train((optimizer,), (named,), 2)
    stats = optimizer.layer_stats()
    assert stats.grad_norm.tolist() == [0, 0]
    assert stats.trust_ratio.tolist() == [1, 1]


@every_name
def test_thousands_of_tensors(name, device):
    """Each as the one optimizer of a single tensor steps it, for a few of them."""
    named = parameters([(2, 2)] * 3000, torch.float32, device)
    picked = range(0, 3000, 500)
    expected = twin([named[i] for i in picked])
    options = {**OPTIONS[name], "scaling": LARS(), "backend": "torch"}
    ours = OURS[name](named, **options)
    others = [OURS[name]([pair], **options) for pair in expected]
    for _ in range(2):
        gradients(named)
        for (_, q), i in zip(expected, picked, strict=True):
            q.grad = named[i][1].grad.clone()
        ours.step()
        for other in others:
            other.step()
    for (_, q), i in zip(expected, picked, strict=True):
        same(named[i][1].detach(), q.detach())


STATS_SHAPES = [(4, 6), (3,), (2, 5), (), (3, 3)]


def statistics(name, backend, device, scaling, steps=2, **more):
    """An optimizer after some steps, its parameters, and the weights before the last step."""
    named = parameters(STATS_SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], scaling=scaling, backend=backend, **more)
    train((optimizer,), (named,), steps - 1)
    before = [p.detach().clone() for _, p in named]
    train((optimizer,), (named,), 1)
    return optimizer, named, before


def agree(actual, expected):
    torch.testing.assert_close(actual.cpu(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


@every_case
@pytest.mark.parametrize("more", [{}, {"clip_global_norm": 0.1}])
def test_layer_stats(name, backend, more, device):
    optimizer, named, before = statistics(name, backend, device, LARS(0.5, eps=0.0), **more)
    stats = optimizer.layer_stats()
    assert isinstance(stats, StepStatistics)
    assert stats.names == tuple(key for key, _ in named)
    assert stats.constrained == (True, False, True, False, True)
    # of the gradients as they are, also if they were clipped
    grads, weights = [p.grad.double() for _, p in named], [w.double() for w in before]
    agree(stats.abs_sum, [g.abs().sum() for g in grads])
    agree(stats.grad_norm, [g.norm() for g in grads])
    agree(stats.weight_norm, [w.norm() for w in weights])
    assert stats.nonfinite.tolist() == [0] * 5
    elr = [(g.norm() / w.norm()).item() for g, w in zip(grads, weights, strict=True)]
    agree(stats.elr, elr)
    constrained = [elr[0], elr[2], elr[4]]
    agree(stats.elr_mean, np.mean(constrained))
    agree(stats.elr_spread, np.std(constrained))
    total = math.sqrt(sum(g.square().sum().item() for g in grads))
    clip = min(1.0, more.get("clip_global_norm", math.inf) / (total + 1e-6))
    decay = OPTIONS[name]["weight_decay"]
    ratio = [
        (0.5 * w.norm() / (clip * g.norm() + decay * w.norm())).item() for g, w in zip(grads, weights, strict=True)
    ]
    agree(stats.trust_ratio, [ratio[0], 1.0, ratio[2], 1.0, ratio[4]])
    # a copy
    kept = stats.values.clone()
    train((optimizer,), (named,), 1)
    assert torch.equal(stats.values, kept)
    assert not torch.equal(optimizer.layer_stats().values, kept)


@every_case
def test_layer_stats_of_the_direction(name, backend, device):
    """Norms are of the gradient, also where the trust ratio is of something else."""
    optimizer, named, before = statistics(name, backend, device, LAMB(), steps=1)
    stats = optimizer.layer_stats()
    agree(stats.grad_norm, [p.grad.double().norm() for _, p in named])
    agree(stats.weight_norm, [w.double().norm() for w in before])
    # Δw = lr · ratio · d and ratio = ‖w‖ / ‖d‖
    rate = [(p.detach() - w).double().norm() / w.double().norm() for (_, p), w in zip(named, before, strict=True)]
    for i in (0, 2, 4):
        assert rate[i].item() == pytest.approx(OPTIONS[name]["lr"], rel=1e-4)


@every_backend
def test_layer_stats_in_the_order_of_parameters(backend, device):
    """Dtypes are launched apart, some layers have no gradient, one is in slices."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    named = [(f"p{i}", parameters([(4, 2)], dtype, device)[0][1]) for i, dtype in enumerate(dtypes)]
    optimizer = OURS["sgd"](named, lr=0.1, scaling=ELR(0.1), multipliers={"p2[1:3]": 0.5}, backend=backend)
    gradients(named)
    named[1][1].grad = None
    optimizer.step()
    stats = optimizer.layer_stats()
    assert stats.names == ("p0", "p2[0:1]", "p2[1:3]", "p2[3:4]", "p3")
    (_, a), _, (_, c), (_, d) = named
    agree(stats.grad_norm, [t.double().norm() for t in (a.grad, c.grad[:1], c.grad[1:3], c.grad[3:], d.grad)])
    assert list(stats.to_dict()) == list(stats.names)
    assert stats.to_dict()["p3"]["grad_norm"] == stats.grad_norm[4].item()
    assert "p2[1:3]" in str(stats)


@every_backend
def test_layer_stats_leave_zero_weights_out_of_the_mean(backend, device):
    named = parameters([(2, 3), (2, 2), (3, 3)], torch.float32, device)
    named[1][1].data.zero_()
    optimizer = OURS["sgd"](named, lr=0.1, scaling=ELR(0.1), backend=backend)
    train((optimizer,), (named,), 1)
    stats = optimizer.layer_stats()
    assert stats.elr[1] == math.inf
    agree(stats.elr_mean, np.mean([stats.elr[0].item(), stats.elr[2].item()]))
    agree(stats.elr_spread, np.std([stats.elr[0].item(), stats.elr[2].item()]))


@every_name
def test_layer_stats_need_a_scaling_and_a_step(name, device):
    named = parameters([(2, 2)], torch.float32, device)
    plain = OURS[name](named, lr=0.1)
    train((plain,), (named,), 1)
    with pytest.raises(RuntimeError, match=r"only with scaling="):
        plain.layer_stats()
    optimizer = OURS[name](named, lr=0.1, scaling=ELR(0.1))
    with pytest.raises(RuntimeError, match="call step"):
        optimizer.layer_stats()
    for _, p in named:
        p.grad = None
    optimizer.step()
    with pytest.raises(RuntimeError, match="call step"):
        optimizer.layer_stats()


class Writer:
    def __init__(self):
        self.written = []

    def add_scalar(self, tag, scalar_value, global_step):
        assert type(scalar_value) is float
        self.written.append((tag, scalar_value, global_step))


@every_name
def test_logger(name, device):
    named = parameters([(4, 6), (3,)], torch.float32, device)
    optimizer = OURS[name](named, lr=0.1, scaling=ELR(0.1), multipliers={"p0[0:2]": 0.5}, backend="torch")
    writer = Writer()
    optimizer.register_step_post_hook(LayerStatsLogger(writer, every=3))
    train((optimizer,), (named,), 7)
    layers = ("p0[0:2]", "p0[2:4]", "p1")
    tags = [f"{what}/{layer}" for layer in layers for what in ("elr", "trust_ratio", "grad_norm", "weight_norm")]
    tags += ["elr_mean", "elr_spread"]
    assert [(tag, step) for tag, _, step in writer.written] == [(tag, step) for step in (3, 6) for tag in tags]
    train((optimizer,), (named,), 2)
    stats = optimizer.layer_stats()
    last = {tag: value for tag, value, step in writer.written if step == 9}
    assert last["elr_mean"] == stats.elr_mean.item()
    assert [last[f"weight_norm/{layer}"] for layer in layers] == stats.weight_norm.tolist()


@pytest.mark.parametrize("every", [0, -1])
def test_logger_refuses_no_steps(every):
    with pytest.raises(ValueError, match=f"every={every}"):
        LayerStatsLogger(Writer(), every=every)


def through_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


MORE = [{}, {"clip_global_norm": 0.5}, {"nonfinite": "skip"}, {"clip_global_norm": 0.5, "nonfinite": "raise"}]


@pytest.mark.parametrize(
    ("name", "backend", "more", "copy"),
    [(name, "torch", more, copy) for name in OURS for more in MORE for copy in (deepcopy, through_pickle)]
    + [(name, "triton", MORE[i], copy) for name in OURS for i, copy in ((0, through_pickle), (3, deepcopy))],
)
def test_copies_go_on_alike_and_apart(name, backend, more, copy, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], scaling=LARS(), multipliers={"p0[0:1]": 0.5}, **more, backend=backend)
    train((ours,), (named,), 1)
    other, copied = copy((ours, named))
    before = snapshot(ours, named)
    gradients(copied)
    other.step()
    assert identical(snapshot(ours, named), before)
    for (_, p), (_, q) in zip(named, copied, strict=True):
        p.grad = q.grad.clone()
    ours.step()
    compare(same, other, ours, copied, named)
    assert identical(other.layer_stats().values, ours.layer_stats().values)


@pytest.mark.parametrize("more", MORE[:3])
@pytest.mark.parametrize(
    ("name", "backend", "scaling"),
    [(name, "torch", scaling) for name in OURS for scaling in (ELR(0.1), LAMB())]
    + [("sgd", "triton", ELR(0.1)), ("adamw", "triton", LAMB())],
    ids=name_of,
)
def test_resuming_is_not_having_stopped(name, backend, more, scaling, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    options = {**OPTIONS[name], "scaling": scaling, **more, "backend": backend}
    ours = OURS[name](named, **options)
    train((ours,), (named,), 1)
    again = twin(named)
    resumed = OURS[name](again, **{**options, "lr": 0.7})
    resumed.load_state_dict(deepcopy(ours.state_dict()))
    train((ours, resumed), (named, again), 2 if backend == "torch" else 1)
    compare(same, resumed, ours, again, named)
    assert identical(resumed.state_dict(), ours.state_dict())


@every_case
def test_a_scaling_is_changed_in_mid_training(name, backend, device):
    """It is an attribute: the next step goes by what it is."""
    named = parameters([(3, 5), (4,)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **OPTIONS[name], scaling=LARS(), backend=backend)
    other = OURS[name](expected, **OPTIONS[name], scaling=LARS(), backend=backend)
    train((ours, other), (named, expected), 1)
    ours.scaling = ELR(0.3)
    fresh = OURS[name](expected, **OPTIONS[name], scaling=ELR(0.3), backend=backend)
    fresh.load_state_dict(other.state_dict())
    train((ours, fresh), (named, expected), 1)
    compare(same, ours, fresh, named, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_steps_that_were_skipped_are_still_to_come(backend, device):
    """The count goes along to an optimizer that does not skip, and is no part of its state."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "backend": backend}
    p, q, r = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(3))
    skips = OURS["sgd"]([p], **options, nonfinite="skip")
    p.grad = torch.full_like(p, float("nan"))
    skips.step()
    plain, fresh = OURS["sgd"]([q], **options), OURS["sgd"]([r], **options)
    plain.load_state_dict(skips.state_dict())
    for _ in range(2):
        for optimizer, param in ((plain, q), (fresh, r)):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert torch.equal(q, r)
    assert plain.state[q].keys() == {"momentum_buffer"}
