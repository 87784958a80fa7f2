"""Replays of a captured step, compared with the same steps without a graph."""

import math

import pytest
import torch
from cases import every_name, long, name_of, nan_arithmetic
from graphs import HAS_GPU, capture, static_gradients
from pairs import twin_parameters
from steps import OPTIONS, OURS, compare, gradients
from tolerances import close, same

from fused_lwlr import ELR, LAMB, LARS, Hyperball

SHAPES = [(6, 5), (), (40,)]
HALF = {"dtype": torch.bfloat16}
ROWS = [
    ("sgd", {}), ("adamw", {}), ("sgd", {"scaling": ELR(0.1)}), ("sgd", {"scaling": LARS()}),
    ("adamw", {"scaling": LAMB(), "clip_global_norm": 0.5, "nonfinite": "skip"}),
    ("sgd", {"master_weights": True, **HALF}), long("adamw", {"master_weights": True, "scaling": LAMB(), **HALF}),
    long("sgd", {"stochastic_rounding": True, **HALF}),
    ("adamw", {"stochastic_rounding": True, "rounding_seed": 3} | HALF),
    long("adamw", {"state_dtype": torch.bfloat16}), ("sgd", {"ema": 0.9}),
    long("sgd", {"scaling": Hyperball()}),
    ("adamw", {"master_weights": True, "scaling": Hyperball(), "ema": 0.9, **HALF}),
]  # fmt: skip
# for tests that do not depend on the rule, since each rule compiles a kernel
one_name = pytest.mark.parametrize("name", ["sgd", long("adamw")])
every_row = pytest.mark.parametrize(
    ("name", "row"),
    ROWS,
    ids=lambda v: v if isinstance(v, str) else "-".join(k if k != "scaling" else name_of(o) for k, o in v.items()),
)


def pair_of(name, row, device, shapes=SHAPES, **more):
    """Two capturable optimizers on equal parameters, each with separate tensors for lr and weight decay."""
    row = dict(row)
    named, other = twin_parameters(shapes, row.pop("dtype", torch.float32), device)
    made = []
    for twins in (named, other):
        numbers = {key: torch.tensor(OPTIONS[name][key], device=device) for key in ("lr", "weight_decay")}
        if name == "adamw":
            # torch's own check wants a number
            del numbers["weight_decay"]
        options = {**OPTIONS[name], **numbers, **row, **more}
        made.append(OURS[name](twins, **options, capturable=True, backend="triton"))
    return *made, named, other


def warm_up(pairs, steps=1):
    for _ in range(steps):
        gradients(*(named for _, named in pairs))
        for optimizer, _ in pairs:
            optimizer.step()


def replayed(graph, ours, eager, named, other):
    """A replay, compared with a step by the same gradients."""
    static_gradients(named, other)
    graph.replay()
    eager.step()
    compare(same, ours, eager, named, other)


@every_row
def test_replays_are_steps(name, row, device):
    """The rate changes, and eager steps and edits of weights come between the replays."""
    ours, eager, named, other = pair_of(name, row, device)
    warm_up(((ours, named), (eager, other)), 2)
    before = [p.detach().clone() for _, p in named]
    graph = capture(ours.step)
    for (_, p), q in zip(named, before, strict=True):
        same(p.detach(), q)
    for i in range(10 if HAS_GPU else 4):
        static_gradients(named, other)
        for optimizer in (ours, eager):
            optimizer.param_groups[0]["lr"].mul_(0.9)
        if i == 1:
            with torch.no_grad():
                named[0][1].mul_(2), other[0][1].mul_(2)
                # between the samples of a checksum
                named[2][1][4].add_(3), other[2][1][4].add_(3)
        if i == 3:
            named[2][1].data.add_(0.5), other[2][1].data.add_(0.5)
        graph.replay() if i != 2 else ours.step()
        eager.step()
        compare(same, ours, eager, named, other)
        if "scaling" in row:
            same(ours.layer_stats().values, eager.layer_stats().values)


