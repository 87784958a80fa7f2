"""Models under `fully_shard` train like one process on all of the data, and like torch's own optimizers."""

import math

import pytest
import torch
import torch.distributed as dist
from cases import nan_arithmetic
from sharding import full, mesh
from steps import OPTIONS, OURS, TORCH, launches
from tolerances import close, same
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fused_lwlr import ELR, LAMB, LARS, NormalizedGradient

pytestmark = pytest.mark.ranks(4)
SLICES = {"0.weight[0:3]": 2.0, "0.weight[3:5]": 0.5, "2.weight": 3.0}
ROWS = [
    ("sgd", {"layers": SLICES}), ("sgd", {"scaling": LARS(0.1), "clip_global_norm": 0.1}),
    ("sgd", {"scaling": NormalizedGradient(), "nonfinite": "skip", "layers": SLICES}),
    ("adamw", {"amsgrad": True}), ("adamw", {"scaling": ELR(0.1), "layers": SLICES}),
    ("adamw", {"scaling": LAMB(), "clip_global_norm": 0.1, "nonfinite": "raise"}),
]  # fmt: skip


def network(dtype=torch.float32):
    """A model whose first layer has five rows, and whose last bias has one element."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def sharded(model, *shape, **options):
    """Each linear layer separately and the rest together, the last layer frozen in part."""
    model[4].bias.requires_grad_(False)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh(*shape), **options)
    return model


def batch(step, dtype=torch.float32):
    return torch.rand(8, 4, generator=torch.Generator().manual_seed(step), dtype=dtype)


def mine(data):
    return data.chunk(dist.get_world_size())[dist.get_rank()]


def backward(model, data):
    model.zero_grad()
    model(data).square().mean().backward()


def parts(model):
    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "options", "shape"), [*((*row, (4,)) for row in ROWS), *((*row, (2, 2)) for row in ROWS[1::2])]
)
def test_as_one_process_on_the_whole_batch(name, options, shape):
    """In double precision, in which the mean of means equals the mean up to negligible rounding."""
    model, alone = sharded(network(torch.float64), *shape), network(torch.float64)
    alone[4].bias.requires_grad_(False)
    make = {**OPTIONS[name], **options, "backend": "torch"}
    ours, expected = (OURS[name](net.named_parameters(), **make) for net in (model, alone))
    for step in range(5):
        backward(model, mine(batch(step, torch.float64)))
        backward(alone, batch(step, torch.float64))
        ours.step()
        expected.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(full(p.detach()), q.detach(), rtol=1e-9, atol=1e-9)
        if "scaling" in options:
            mine_, other = ours.layer_stats().to_dict(), expected.layer_stats().to_dict()
            assert mine_.keys() == other.keys()
            for layer in mine_:
                assert mine_[layer] == pytest.approx(other[layer], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", OURS)
def test_against_torch(name, clip, half):
    """Against torch's optimizer and its clipping of DTensors, on the same gradients; also after bfloat16 passes."""
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if half else {}
    model, other = (sharded(network(), 4, **policy) for _ in range(2))
    ours = OURS[name](model.parameters(), **OPTIONS[name], clip_global_norm=clip, backend="torch")
    expected = TORCH[name](other.parameters(), **OPTIONS[name], foreach=False)
    for step in range(4):
        backward(model, mine(batch(step)))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        if clip is not None:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        ours.step()
        expected.step()
        for p, q in zip(parts(model), parts(other), strict=True):
            close(p.detach(), q.detach(), 2 * (step + 1))


@pytest.mark.parametrize("name", OURS)
def test_shards_that_stay_on_the_cpu_are_stepped_by_kernels(name):
    """With `CPUOffloadPolicy`: one pass for norms, one for the step, and the same bits as without the policy."""
    policy = CPUOffloadPolicy(pin_memory=False)
    model, other = sharded(network(), 4, offload_policy=policy), sharded(network(), 4)
    ours, expected = (
        OURS[name](net.named_parameters(), **OPTIONS[name], scaling=LAMB(), backend="triton") for net in (model, other)
    )
    for step in range(3):
        for net in (model, other):
            backward(net, mine(batch(step)))
        with launches(2):
            ours.step()
        expected.step()
        for p, q in zip(parts(model), parts(other), strict=True):
            same(p.detach(), q.detach())


def test_without_a_scaling_shards_take_the_step_without_norms():
    """Its kernel has a list of tiles; the queue, which is slower, has items of norms and updates."""
    model = sharded(network(), 4)
    ours = OURS["adamw"](model.parameters(), **OPTIONS["adamw"], backend="triton")
    backward(model, mine(batch(0)))
    ours.step()
    tables = [each for plan in ours._last_plans[0].launch_plans for each in plan.table.device_tables.values()]
    assert {key[0] for table in tables for key in table.kernels} == {"step"}


@nan_arithmetic
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("control", ["scaler", "skip"])
@pytest.mark.parametrize("name", OURS)
def test_an_overflow_in_one_shard_skips_the_step_everywhere(name, control, first):
    """One weight of the first process overflows; GradScaler, which asks the other processes, or `nonfinite` sees it."""
    model, expected = (sharded(network(), 4) for _ in range(2))
    make = {**OPTIONS[name], "backend": "torch"}
    ours = OURS[name](model.parameters(), nonfinite="skip" if control == "skip" else "propagate", **make)
    other = OURS[name](expected.parameters(), nonfinite=ours.options.nonfinite, **make)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100, enabled=control == "scaler")
    for step in range(4):
        overflows = step == (0 if first else 2)
        before = [p.detach().clone() for p in parts(model)]
        model.zero_grad()
        scaler.scale(model(mine(batch(step))).square().mean()).backward()
        if overflows and dist.get_rank() == 0:
            model[2].weight.grad.to_local()[0, 0] = math.inf
        scale = scaler.get_scale()
        scaler.step(ours)
        scaler.update()
        if overflows:
            for p, q in zip(parts(model), before, strict=True):
                same(p.detach(), q)
            assert scaler.get_scale() == (scale / 2 if control == "scaler" else scale)
        else:
            backward(expected, mine(batch(step)))
            other.step()
        for p, q in zip(parts(model), parts(expected), strict=True):
            close(p.detach(), q.detach(), 2 * (step + 1))
    counts = [state["step"].item() for state in ours.state.values() if "step" in state]
    assert set(counts) == ({3.0} if counts else set())
