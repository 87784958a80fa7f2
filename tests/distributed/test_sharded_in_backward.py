"""Steps during backward under `fully_shard` equal steps after it."""

from contextlib import nullcontext

import pytest
import torch
from sharding import local
from steps import ALL, OPTIONS
from test_fully_shard import SLICES, backward, batch, mine, network, parts, sharded
from tolerances import same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from fused_lwlr import ELR, LAMB, Hyperball, offload_to_cpu, step_in_backward

pytestmark = pytest.mark.ranks(4)
ROWS = [
    ("sgd", {"scaling": ELR(0.1), "layers": SLICES}), ("adamw", {"scaling": LAMB()}), ("adamw", {"amsgrad": True}),
    ("lion", {"scaling": Hyperball()}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "shape", "size"),
    [*((*row, (4,), 1) for row in ROWS), (*ROWS[0], (4,), 1 << 30), (*ROWS[1], (2, 2), 100)],
)
def test_steps_equal_steps_after_backward(name, options, size, shape):
    sides = [sharded(network(), *shape) for _ in range(2)]
    after, during = (ALL[name](net.named_parameters(), **{**OPTIONS[name], **options}) for net in sides)
    step_in_backward(sides[1], during, max_bytes=size)
    for step in range(3):
        for model, optimizer in zip(sides, (after, during), strict=True):
            # the first pass of two is accumulated before gradients are averaged
            model.set_requires_gradient_sync(False)
            backward(model, mine(batch(10 + step)))
            model.set_requires_gradient_sync(True)
            model(mine(batch(step))).square().mean().backward()
            if optimizer is during and size < 1 << 30:
                held = sum(param.grad is not None for param in model.parameters())
                assert held <= (0 if size == 1 else 2)
            optimizer.step()
        assert all(param.grad is None for param in sides[1].parameters())
        for p, q in zip(*map(parts, sides), strict=True):
            same(p.detach(), q.detach())
        for p, q in zip(*(model.parameters() for model in sides), strict=True):
            assert after.state[p].keys() == during.state[q].keys()
            for key, value in after.state[p].items():
                same(local(value), local(during.state[q][key]))


@pytest.mark.parametrize(
    ("version", "device", "accepted"), [("2.12.1", "cpu", True), ("2.12.1", "cuda", False), ("2.13.0", "cuda", True)]
)
def test_gradients_must_have_arrived_when_hooks_run(version, device, accepted):
    """Shards are on the CPU, and computations on another device, as far as the mesh tells."""
    model = sharded(network(), 4, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = ALL["sgd"](model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", TorchVersion(version))
        patch.setattr(DeviceMesh, "device_type", device)
        with nullcontext() if accepted else pytest.raises(RuntimeError, match=r"CPUOffloadPolicy needs torch 2\.13"):
            step_in_backward(model, optimizer)


def test_parameters_that_are_not_sharded_are_refused():
    for model in (DistributedDataParallel(network()), nn.Sequential(sharded(network(), 4), nn.Linear(1, 1))):
        optimizer = ALL["sgd"](model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="with a process group needs parameters that fully_shard has sharded"):
            step_in_backward(model, optimizer)
        with pytest.raises(RuntimeError, match="offload_policy=CPUOffloadPolicy"):
            offload_to_cpu(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
