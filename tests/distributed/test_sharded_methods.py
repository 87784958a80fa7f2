"""Measurements on a sharded model equal measurements on the whole model, on every process."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharding import AVERAGED, LAYOUTS, full, gradients, mesh, parameters, placed, spread
from steps import OURS, identical
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from fused_lwlr import calibrate, layer_statistics, lwlr_init_, scale_invariant
from fused_lwlr.measure.layers import layers_of
from fused_lwlr.measure.statistics import StatisticsPass

pytestmark = pytest.mark.ranks(4)
LAYOUT = pytest.mark.parametrize("layout", ["fully_shard", "hybrid"])


class Attention(nn.Module):
    """A model with a fused projection; no process has a whole third of it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q @ k.T).softmax(-1) @ v


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), Attention(), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def shard(model, layout):
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh(*((4,) if layout == "fully_shard" else (2, 2))))
    return model


def batches(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(8, 4, generator=generator, dtype=dtype), torch.arange(8) % 3) for _ in range(3)]


def everything(model):
    """All local state that a measurement must not change."""
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers())]
    grads = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    return [t.detach().clone() for t in tensors], grads, modes, generators


@pytest.mark.parametrize(
    ("layout", "backend"), [*((layout, "torch") for layout in LAYOUTS), ("rows", "triton"), ("both", "triton")]
)
def test_statistics(layout, backend):
    whole = parameters()
    sharded = spread(whole, layout, plain=("conv.bias",))
    for _ in range(2):
        gradients(whole, sharded)
        mine, other = layer_statistics(sharded, backend=backend), layer_statistics(whole, backend=backend)
        assert (mine.names, mine.numel) == (other.names, other.numel)
        # single precision within a tile, and sums of tiles in double
        torch.testing.assert_close(mine.values, other.values, rtol=1e-6, atol=1e-6)
        assert torch.equal(mine.abs_max, other.abs_max)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ["rows", "hybrid", "both"])
def test_statistics_of_values_that_are_not_finite(layout, bad):
    """Statistics of one process's shard."""
    whole = parameters()
    sharded = spread(whole, layout)
    gradients(whole, sharded)
    whole[3][1].grad[4, 2] = bad
    sharded[3][1].grad = placed(whole[3][1].grad, layout)
    mine, other = (layer_statistics(named, backend="torch") for named in (sharded, whole))
    torch.testing.assert_close(mine.values, other.values, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert mine.nonfinite.tolist() == [0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", torch.float64), pytest.param("triton", torch.float32, marks=AVERAGED)]
)
def test_statistics_of_slices(backend, dtype):
    """A fused projection counts as three layers also if they end within shards; processes may have no part of one."""
    found = []
    for model in (network(dtype), shard(network(dtype), "fully_shard")):
        cross_entropy(model(batches(dtype)[0][0]), batches()[0][1]).backward()
        found.append(layer_statistics(model, backend=backend))
    assert found[0].names == found[1].names
    assert "2.qkv.weight[6:12]" in found[0].names
    near = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found[0].values, found[1].values, rtol=near, atol=near)


@pytest.mark.parametrize("init", [True, False])
@LAYOUT
def test_calibrate(layout, init):
    """The same rates on every process, whose minibatches are the same; and the model does not change."""
    whole, sharded = network(), shard(network(), layout)
    cross_entropy(sharded(batches()[0][0]), batches()[0][1]).backward()
    found = []
    for model in (whole, sharded):
        torch.manual_seed(5)
        before = everything(model) if model is sharded else None
        found.append(calibrate(model, batches(), cross_entropy, init=init))
        assert before is None or identical(everything(model), before)
    assert list(found[0]) == list(found[1])
    for a, b in zip(found[0].layers, found[1].layers, strict=True):
        assert (a.kind, a.numel, a.note) == (b.kind, b.numel, b.note)
        if not a.note:
            assert (b.eta, b.gradient) == (pytest.approx(a.eta, rel=1e-9), pytest.approx(a.gradient, rel=1e-9))
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, dict(found[1]))
    assert all(one == everywhere[0] for one in everywhere)


@pytest.mark.parametrize("generator", [False, True])
@LAYOUT
def test_init_draws_the_same_weights(layout, generator):
    """All processes draw the weights of the first one, in spite of different generators."""
    whole, sharded = network(), shard(network(), layout)
    for model, seed in ((whole, 3), (sharded, 3 + dist.get_rank())):
        torch.manual_seed(seed)
        lwlr_init_(model, generator=torch.Generator().manual_seed(seed) if generator else None)
    for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert torch.equal(full(p.detach()), q.detach())


