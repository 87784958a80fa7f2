"""A step on shards equals the step on whole parameters, also if it needs values of whole layers."""

from itertools import cycle

import pytest
from cases import SCALINGS
from own_scalings import Aligned, Six
from sharding import LAYOUTS, compare, full, gradients, local, parameters, spread
from steps import ALL, OPTIONS, OURS, TORCH
from tolerances import STATISTICS, close, same

from fused_lwlr import ELR, LAMB, LARC, LARS, BalancedLR, Hyperball, RadialBrake, UpdateFloor
from fused_lwlr.kernels import RETRACTION_STATISTICS

pytestmark = pytest.mark.ranks(4)
# slices that begin and end within a shard, at its end, and in the same one
SLICES = {"attn.qkv.weight[0:1]": 2.0, "attn.qkv.weight[1:3]": 0.5, "attn.qkv.weight[5:12]": 3.0, "conv.weight": 0.0}
DOT = RETRACTION_STATISTICS.index("direction_dot")
DECAYS = {"*.bias": {"weight_decay": 0.0}, "attn.qkv.weight[1:3]": {"weight_decay": 3.0}}
PLAIN = [
    ("sgd", {"nesterov": True}), ("sgd", {"momentum": 0.0}), ("adamw", {}),
    ("adamw", {"amsgrad": True, "maximize": True}),
]  # fmt: skip
CONTROLS = [
    ("sgd", {"clip_global_norm": 0.5}), ("sgd", {"nonfinite": "skip"}), ("sgd", {"nonfinite": "raise"}),
    ("sgd", {"scaling": ELR(0.1), "layers": SLICES}), ("sgd", {"scaling": LARC(), "clip_global_norm": 0.5}),
    ("adamw", {"scaling": LAMB(), "clip_global_norm": 0.5, "layers": SLICES}),
    ("adamw", {"scaling": ELR(0.1), "nonfinite": "skip", "clip_global_norm": 0.5}),
    ("adamw", {"scaling": LARS(), "layers": SLICES}),
    ("sgd", {"scaling": BalancedLR(), "layers": SLICES}),
    ("lion", {"scaling": LAMB(), "clip_global_norm": 0.5, "layers": SLICES}),
    ("sgd", {"scaling": ELR(0.1, retract="sphere"), "nonfinite": "skip"}),
    ("adamw", {"scaling": Hyperball(), "clip_global_norm": 0.5, "layers": SLICES}),
    ("adamw", {"scaling": UpdateFloor(0.5, ceiling=2.0), "layers": SLICES}),
    ("adamw", {"scaling": RadialBrake(0.3, 0.6), "clip_global_norm": 0.5, "layers": SLICES}),
    # options of layers, of which decay is in the norm, and eps and betas in each process's part of it
    ("adamw", {"scaling": LAMB(), "layers": [SLICES, {"attn*": {"eps": 0.01, "betas": (0.5, 0.9)}, **DECAYS}]}),
    ("sgd", {"scaling": LARC(), "layers": [SLICES, DECAYS]}),
    ("lion", {"scaling": ELR(0.1), "layers": {"*": {"corrected_decay": True}}, "cautious_decay": True}),
    ("adamw", {"scaling": LAMB(), "layers": [SLICES, DECAYS], "cautious_decay": True}),
    ("adamw", {"scaling": Aligned(), "layers": [SLICES, DECAYS]}),
    ("sgd", {"scaling": Six(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), "clip_global_norm": 0.5}),
]  # fmt: skip


