"""Averages of sharded weights are shards of the averages of whole ones."""

import pytest
import torch
from sharding import compare, full, gradients, mesh, parameters, spread
from steps import OPTIONS, OURS
from tolerances import close, same
from torch import nn
from torch.distributed.fsdp import fully_shard

from fused_lwlr import LAMB

pytestmark = pytest.mark.ranks(4)
EXACT = {"master_weights": True, "dtype": torch.bfloat16}
ROWS = [
    *(("sgd", {}, layout, "torch") for layout in ("rows", "whole", "both")), ("adamw", EXACT, "rows", "torch"),
    ("adamw", {}, "columns", "triton"), ("adamw", {"scaling": LAMB(), "nonfinite": "skip"}, "hybrid", "torch"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "layout", "backend"), ROWS)
def test_as_of_whole_parameters(name, options, layout, backend):
    """Placed as the parameters are, and put into them and taken out of them as whole ones are."""
    options = dict(options)
    whole = parameters(options.pop("dtype", torch.float32))
    sharded = spread(whole, layout, ("conv.bias",))
    make = {**OPTIONS[name], "ema": 0.9, **options, "backend": backend}
    ours, expected = OURS[name](sharded, **make), OURS[name](whole, **make)
    check = close if "scaling" in options or backend == "triton" else same
    for _ in range(2):
        gradients(whole, sharded)
        ours.step()
        expected.step()
    compare(check, ours, expected, sharded, whole)
    again = OURS[name](spread(whole, layout, ("conv.bias",)), **make)
    again.load_state_dict(ours.state_dict())
    for param, (_, p) in zip(again.param_groups[0]["params"], sharded, strict=True):
        same(full(again.state[param]["ema"]), full(ours.state[p]["ema"]))
    before, versions = [full(p.detach()).clone() for _, p in sharded], [p._version for _, p in sharded]
    with ours.averaged(), expected.averaged():
        for (_, p), (_, q) in zip(sharded, whole, strict=True):
            check(full(p.detach()), q.detach())
            same(full(p.detach()), full(ours.state[p]["ema"]).to(p.dtype))
    for (_, p), value, version in zip(sharded, before, versions, strict=True):
        same(full(p.detach()), value)
        assert p._version > version


@pytest.mark.parametrize("name", OURS)
def test_an_evaluation_under_fully_shard(name):
    """Also where an evaluation has just left whole weights behind."""
    torch.manual_seed(0)
    alone, model = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(2))
    model.load_state_dict(alone.state_dict())
    for module in (model[0], model):
        fully_shard(module, mesh=mesh(4))
    ours, expected = (OURS[name](m.parameters(), lr=0.1, ema=0.5, backend="torch") for m in (model, alone))
    data = torch.rand(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def agree():
        with torch.no_grad():
            outputs = [m(data) for m in (model, alone)]
        torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
        return outputs[0]

    for _ in range(2):
        for m, optimizer in ((model, ours), (alone, expected)):
            optimizer.zero_grad()
            m(data).square().mean().backward()
            optimizer.step()
        trained = agree()
        with ours.averaged(model), expected.averaged():
            assert not torch.allclose(agree(), trained)
        same(agree(), trained)
