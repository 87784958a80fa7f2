"""Training steps in a CUDA graph, with forward and backward passes, compared with the same steps without a graph."""

import pytest
import torch
from cases import every_name, name_of
from steps import OPTIONS, OURS, compare
from tolerances import same
from torch import nn

from fused_lwlr import ELR, LAMB, LARS

pytestmark = pytest.mark.gpu

HALF = {"dtype": torch.bfloat16}
ROWS = [
    {}, {"scaling": ELR(0.1)}, {"scaling": LARS()}, {"scaling": LAMB()}, {"clip_global_norm": 0.5},
    {"nonfinite": "skip"}, {"nonfinite": "skip", "scaling": LAMB(), "clip_global_norm": 0.5},
    {"master_weights": True, **HALF}, {"stochastic_rounding": True, **HALF}, {"state_dtype": torch.bfloat16},
]  # fmt: skip


class Network(nn.Module):
    """Only elementwise operations and sums, whose bits do not depend on the kernels a library picks for a graph."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 1030) - 0.5)
        self.bias = nn.Parameter(torch.zeros(1030))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.tanh(x[:, None] * self.weight + self.bias).square().sum(-1)


class Training:
    """A model, its optimizer with the rate in a tensor, and the input in memory that stays where it is."""

    def __init__(self, name, row, device, scaler=None):
        torch.manual_seed(0)
        row = dict(row)
        self.model = Network().to(device, row.pop("dtype", torch.float32))
        self.lr = torch.tensor(OPTIONS[name]["lr"], device=device)
        self.named = list(self.model.named_parameters())
        self.optimizer = OURS[name](self.named, **{**OPTIONS[name], "lr": self.lr, **row}, capturable=True)
        self.scaler = scaler
        self.x = torch.ones(6, device=device, dtype=self.model.weight.dtype)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.x).mean()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def warm_up(self, steps=3):
        """On a side stream, as torch's notes on CUDA graphs have it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(steps):
                self.step()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self):
        # so that the gradients are in the memory of the graph
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph


def pair_of(name, row, device, scalers=(None, None)):
    ours, eager = (Training(name, row, device, scaler) for scaler in scalers)
    ours.warm_up(), eager.warm_up()
    return ours, eager


def feed(i, *trainings):
    x = torch.linspace(-1, 1 + i, 6)
    for training in trainings:
        training.x.copy_(x)


def agree(ours, eager):
    compare(same, ours.optimizer, eager.optimizer, ours.named, eager.named)
    assert ours.model.unused not in ours.optimizer.state


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(k if k != "scaling" else name_of(v) for k, v in row.items()) or "plain"
)
@every_name
def test_replays_are_steps(name, row, device):
    """Ten, with a rate that changes, weights that are edited, and where steps may be skipped an input that is NaN."""
    ours, eager = pair_of(name, row, device)
    graph = ours.capture()
    agree(ours, eager)
    for i in range(10):
        feed(i, ours, eager)
        for training in (ours, eager):
            training.lr.mul_(0.9)
            if i == 3 and "nonfinite" in row:
                training.x[2] = float("nan")
            if i == 6:
                with torch.no_grad():
                    training.model.weight[1].mul_(2)
        before = ours.model.weight.detach().clone()
        graph.replay(), eager.step()
        agree(ours, eager)
        assert torch.equal(before, ours.model.weight) == (i == 3 and "nonfinite" in row)
        if "scaling" in row:
            same(ours.optimizer.layer_stats().values, eager.optimizer.layer_stats().values)


@pytest.mark.parametrize("row", [{}, {"scaling": LAMB(), "clip_global_norm": 0.5}], ids=["plain", "LAMB-clip"])
@every_name
def test_grad_scaler(name, row, device):
    """All of it in the graph: scaling, the search for infinities, the step, and the new scale."""
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**4, growth_interval=2) for _ in range(2)]
    ours, eager = pair_of(name, row, device, scalers)
    graph = ours.capture()
    scales = set()
    for i in range(8):
        feed(i, ours, eager)
        if i in (2, 5):
            ours.x[0] = eager.x[0] = float("nan")
        before = ours.model.weight.detach().clone()
        graph.replay(), eager.step()
        agree(ours, eager)
        assert torch.equal(before, ours.model.weight) == (i in (2, 5))
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.add(scalers[0].get_scale())
    assert len(scales) > 1


@every_name
def test_two_graphs_and_steps_between(name, device):
    """Two graphs in any order; each has separate gradients, and an eager step between them allocates new ones."""
    ours, eager = pair_of(name, {"scaling": LARS(), "clip_global_norm": 0.5}, device)
    graphs = [ours.capture(), ours.capture()]
    for i, which in enumerate([0, 1, 1, None, 0, None, None, 1, 0]):
        feed(i, ours, eager)
        ours.step() if which is None else graphs[which].replay()
        eager.step()
        agree(ours, eager)


@every_name
def test_memory_of_a_graph_is_not_given_away(name, device):
    """A step with fewer gradients makes other tables; the tables of the graph survive later allocations."""
    ours, eager = pair_of(name, {"scaling": LAMB()}, device)
    graph = ours.capture()
    for training in (ours, eager):
        training.model.bias.requires_grad_(False)
        training.step()
        training.model.bias.requires_grad_(True)
    torch.cuda.synchronize()
    filled = [
        torch.full((size,), -1, dtype=torch.int64, device=device) for size in (16, 64, 256, 1024) for _ in range(64)
    ]
    for i in range(3):
        feed(i, ours, eager)
        graph.replay(), eager.step()
        agree(ours, eager)
    assert all((tensor == -1).all() for tensor in filled)