@nan_arithmetic
@pytest.mark.parametrize("name", [long("sgd"), "adamw"])
def test_a_replay_skips(name, device):
    """A replay uses the gradients of that replay: on overflow nothing changes, step counts included."""
    ours, eager, named, other = pair_of(name, {"nonfinite": "skip", "scaling": LAMB()}, device)
    warm_up(((ours, named), (eager, other)))
    graph = capture(ours.step)
    for i in range(4):
        static_gradients(named, other)
        if i in (0, 2):
            named[2][1].grad[5] = math.nan
        else:
            eager.step()
        graph.replay()
        compare(same, ours, eager, named, other)


@nan_arithmetic
@pytest.mark.parametrize("options", [{}, {"clip_global_norm": 0.5}], ids=["plain", "clip"])
@one_name
def test_loss_scale_in_a_graph(name, options, device):
    """The scale and `found_inf` are read by every replay."""
    ours, eager, named, other = pair_of(name, options, device)
    scale, found_inf = torch.full((1,), 8.0, device=device), torch.zeros((), device=device)

    def scaled():
        ours.grad_scale, ours.found_inf = scale, found_inf
        ours.step()
        del ours.grad_scale, ours.found_inf

    gradients(named, other)
    for _, param in named:
        param.grad.mul_(8)
    scaled(), eager.step()
    graph = capture(scaled)
    for factor, overflow in ((8.0, 0.0), (4.0, 0.0), (2.0, 2.0), (2.0, 0.0)):
        static_gradients(named, other)
        for _, param in named:
            param.grad.mul_(factor)
        scale.fill_(factor), found_inf.fill_(overflow)
        graph.replay()
        if not overflow:
            eager.step()
        compare(same, ours, eager, named, other)


@every_name
def test_a_step_after_a_capture_that_is_not_replayed(name, device):
    """A capture writes nothing to the device, so the host must not assume that the step ran."""
    ours, eager, named, other = pair_of(name, {}, device)
    warm_up(((ours, named), (eager, other)))
    gradients(named, other)
    capture(ours.step)
    for _ in range(2):
        ours.step(), eager.step()
        compare(same, ours, eager, named, other)


@pytest.mark.parametrize("replays", [0, 1])
def test_norms_after_a_capture(replays, device):
    """A weight is edited between the last step and the capture, in an element that no fingerprint reads."""
    row = {"scaling": ELR(0.1, select="*")}
    ours, eager, named, other = pair_of("sgd", row, device, [(1000,)])
    warm_up(((ours, named), (eager, other)))
    for twins in (named, other):
        with torch.no_grad():
            twins[0][1][1] = 100.0
    static_gradients(named, other)
    graph = capture(ours.step)
    for _ in range(replays):
        replayed(graph, ours, eager, named, other)
    ours.step(), eager.step()
    compare(same, ours, eager, named, other)


@every_name
def test_steps_by_other_gradients_between_replays(name, device):
    """Replays use the captured gradient tensors, eager steps the current ones, in any order."""
    ours, eager, named, other = pair_of(name, {"scaling": LARS()}, device)
    warm_up(((ours, named), (eager, other)))
    graph = capture(ours.step)
    captured = [p.grad for _, p in named]
    gradients(named, other)
    own = [p.grad for _, p in named]
    for i in range(6):
        # r s s r r s: a step after a step, which has nothing to upload, and either after the other
        replayed = i in (0, 3, 4)
        for (_, param), grad in zip(named, captured if replayed else own, strict=True):
            param.grad = grad
        static_gradients(named, other)
        graph.replay() if replayed else ours.step()
        eager.step()
        compare(same, ours, eager, named, other)


