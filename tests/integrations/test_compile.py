"""Training steps under torch.compile: the graph breaks at step(), which runs as without a compiler."""

import shutil
from functools import partial

import pytest
import torch
import torch._dynamo
from steps import OPTIONS, OURS, TORCH, compare
from tolerances import close, same
from torch import nn

from fused_lwlr import LARS, layer_statistics

STEPS = 4
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
# each compiles for seconds, and sees neither rule nor backend
every_backend = pytest.mark.parametrize(("name", "backend"), [("sgd", "torch"), ("adamw", "triton")])

# raised by inductor's own imports
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]


class Recorder:
    """A compiler that records the Python lines of each graph."""

    def __init__(self, compiler):
        self.compile = torch._dynamo.lookup_backend(compiler)
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([node.stack_trace for node in graph.graph.nodes if node.stack_trace])
        return self.compile(graph, inputs)

    def lines(self):
        return [line for graph in self.graphs for line in graph]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model(device):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)


@pytest.fixture
def batches(device):
    return [torch.rand(8, 4, device=device) for _ in range(STEPS)]


def twin_of(model, name, **options):
    """Named parameters equal to the model's, and torch's optimizer over them."""
    expected = [(key, nn.Parameter(p.detach().clone())) for key, p in model.named_parameters()]
    return expected, TORCH[name](expected, foreach=False, **options)


def follow(model, expected, torchs):
    """The same step by torch, with the gradients of the model's last step."""
    for p, (_, q) in zip(model.parameters(), expected, strict=True):
        q.grad = p.grad.clone()
    torchs.step()


@pytest.mark.parametrize(
    ("name", "backend", "compiler"),
    [
        ("sgd", "torch", "eager"), ("adamw", "torch", "aot_eager"), ("sgd", "triton", "eager"),
        pytest.param("adamw", "triton", "inductor", marks=needs_compiler),
    ],
)  # fmt: skip
def test_training_step(name, backend, compiler, model, batches):
    expected, torchs = twin_of(model, name, **OPTIONS[name])
    ours = OURS[name](model.named_parameters(), **OPTIONS[name], backend=backend)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in (ours, torchs)]
    recorder = Recorder(compiler)

    @torch.compile(backend=recorder)
    def train_step(x):
        ours.zero_grad()
        loss = model(x).square().mean()
        # torch warns about `.grad` where a graph continues with a tensor that has none
        value = loss.detach()
        loss.backward()
        ours.step()
        return value

    losses, graphs = [], []
    for x in batches:
        losses.append(train_step(x).item())
        graphs.append(len(recorder.graphs))
        follow(model, expected, torchs)
        for scheduler in schedulers:
            scheduler.step()
    check = same if backend == "torch" else partial(close, steps=STEPS)
    compare(check, ours, torchs, list(model.named_parameters()), expected)
    assert losses[-1] < losses[0]
    # the model was compiled, the step was not, and a change of rates must not recompile
    assert any("model(x)" in line for line in recorder.lines())
    assert all(__file__ in line for line in recorder.lines())
    assert graphs[1:] == [graphs[1]] * (STEPS - 1)


def test_statistics_in_a_compiled_step(model, batches):
    """They are the statistics without a compiler."""
    ours = OURS["sgd"](model.named_parameters(), **OPTIONS["sgd"], scaling=LARS())

    def train_step(x):
        model(x).square().mean().backward()
        ours.step()
        return ours.layer_stats().values, layer_statistics(model).values

    compiled = torch.compile(train_step, backend="eager")(batches[0])
    plain = ours.layer_stats().values, layer_statistics(model).values
    for found, expected in zip(compiled, plain, strict=True):
        same(found, expected)


@every_backend
def test_compiled_step(name, backend, model, batches):
    """torch.compile of the optimizer's step only, as in torch's documentation; hooks run once a step."""
    expected, torchs = twin_of(model, name, **OPTIONS[name])
    ours = OURS[name](model.named_parameters(), **OPTIONS[name], backend=backend)
    calls = []
    ours.register_step_pre_hook(lambda *_: calls.append("before"))
    ours.register_step_post_hook(lambda *_: calls.append("after"))
    recorder = Recorder("eager")
    step = torch.compile(lambda: ours.step(), backend=recorder)
    for x in batches:
        ours.zero_grad()
        model(x).square().mean().backward()
        step()
        follow(model, expected, torchs)
    check = same if backend == "torch" else partial(close, steps=STEPS)
    compare(check, ours, torchs, list(model.named_parameters()), expected)
    assert calls == ["before", "after"] * STEPS
    assert not recorder.graphs


@every_backend
def test_closure_of_a_compiled_model(name, backend, model, batches):
    """The step is not compiled; a compiled model that its closure calls is compiled."""
    expected, torchs = twin_of(model, name, **OPTIONS[name])
    recorder = Recorder("aot_eager")
    compiled = torch.compile(model, backend=recorder)
    ours = OURS[name](model.named_parameters(), **OPTIONS[name], backend=backend)
    for x in batches:

        def closure(x=x):
            ours.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            return loss

        assert ours.step(closure).requires_grad
        follow(model, expected, torchs)
    check = same if backend == "torch" else partial(close, steps=STEPS)
    compare(check, ours, torchs, list(model.named_parameters()), expected)
    assert len(recorder.graphs) == 1


@every_backend
def test_one_graph_is_refused(name, backend, model, batches):
    """With fullgraph=True, the compiler names the step that it cannot trace, and no parameter is stepped."""
    ours = OURS[name](model.named_parameters(), **OPTIONS[name], backend=backend)
    before = [p.detach().clone() for p in model.parameters()]
    model(batches[0]).square().mean().backward()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"FusedOptimizer\.step"):
        torch.compile(lambda: ours.step(), backend="eager", fullgraph=True)()
    for p, q in zip(model.parameters(), before, strict=True):
        same(p.detach(), q)