def test_init_of_shards_of_shards():
    """`fully_shard` over tensor parallelism, with sizes that neither divides."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)).double()
    sharded = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)).double()
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    parallelize_module(sharded, both["parts"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(sharded, mesh=both["shards"])
    for model, seed in ((whole, 3), (sharded, 3 + dist.get_rank())):
        torch.manual_seed(seed)
        lwlr_init_(model)
    for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert torch.equal(full(p.detach()), q.detach())


class OfSequences(nn.Module):
    """A model whose samples are spread over processes, as in `SequenceParallel`."""

    def __init__(self, parallel):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = (m.double() for m in (nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 3)))
        self.parallel = parallel
        if parallel:
            plan = {"norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(input_layouts=Shard(0))}
            parallelize_module(self, mesh(4), {**plan, "down": RowwiseParallel()})

    def forward(self, x):
        x = placed(x, "rows") if self.parallel else x
        return self.down(torch.tanh(self.up(self.norm(x))))


def test_gradients_that_are_partial_sums_are_added_up():
    """Gradients of the normalization: each process has the sum over its samples. `.grad` does not change."""
    statistics, rates = [], []
    for model in (OfSequences(False), OfSequences(True)):
        cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
        placements = getattr(model.norm.weight.grad, "placements", None)
        measure = StatisticsPass(layers_of(model), "auto")
        statistics += [measure().values, measure().values]
        assert getattr(model.norm.weight.grad, "placements", None) == placements
        rates.append(dict(calibrate(model, batches(), cross_entropy, init=False)))
    assert placements[0].is_partial()
    for values in statistics[1:]:
        torch.testing.assert_close(values, statistics[0], rtol=1e-9, atol=1e-12)
    assert rates[1] == pytest.approx(rates[0], rel=1e-9)


def normalized():
    """Weights whose scale does not matter, with a bias in between and running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5))
    return model.append(nn.Linear(5, 3)).double()


def test_weight_rescaling():
    """Ŵ is computed from whole weights, and the layers that follow are found again after the model is sharded."""
    whole, sharded = normalized(), normalized()
    batch = batches()[0]
    layers = [scale_invariant(model, batch, cross_entropy) for model in (sharded, whole)]
    assert layers[0].names == layers[1].names == ("0.weight", "3.weight")
    for module in (sharded[0], sharded):
        fully_shard(module, mesh=mesh(4))
    optimizers = [
        OURS["sgd"](model.named_parameters(), lr=0.1, momentum=0.9, rescale_weights=found)
        for model, found in zip((sharded, whole), layers, strict=True)
    ]
    for inputs, targets in batches():
        for model, optimizer in zip((sharded, whole), optimizers, strict=True):
            model.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        for p, q in zip(sharded.state_dict().values(), whole.state_dict().values(), strict=True):
            torch.testing.assert_close(full(p), q, rtol=1e-9, atol=1e-9)
        for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
            mine, other = (optimizer.state[r] for optimizer, r in zip(optimizers, (p, q), strict=True))
            torch.testing.assert_close(full(mine["momentum_buffer"]), other["momentum_buffer"], rtol=1e-9, atol=1e-9)
    assert max(full(p.detach()).norm() for p in layers[0].weights) < 1.1
    with pytest.raises(ValueError, match="model is sharded over processes: call scale_invariant before sharding"):
        scale_invariant(sharded, batch, cross_entropy)


def evaluated(model):
    """After a pass without gradients, which leaves the root's parameters gathered."""
    with torch.no_grad():
        model(batches()[0][0])
    return model


def test_gathered_weights_do_not_count():
    whole, sharded = network(), shard(network(), "fully_shard")
    found = [calibrate(model, batches(), cross_entropy) for model in (whole, evaluated(sharded))]
    assert dict(found[1]) == pytest.approx(dict(found[0]), rel=1e-9)
    statistics = []
    for model in (whole, sharded):
        cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
        statistics.append(layer_statistics(evaluated(model)))
    assert statistics[0].names == statistics[1].names
    torch.testing.assert_close(statistics[0].values, statistics[1].values, rtol=1e-9, atol=1e-12)
    for model in (whole, evaluated(sharded)):
        lwlr_init_(model, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(sharded(batches()[1][0]), whole(batches()[1][0]), rtol=1e-9, atol=1e-12)
    # a calibration must not leave its random weights in use
    calibrate(evaluated(sharded), batches(), cross_entropy)
    with torch.no_grad():
        torch.testing.assert_close(sharded(batches()[1][0]), whole(batches()[1][0]), rtol=1e-9, atol=1e-12)
