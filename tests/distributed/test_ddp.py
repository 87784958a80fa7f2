"""DistributedDataParallel: each replica takes the step of one process on all of the data, without communication."""

import math
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from cases import name_of, nan_arithmetic
from collectives import counted
from steps import OPTIONS, OURS, identical
from tolerances import same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fused_lwlr import ELR, LAMB, LARS, BalancedLR, ClipByLayer, calibrate, lwlr_init_, scale_invariant

pytestmark = pytest.mark.ranks(2)
MULTIPLIERS = {"0.weight": 0.5, "2.weight[0:2]": 2.0, "2.bias": 0.0}
SCALED = [
    ("sgd", {"layers": MULTIPLIERS}), ("sgd", {"scaling": LARS(0.1), "clip_global_norm": 0.1}),
    ("sgd", {"scaling": ELR(0.1), "nonfinite": "skip", "layers": MULTIPLIERS}),
    ("adamw", {"layers": MULTIPLIERS}), ("adamw", {"amsgrad": True, "scaling": ClipByLayer(0.01)}),
    ("adamw", {"scaling": LAMB(), "clip_global_norm": 0.1, "nonfinite": "skip"}),
]  # fmt: skip


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)


def batch(step, dtype=torch.float32):
    """The data of both ranks for one step."""
    return torch.rand(8, 4, generator=torch.Generator().manual_seed(step), dtype=dtype)


def mine(data):
    return data.chunk(dist.get_world_size())[dist.get_rank()]


def backward(model, data):
    model.zero_grad()
    model(data).square().mean().backward()


def everything(model, optimizer):
    return deepcopy((model.state_dict(), optimizer.state_dict()))


def same_on_all_ranks(thing):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return all(identical(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("name", "options", "backend", "view"),
    [(*row, "torch", view) for row in SCALED for view in (False, True)]
    + [(*SCALED[2], "triton", True), (*SCALED[5], "triton", False)],
)
def test_replicas_agree_and_do_not_talk(name, options, backend, view):
    """Replicas step with the mean gradient, bit for bit like one process with that gradient."""
    model, alone = network(), network()
    replica = DistributedDataParallel(model, gradient_as_bucket_view=view)
    make = {**OPTIONS[name], **options, "backend": backend}
    ours, expected = (OURS[name](net.named_parameters(), **make) for net in (model, alone))
    for step in range(4 if backend == "torch" else 2):
        backward(replica, mine(batch(step)))
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            q.grad = p.grad.clone()
        with counted() as talk:
            ours.step()
        assert (talk.calls, talk.total) == ([], 0)
        expected.step()
        assert identical(everything(model, ours), everything(alone, expected))
        if "scaling" in options:
            same(ours.layer_stats().values, expected.layer_stats().values)
    assert same_on_all_ranks(everything(model, ours))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", OURS)
def test_stochastic_rounding_is_the_same_on_all_ranks(name, backend):
    """Independent of the state of their random number generators."""
    torch.manual_seed(dist.get_rank())
    noise = torch.rand(())
    model = network(torch.bfloat16)
    torch.manual_seed(dist.get_rank())
    replica = DistributedDataParallel(model)
    ours = OURS[name](model.parameters(), **OPTIONS[name], stochastic_rounding=True, backend=backend)
    nearest = OURS[name]((rounded := deepcopy(model)).parameters(), **OPTIONS[name], backend=backend)
    for step in range(3):
        backward(replica, mine(batch(step, torch.bfloat16)))
        if step == 0:
            for p, q in zip(model.parameters(), rounded.parameters(), strict=True):
                q.grad = p.grad.clone()
            nearest.step()
        ours.step()
        # it rounds in another way without it
        assert step or not identical(model.state_dict(), rounded.state_dict())
    assert same_on_all_ranks(everything(model, ours))
    assert not same_on_all_ranks(noise)


@nan_arithmetic
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", OURS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(name, first):
    """With GradScaler, `nonfinite="skip"` and "raise"; all ranks continue."""
    for control in ("scaler", "skip", "raise"):
        model = network()
        replica = DistributedDataParallel(model)
        nonfinite = "propagate" if control == "scaler" else control
        ours = OURS[name](model.named_parameters(), **OPTIONS[name], nonfinite=nonfinite, backend="torch")
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=control == "scaler")
        for step in range(3):
            overflows = step == (0 if first else 1)
            before = everything(model, ours)
            data = mine(batch(step))
            if overflows and dist.get_rank() == 1:
                data = data * math.inf
            model.zero_grad()
            scaler.scale(replica(data).square().mean()).backward()
            if overflows and control == "raise":
                with pytest.raises(FloatingPointError, match=r"of '0.weight', '0.bias'.*is not finite"):
                    ours.step()
            else:
                scaler.step(ours)
                scaler.update()
            assert identical(model.state_dict(), before[0]) == overflows
            assert not overflows or first or identical(everything(model, ours), before)
        assert same_on_all_ranks(everything(model, ours))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("scaling", [None, LARS(0.1), ELR(0.1)], ids=name_of)