@every_name
def test_a_step_with_fewer_gradients_between_replays(name, device):
    """The eager step uses another plan; the graph continues with the same state, and its memory is not freed."""
    ours, eager, named, other = pair_of(name, {"scaling": LAMB()}, device)
    warm_up(((ours, named), (eager, other)))
    graph = capture(ours.step)
    captured = [p.grad for _, p in named]
    for i in range(4):
        gradients(named, other)
        for (_, param), grad in zip(named, captured, strict=True):
            param.grad = grad.copy_(param.grad)
        if i in (1, 2):
            named[2][1].grad = other[2][1].grad = None
            ours.step()
        else:
            graph.replay()
        eager.step()
        for (_, p), (_, q) in zip(named, other, strict=True):
            close(p.detach(), q.detach(), steps=i + 1)
            for key, value in ours.state[p].items():
                close(value, eager.state[q][key], steps=i + 1)


@one_name
def test_parameters_without_gradient(name, device):
    """Frozen throughout: the graph leaves them alone."""
    ours, eager, named, other = pair_of(name, {"master_weights": True, **HALF}, device)
    for _ in range(2):
        gradients(named, other)
        named[1][1].grad = other[1][1].grad = None
        ours.step(), eager.step()
    graph = capture(ours.step)
    for _ in range(3):
        replayed(graph, ours, eager, named, other)
    assert named[1][1] not in ours.state


@every_name
def test_gradients_of_other_strides(name, device):
    """They are copied in every replay, to memory that stays when steps need none."""
    ours, eager, named, other = pair_of(name, {}, device, shapes=[(6, 5), (4, 3)])

    def transposed():
        for pairs in (named, other):
            for _, param in pairs:
                param.grad = param.grad.T.contiguous().T

    for _ in range(2):
        gradients(named, other)
        transposed()
        ours.step(), eager.step()
    graph = capture(ours.step)
    captured = [p.grad for _, p in named]
    for i in range(4):
        if i == 1:
            gradients(named, other)
            ours.step()
        else:
            for (_, param), grad in zip(named, captured, strict=True):
                param.grad = grad
            static_gradients(named, other)
            graph.replay()
        eager.step()
        compare(same, ours, eager, named, other)


@every_name
def test_many_captures(name, device):
    """Captures with different gradients in a row, and two steps in one graph."""
    ours, eager, named, other = pair_of(name, {"clip_global_norm": 1.0}, device)
    warm_up(((ours, named), (eager, other)))
    captured = []
    for _ in range(2):
        gradients(named)
        captured.append(([p.grad for _, p in named], capture(ours.step)))
    twice = capture(lambda: (ours.step(), ours.step()))
    for grads, graph in captured + captured[::-1]:
        for (_, param), grad in zip(named, grads, strict=True):
            param.grad = grad
        replayed(graph, ours, eager, named, other)
    for (_, param), grad in zip(named, captured[-1][0], strict=True):
        param.grad = grad
    static_gradients(named, other)
    twice.replay()
    eager.step(), eager.step()
    compare(same, ours, eager, named, other)


def test_captures_without_a_step_between(device):
    """Pinned memory allows eight captures in a row; the next eager step allocates more."""
    ours, _, named, _ = pair_of("sgd", {}, device)
    warm_up(((ours, named),), 1)
    kept = []

    def fill(captures):
        for _ in range(captures):
            gradients(named)
            kept.append(([p.grad for _, p in named], capture(ours.step)))

    fill(5)
    for count in (13, 21):
        ours.step()
        with pytest.raises(RuntimeError, match="8 times in a row: take a step outside"):
            fill(100)
        assert len(kept) == count


@every_name
def test_the_work_of_a_second_capture_stays(name, device):
    """The second capture has the work list of the first one in other memory, since the steps in between had another."""
    ours, eager, named, other = pair_of(name, {"scaling": LARS()}, device)
    warm_up(((ours, named), (eager, other)))
    (_, first), (_, its_twin) = named[0], other[0]
    kept = first.grad, its_twin.grad

    def step_without_the_first():
        first.grad = its_twin.grad = None
        ours.step(), eager.step()
        first.grad, its_twin.grad = kept

    capture(ours.step)
    step_without_the_first()
    ours.step(), eager.step()
    graph = capture(ours.step)
    step_without_the_first()
    graph.replay(), eager.step()
    compare(same, ours, eager, named, other)
