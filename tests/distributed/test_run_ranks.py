"""Files written by a run of two processes, which also stop, fail and continue together."""

import errno
import json
import os
import signal
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharding import full, mesh
from steps import OPTIONS, OURS, TORCH, identical
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fused_lwlr import LARS
from fused_lwlr.data import Batch, files
from fused_lwlr.runs.metrics import Metrics, read_records
from fused_lwlr.runs.provenance import read_starts, record_facts, record_start
from fused_lwlr.training.checkpoints import Checkpoints
from fused_lwlr.training.evaluate import evaluate
from fused_lwlr.training.layer_values import LayerProbe
from fused_lwlr.training.processes import World
from fused_lwlr.training.records import Interval
from fused_lwlr.training.signals import StopFlag, StoppedError

pytestmark = pytest.mark.ranks(2)
MULTIPLIERS = {"0.weight[0:3]": 2.0, "2.weight": 0.5, "2.bias": 0.0}
OPTIMIZERS = {
    "sgd": lambda params, **more: OURS["sgd"](params, **OPTIONS["sgd"], **more),
    "lars": lambda params, **more: OURS["sgd"](params, **OPTIONS["sgd"], scaling=LARS(0.1), **more),
    "no state": lambda params, **more: OURS["sgd"](params, lr=0.1, **more),
    "adamw": lambda params, **more: OURS["adamw"](params, **OPTIONS["adamw"], **more),
    "torch": lambda params, **more: TORCH["adamw"](params, **OPTIONS["adamw"], foreach=False),
}
CONFIG = {"lr": 0.1}


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def replicated():
    return DistributedDataParallel(plain())


def sharded():
    model = plain()
    for module in (model[0], model):
        fully_shard(module, mesh=mesh(2))
    return model


MODELS = {"plain": plain, "ddp": replicated, "fsdp": sharded}


