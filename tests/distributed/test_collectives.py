"""Number of collectives: one in a step that needs norms of whole layers, none in other steps."""

import pytest
import torch
import torch.distributed as dist
from cases import SCALINGS
from collectives import counted
from sharding import LAYOUTS, gradients, mesh, parameters, spread
from steps import OPTIONS, OURS
from torch.distributed.tensor import Shard, distribute_tensor

from fused_lwlr import ELR, LAMB, LARS, ClipByLayer, Hyperball, layer_statistics

pytestmark = pytest.mark.ranks(4)
# how many dimensions of the mesh shard a parameter
SHARDED = {"rows": 1, "columns": 1, "whole": 0, "hybrid": 1, "both": 2, "twice": 2}
SILENT = [("sgd", {}), ("adamw", {"amsgrad": True, "layers": {"attn.qkv.weight[1:3]": 0.5}})]
ONCE = [
    *((name, {"scaling": scaling}) for name in OURS for scaling in SCALINGS),
    ("sgd", {"clip_global_norm": 1.0}), ("adamw", {"nonfinite": "skip"}), ("sgd", {"nonfinite": "raise"}),
    ("sgd", {"scaling": LARS(), "clip_global_norm": 1.0, "nonfinite": "skip"}),
    ("adamw", {"scaling": ClipByLayer(1.0), "clip_global_norm": 1.0}),
    ("adamw", {"scaling": LAMB(), "nonfinite": "skip", "layers": {"attn.qkv.weight[1:3]": 0.5}}),
]  # fmt: skip
# clipping changes the direction, whose norm is then not known beforehand
TWICE = [
    ("adamw", {"scaling": LAMB(), "clip_global_norm": 1.0}),
    ("adamw", {"scaling": ELR(0.1), "clip_global_norm": 1.0, "nonfinite": "raise"}),
]


def test_the_counter_counts_calls():
    with counted() as talk:
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.all_gather([torch.ones(1) for _ in range(4)], torch.ones(1))
    assert talk.calls == [("all_reduce", (torch.float64, 2)), ("all_gather", None)]
    assert talk.total == 2
    with counted() as talk:
        # past the functions that users call
        distribute_tensor(torch.ones(4), mesh(4), [Shard(0)]).full_tensor()
    assert talk.total == 2
    with counted() as talk:
        torch.ones(1)
    assert (talk.calls, talk.total) == ([], 0)


@pytest.mark.parametrize(
    ("name", "options", "times", "layout"),
    [(*row, 0, layout) for row in SILENT for layout in ("rows", "hybrid", "both")]
    + [(*row, 1, "rows") for row in ONCE]
    + [(*ONCE[-2], 1, layout) for layout in LAYOUTS if layout != "rows"]
    + [(*TWICE[0], 2, layout) for layout in LAYOUTS]
    + [(*TWICE[1], 2, "twice")],
)
def test_all_reduces_of_a_step(name, options, times, layout):
    """On the first step, which makes tables and radii, and on later ones; with some numbers for each layer."""
    whole = parameters()
    sharded = spread(whole, layout, plain=("conv.bias",))
    ours = OURS[name](sharded, backend="torch", **{**OPTIONS[name], **options})
    for step in range(3):
        gradients(whole, sharded)
        with counted() as talk:
            ours.step()
        radii = step == 0 and isinstance(options.get("scaling"), Hyperball)
        assert len(talk.calls) == talk.total == (times + radii) * SHARDED[layout]
        rows = len(whole) + 2 * ("layers" in options)
        for call, (dtype, numel) in talk.calls:
            assert call == "all_reduce"
            assert dtype == torch.float64
            assert numel <= 8 * rows
    with counted() as talk:
        ours.state_dict()
        if "scaling" in options:
            ours.layer_stats()
    assert (talk.calls, talk.total) == ([], 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduces_of_statistics(layout):
    """One all-reduce of sums and one of maxima."""
    whole = parameters()
    sharded = spread(whole, layout)
    for _ in range(2):
        gradients(whole, sharded)
        with counted() as talk:
            layer_statistics(sharded)
        assert [name for name, _ in talk.calls] == ["all_reduce"] * 2 * SHARDED[layout]
        assert talk.total == len(talk.calls)