def follow(name, options, backend, layout, steps, check, plain=("conv.bias",)):
    """Two optimizers, on shards and on whole parameters, that must stay equal."""
    whole = parameters()
    sharded = spread(whole, layout, plain)
    make = {**OPTIONS[name], **options, "backend": backend}
    ours, expected = ALL[name](sharded, **make), ALL[name](whole, **make)
    for step in range(steps):
        gradients(whole, sharded)
        before = [local(p.grad).clone() for _, p in sharded]
        ours.step()
        expected.step()
        compare(lambda a, b, step=step: check(a, b, step + 1), ours, expected, sharded, whole)
        for (_, p), grad in zip(sharded, before, strict=True):
            same(local(p.grad), grad)
        if options.get("scaling") is not None and not isinstance(options["scaling"], BalancedLR):
            mine, other = ours.layer_stats(), expected.layer_stats()
            assert (mine.names, mine.constrained) == (other.names, other.constrained)
            kept = [i for i in range(mine.values.shape[1]) if i != DOT]
            close(mine.values[:, kept].float(), other.values[:, kept].float(), steps=4 * (step + 1))
            if other.values.shape[1] > DOT:
                # a sum with cancellation
                size = other.weight_norm * other.values[:, DOT - 1].sqrt()
                assert ((mine.values[:, DOT] - other.values[:, DOT]).abs() <= STATISTICS * size).all()


# options do not see the layout
@pytest.mark.parametrize(
    ("name", "options", "layout"),
    [*((*row, "rows") for row in PLAIN), *((*PLAIN[3], layout) for layout in LAYOUTS if layout != "rows")],
)
def test_without_norms_it_is_the_same_step(name, options, layout):
    """Equals the whole step bit for bit, and also torch's, which steps DTensors by itself."""
    follow(name, options, "torch", layout, 2, lambda a, b, _: same(a, b))
    whole = parameters()
    sharded, other = spread(whole, layout), spread(whole, layout)
    ours = OURS[name](sharded, backend="torch", **{**OPTIONS[name], **options})
    expected = TORCH[name](other, foreach=False, **{**OPTIONS[name], **options})
    for step in range(2):
        gradients(whole, sharded)
        for (_, p), (_, q) in zip(sharded, other, strict=True):
            q.grad = p.grad.clone()
        ours.step()
        expected.step()
        for (_, p), (_, q) in zip(sharded, other, strict=True):
            close(local(p.detach()), local(q.detach()), step + 1)


@pytest.mark.parametrize("layout", ["rows", "columns", "hybrid", "both"])
def test_slices_are_of_the_whole(layout):
    follow("sgd", {"layers": SLICES}, "torch", layout, 3, lambda a, b, _: same(a, b))


def test_slices_of_rows_that_are_sharded_twice_are_refused():
    """Each process has rows that do not follow one another."""
    sharded = spread(whole := parameters(), "twice")
    ours = OURS["sgd"](sharded, lr=0.1, layers=SLICES)
    gradients(whole, sharded)
    with pytest.raises(ValueError, match="sharded at most once"):
        ours.step()
    for (_, p), (_, q) in zip(sharded, whole, strict=True):
        same(full(p.detach()), q.detach())


@pytest.mark.parametrize(
    ("name", "options", "layout"),
    [(*row, "rows") for row in CONTROLS]
    + [(*CONTROLS[3], layout) for layout in LAYOUTS if layout != "rows"]
    + [(*row, layout) for row, layout in zip(CONTROLS[5::2], cycle(("columns", "both", "twice")), strict=False)],
)
def test_norms_are_of_the_whole(name, options, layout):
    if layout == "twice":
        options = {**options, "layers": None}
    follow(name, options, "torch", layout, 2, close)


@pytest.mark.parametrize(("name", "scaling"), [*zip(cycle(OURS), SCALINGS, strict=False)])
def test_every_scaling(name, scaling):
    follow(name, {"scaling": scaling, "clip_global_norm": 1.0 if name == "sgd" else None}, "torch", "rows", 2, close)


@pytest.mark.parametrize(
    ("name", "options", "layout"),
    [
        ("sgd", {}, "rows"),
        ("adamw", {}, "columns"),
        (*CONTROLS[3], "hybrid"),
        (*CONTROLS[5], "rows"),
        ("adamw", {"scaling": BalancedLR(), "clip_global_norm": 0.5}, "rows"),
        ("lion", {"scaling": ELR(0.1), "ema": 0.9}, "rows"),
        ("lion", {"scaling": Hyperball(), "layers": SLICES}, "columns"),
        (*CONTROLS[11], "rows"),
    ],
)
def test_kernels_step_shards(name, options, layout):
    """Through Triton; some programs have no work."""
    follow(name, options, "triton", layout, 2, close)