@pytest.mark.parametrize("name", OURS)
def test_zero_redundancy(name, scaling):
    """Each rank has the state of some parameters, steps them, and sends them to the other rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, alone = network(), network()
    make = {**OPTIONS[name], "scaling": scaling, "backend": "torch"}
    ours = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=OURS[name], **make)
    expected = OURS[name](alone.parameters(), **make)
    for step in range(3):
        backward(model, batch(step))
        backward(alone, batch(step))
        ours.step()
        expected.step()
    assert identical(model.state_dict(), alone.state_dict())
    assert 0 < len(ours.optim.state) < len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", OURS)
def test_zero_redundancy_refuses_options_that_need_all_parameters(name):
    """Also when the scaling is set later."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    for refused in ({"clip_global_norm": 1.0}, {"nonfinite": "skip"}, {"scaling": BalancedLR()}):
        with pytest.raises(ValueError, match="does not go with ZeroRedundancyOptimizer"):
            ZeroRedundancyOptimizer(model.parameters(), OURS[name], **OPTIONS[name], **refused)
    ours = ZeroRedundancyOptimizer(model.parameters(), OURS[name], **OPTIONS[name])
    with pytest.raises(ValueError, match="does not go with ZeroRedundancyOptimizer"):
        ours.optim.scaling = BalancedLR()


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_calibrate(view, init):
    """As one process on the whole minibatches; processes have different generators. Gradients are put back."""
    model, alone = network(torch.float64), network(torch.float64)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=view)
    for step in range(2):
        backward(replica, mine(batch(step, torch.float64)))
    before = deepcopy([p.grad for p in model.parameters()])
    found = []
    for net, seed, part in ((alone, 3, lambda data: data), (replica, 3 + dist.get_rank(), mine)):
        torch.manual_seed(seed)
        batches = [(part(batch(step, torch.float64)), part(torch.arange(8) % 3)) for step in range(3)]
        found.append(list(calibrate(net, batches, cross_entropy, init=init).values()))
    assert found[1] == pytest.approx(found[0], rel=1e-9)
    assert same_on_all_ranks(found[1])
    assert identical([p.grad for p in model.parameters()], before)


def test_init_draws_the_same_weights():
    """All processes draw the weights of the first one; parameters that DDP ignores are their own."""
    alone, model = network(), network()
    torch.manual_seed(3)
    lwlr_init_(alone)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    replica = DistributedDataParallel(model)
    torch.manual_seed(3 + dist.get_rank())
    lwlr_init_(replica)
    ignored = model.state_dict().pop("2.weight")
    assert not same_on_all_ranks(ignored)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert name == "2.weight" or torch.equal(p, q)


@pytest.mark.parametrize("view", [True, False])
def test_scale_invariant(view):
    """The same layers as without DDP, with other data on each process. Gradients are put back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    replica = DistributedDataParallel(model, gradient_as_bucket_view=view)
    for step in range(2):
        backward(replica, mine(batch(step, torch.float64)))
    before = deepcopy([p.grad for p in model.parameters()])
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    data = mine(inputs), torch.arange(32) % 3
    found = scale_invariant(replica, data, cross_entropy)
    assert found.names == ("module.0.weight",)
    assert set(found.reasons) == {"module.3.weight"}
    assert found.weights == (model[0].weight,)
    assert identical([p.grad for p in model.parameters()], before)