def train(model, optimizer, steps):
    """All ranks have the same data, so that all kinds of models give the same result."""
    for step in steps:
        model.zero_grad()
        model(torch.rand(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def everything(model, optimizer):
    """All tensors whole, in order."""
    params = [full(p.detach()) for p in model.parameters()]
    state = [full(v) for p in model.parameters() for _, v in sorted(optimizer.state.get(p, {}).items())]
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return deepcopy((params, [*model.buffers()], state, groups))


# raised by torch 2.8 itself
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("saved", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_is_loaded_to_the_same_bits_sharded_or_not(name, saved):
    model = MODELS[saved]()
    inner = model.module if saved == "ddp" else model
    optimizer = OPTIMIZERS[name](inner.named_parameters(), layers=MULTIPLIERS if name != "lars" else None)
    train(model, optimizer, range(2))
    checkpoints = Checkpoints("checkpoints")
    own = {"rng": torch.tensor([dist.get_rank()])}
    model.zero_grad()
    taken = []
    counter = optimizer.register_step_pre_hook(lambda *arguments: taken.append(1))
    path = checkpoints.save(
        2, model=inner, optimizer=optimizer, config=CONFIG, state={"losses": [1.5, torch.ones(2)]}, own=own
    )
    # torch's own functions take a step to find out which state exists
    assert not taken
    counter.remove()
    expected = everything(model, optimizer)
    weights = files.read_tensors(path)["models"]["model"]
    assert identical(weights, {name: full(tensor) for name, tensor in inner.state_dict().items()})
    train(model, optimizer, range(2, 4))
    for kind, make in MODELS.items():
        other = make()
        bare = other.module if kind == "ddp" else other
        # multipliers come with the checkpoint
        again = OPTIMIZERS[name](bare.named_parameters())
        if kind == "plain":
            # has state already; the others have none
            train(other, again, range(7, 8))
        found = checkpoints.restore(model=bare, optimizer=again, config=CONFIG)
        assert found.step == 2
        owned = [{"rng": torch.tensor([rank])} for rank in range(2)]
        assert identical((found.state, found.own), ({"losses": [1.5, torch.ones(2)]}, owned))
        assert identical(everything(other, again), expected)
        train(other, again, range(2, 4))
        if kind == saved:
            assert identical(everything(other, again), everything(model, optimizer))


def test_a_failure_to_write_is_one_of_all_ranks():
    model = replicated()
    optimizer = OPTIMIZERS["sgd"](model.module.named_parameters())
    train(model, optimizer, range(1))
    checkpoints = Checkpoints("checkpoints")
    run = {"model": model.module, "optimizer": optimizer, "config": CONFIG}
    first = checkpoints.save(1, **run)
    before = first.read_bytes()
    train(model, optimizer, range(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match=r"could not be written.*No space left.*resume from .*step-000000001.pt"):
            checkpoints.save(2, **run)
    assert [path.name for path in Path("checkpoints").iterdir()] == [first.name]
    assert first.read_bytes() == before
    assert checkpoints.restore(**run).step == 1


def full_disk(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_mismatch_is_refused_on_all_ranks(kind):
    model = MODELS[kind]()
    inner = model.module if kind == "ddp" else model
    optimizer = OPTIMIZERS["sgd"](inner.named_parameters())
    train(model, optimizer, range(1))
    run = {"model": inner, "optimizer": optimizer}
    checkpoints = Checkpoints("checkpoints")
    checkpoints.save(1, **run, config=CONFIG)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=r"\n  --lr: 0\.1 -> 0\.2\n"):
        checkpoints.restore(**run, config={"lr": 0.2})
    wide = nn.Sequential(nn.Linear(4, 6))
    with pytest.raises(ValueError, match=r"0\.weight is \(5, 4\) float32 there and \(6, 4\) float32 here"):
        checkpoints.restore(model=wide, optimizer=OPTIMIZERS["no state"](wide.named_parameters()), config=CONFIG)
    assert identical(everything(model, optimizer), before)
    assert Checkpoints("elsewhere").restore(**run, config=CONFIG) is None


def test_all_ranks_stop_after_the_step_in_which_one_got_a_signal():
    asked = []
    with StopFlag() as flag:
        for step in range(6):
            if step == 4 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            asked.append(flag.agree(wanted=step == 2 and dist.get_rank() == 0))
            if asked[-1][0]:
                break
    assert asked == [(False, False), (False, False), (False, True), (False, False), (True, True)]
    assert flag.exit_code == 143


@pytest.mark.parametrize(("signalled", "tested"), [(None, True), (0, False), (1, False)])
def test_all_ranks_validate_or_stop_with_unequal_batches(signalled, tested):
    """Rank 0 has three batches of two samples, rank 1 one batch; a signal comes with the first batch of a rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, world = nn.Linear(4, 3), World(rank, 2, torch.device("cpu"))
    inputs, targets = torch.rand(4, 2, 4), torch.tensor([[0, 1], [2, 0], [1, 1], [2, 2]])

    def batches():
        for i in range(3) if rank == 0 else [3]:
            if rank == signalled:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield Batch(inputs[i], targets[i], ())

    with StopFlag() as flag:
        try:
            found = evaluate(
                model, batches(), world, nullcontext, {"model": nullcontext}, agree=flag.agree, accuracy=True
            )["model"]
        except StoppedError:
            assert not tested
            return
    assert tested
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    assert (found.count, found.loss) == (8, pytest.approx(loss, rel=1e-6))


def test_batches_that_a_sharded_model_would_wait_for_are_refused():
    with pytest.raises(ValueError, match=rf"process {dist.get_rank()} has fewer batches to test than another one"):
        evaluate(
            sharded(), [], World(dist.get_rank(), 2, torch.device("cpu")), nullcontext, {"model": nullcontext},
            agree=lambda wanted: (False, True), accuracy=True,
        )  # fmt: skip


def test_only_the_first_rank_writes():
    record_start("run", {"model": "x"}, device=torch.device("cpu"))
    record_facts("run", end="finished")
    metrics = Metrics("run", after=None)
    for step in (1, 2):
        metrics.add(Interval(step, step / 2, 0.1, 1.0, 8, 1.0, 0.5, 0.5))
    dist.barrier()
    assert [record["step"] for record in read_records("run/metrics.jsonl")] == [1, 2]
    [start] = read_starts("run")
    assert (start["devices"], start["end"]) == (["cpu", "cpu"], "finished")
    dist.barrier()
    if dist.get_rank() == 0:
        Path("run/metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    dist.barrier()
    with pytest.raises(ValueError, match=r"line 1 of run/metrics.jsonl is not a record of a run"):
        Metrics("run", after=1)


@pytest.mark.parametrize("name", ["lars", "adamw"])
def test_layers_of_a_sharded_model_are_whole(name):
    torch.manual_seed(0)
    # before a normalization, gradients of biases would be rounding noise
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    fully_shard(model, mesh=mesh(2))
    optimizer = OPTIMIZERS[name](model.named_parameters())
    before = [full(p.detach()).norm().item() for p in model.parameters()]
    probe = LayerProbe(model, optimizer, backend="torch")
    hook = optimizer.register_step_pre_hook(lambda *_: probe.before(1.0))
    train(model, optimizer, range(1))
    hook.remove()
    found = probe.after(1)
    assert found.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert found.weight == (True, False, True, False)
    elr = [full(p.grad).norm().item() / norm for p, norm in zip(model.parameters(), before, strict=True)]
    assert found.elr == pytest.approx(elr, rel=1e-5)
    # with a weight decay of 0.1
    assert found.trust_ratio[0] == pytest.approx(0.1 / (elr[0] + 0.1) if name == "lars" else 1.0, rel=1e-5)
