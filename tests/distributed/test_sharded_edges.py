"""Unusual shards: not finite, frozen, late, of several dtypes, or with gradients in other placements."""

import math
from unittest.mock import patch

import pytest
import torch
from cases import nan_arithmetic
from sharding import compare, full, gradients, mesh, parameters, placed, spread
from steps import OPTIONS, OURS, counted_bytes, identical
from tolerances import close, same
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fused_lwlr import ELR, LAMB, LARS, Hyperball
from fused_lwlr.optim.sharded import as_tensor

pytestmark = pytest.mark.ranks(4)
every_name = pytest.mark.parametrize("name", OURS)
CONTROLLED = [("sgd", {"scaling": LARS(0.1)}), ("adamw", {"scaling": LAMB(), "clip_global_norm": 0.5})]
every_control = pytest.mark.parametrize(("name", "options"), CONTROLLED)


def pair(name, layout, dtype=torch.float32, **options):
    whole = parameters(dtype)
    sharded = spread(whole, layout)
    make = {**OPTIONS[name], "backend": "torch", **options}
    return OURS[name](sharded, **make), OURS[name](whole, **make), sharded, whole


def everything(optimizer, named):
    """Copies of the local parts of parameters and state."""
    states = [{key: here(value) for key, value in optimizer.state.get(p, {}).items()} for _, p in named]
    return [here(p) for _, p in named], states


def here(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize("scaling", [LARS(0.1), ELR(0.1)])
def test_weights_are_read_for_their_norms_in_the_first_step_only(scaling):
    sharded, moved = spread(parameters(), "rows"), []
    optimizer = OURS["sgd"](sharded, **OPTIONS["sgd"], scaling=scaling, backend="triton")
    for _ in range(3):
        gradients(parameters(), sharded)
        with counted_bytes() as counted:
            optimizer.step()
        moved.append(counted["bytes"])
    assert moved[0] > moved[1] == moved[2]


@nan_arithmetic
@pytest.mark.parametrize(("layout", "bad"), [("rows", math.nan), ("hybrid", math.inf), ("both", -math.inf)])
@pytest.mark.parametrize(("name", "nonfinite"), [("sgd", "skip"), ("adamw", "raise")])
def test_one_bad_element_on_one_process_stops_all(name, nonfinite, layout, bad):
    """In the first step and in a later one; the message on every process names the layer."""
    ours, expected, sharded, whole = pair(name, layout, nonfinite=nonfinite, scaling=ELR(0.1))
    for step in range(4):
        gradients(whole, sharded)
        if step in (0, 2):
            whole[3][1].grad[4, 2] = bad
            sharded[3][1].grad = placed(whole[3][1].grad, layout)
            before = everything(ours, sharded)
            if nonfinite == "raise":
                for optimizer in (ours, expected):
                    with pytest.raises(FloatingPointError, match=r"the gradient of 'attn.qkv.weight' is not finite"):
                        optimizer.step()
            else:
                ours.step()
                expected.step()
            assert step == 0 or identical(everything(ours, sharded), before)
        else:
            ours.step()
            expected.step()
        compare(lambda a, b, step=step: close(a, b, step + 1), ours, expected, sharded, whole)


@nan_arithmetic
@every_name
def test_nan_stays_in_its_layer(name):
    """Without `nonfinite`, a NaN norm affects its own layer on every process, and no other layer."""
    ours, expected, sharded, whole = pair(name, "rows", scaling=ELR(0.1))
    gradients(whole, sharded)
    whole[3][1].grad[4, 2] = math.nan
    sharded[3][1].grad = placed(whole[3][1].grad, "rows")
    ours.step()
    expected.step()
    compare(close, ours, expected, sharded, whole)
    assert full(sharded[3][1]).isnan().any()
    assert ours.layer_stats().nonfinite.tolist() == expected.layer_stats().nonfinite.tolist() == [0, 0, 0, 1, 0, 0, 0]


@every_control
def test_frozen_and_late(name, options):
    """Parameters without a gradient, some of them in every other step."""
    ours, expected, sharded, whole = pair(name, "rows", **options)
    frozen, late = (1, 3), (0, 4)
    for i in frozen:
        sharded[i][1].requires_grad_(False)
    for step in range(5):
        gradients(whole, sharded)
        for i in (*frozen, *(late if step % 2 == 0 else ())):
            whole[i][1].grad = sharded[i][1].grad = None
        ours.step()
        expected.step()
        compare(lambda a, b, step=step: close(a, b, step + 1), ours, expected, sharded, whole)


@pytest.mark.parametrize("master_weights", [False, True])
@every_control
def test_several_dtypes(name, options, master_weights):
    """bfloat16 and float32 in one optimizer, two tables: one norm of all gradients, once without gradients in one."""
    whole = parameters()
    for _, p in whole[::2]:
        p.data = p.data.bfloat16()
    sharded = spread(whole, "rows")
    make = {**OPTIONS[name], **options, "master_weights": master_weights, "backend": "torch"}
    ours, expected = OURS[name](sharded, **make), OURS[name](whole, **make)
    for step in range(3):
        gradients(whole, sharded)
        if step == 1:
            for _, p in (*whole[::2], *sharded[::2]):
                p.grad = None
        ours.step()
        expected.step()
        compare(lambda a, b, step=step: close(a, b, step + 1), ours, expected, sharded, whole)


def misplaced(grad, how):
    if how == "plain":
        return grad.full_tensor()
    if how == "partial":
        return DTensor.from_local(grad.full_tensor(), grad.device_mesh, [Partial()])
    if how == "other mesh":
        return distribute_tensor(grad.full_tensor(), DeviceMesh("cpu", [3, 2, 1, 0]), grad.placements)
    others = {"whole": [Replicate()], "columns": [Shard(1)], "swapped": [Shard(0), Replicate()]}
    return grad.redistribute(placements=others[how])


@pytest.mark.parametrize(
    ("layout", "how", "said"),
    [
        ("rows", "plain", "a plain tensor"), ("rows", "partial", "Partial"), ("rows", "whole", "Replicate"),
        ("rows", "columns", r"Shard\(dim=1\)"),
        # its local parts have the same sizes
        ("rows", "other mesh", r"Shard\(dim=0\),\) on processes .3, 2, 1, 0"),
        ("hybrid", "swapped", r"\(Shard\(dim=0\), Replicate\(\)\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("name", "later"), [("sgd", False), ("adamw", True)])
def test_gradients_placed_otherwise_are_refused(name, later, layout, how, said):
    """On the first step and on a later one: no parameter is stepped, and a right gradient is accepted afterwards."""
    ours, expected, sharded, whole = pair(name, layout)
    for _ in range(later):
        gradients(whole, sharded)
        ours.step()
        expected.step()
    gradients(whole, sharded)
    before = everything(ours, sharded)
    param, grad = sharded[3][1], sharded[3][1].grad
    param.grad = misplaced(grad, how)
    hint = "$" if how == "plain" else r", such as param.grad.redistribute\(placements=param.placements\)$"
    said = f"'attn.qkv.weight' is .*{said}.*, but the parameter is placed as .*Shard.*placements{hint}"
    with pytest.raises(RuntimeError, match=said):
        ours.step()
    assert identical(everything(ours, sharded), before)
    param.grad = grad
    ours.step()
    expected.step()
    compare(same, ours, expected, sharded, whole)


@every_name
def test_whole_state_is_refused_and_the_message_says_how_to_load_it(name):
    ours, expected, sharded, whole = pair(name, "rows")
    gradients(whole, sharded)
    ours.step()
    expected.step()
    before = everything(ours, sharded)
    with pytest.raises(ValueError, match=r"is a plain tensor, but the parameter is placed .*full_state_dict=True\)$"):
        ours.load_state_dict(expected.state_dict())
    assert identical(everything(ours, sharded), before)


@every_name
def test_partial_sums_are_no_parameters(name):
    """Norms of the parts of a sum are not the norm of the sum."""
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh(4), [Partial()]))
    weight.grad = weight.detach().clone()
    ours = OURS[name]([("weight", weight)], lr=0.1)
    with pytest.raises(RuntimeError, match=r"^parameter 'weight' is placed as \(Partial.*: redistribute\(\) it first"):
        ours.step()
    same(here(weight), torch.ones(2, 2))


@every_name
def test_a_sharded_gradient_of_a_plain_parameter_is_refused(name):
    whole = parameters()
    ours = OURS[name](whole, lr=0.1, backend="torch")
    gradients(whole, whole)
    whole[3][1].grad = placed(whole[3][1].grad, "rows")
    with pytest.raises(RuntimeError, match=r"is placed as .*Shard\(dim=0\).*but the parameter is a plain tensor"):
        ours.step()


@every_name
def test_autograd_notices_the_step(name):
    """Backward over a parameter that was stepped after the forward pass raises, as with every optimizer of torch."""
    ours, _, sharded, whole = pair(name, "rows")
    loss = (sharded[3][1] * sharded[3][1]).sum()
    gradients(whole, sharded)
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_control
def test_weights_changed_from_outside_count(name, options):
    ours, expected, sharded, whole = pair(name, "rows", **options)
    for step in range(3):
        gradients(whole, sharded)
        with torch.no_grad():
            for (_, p), (_, q) in zip(sharded, whole, strict=True):
                p.mul_(1.5)
                q.mul_(1.5)
        ours.step()
        expected.step()
        compare(lambda a, b, step=step: close(a, b, 4 * (step + 1)), ours, expected, sharded, whole)


@every_name
def test_stochastic_rounding_of_shards(name):
    """Each element rounds to one of its two neighbours, the same on all replicas, and not always to the nearest."""
    ours, expected, sharded, whole = pair(name, "hybrid", torch.bfloat16, stochastic_rounding=True)
    nearest = OURS[name](other := spread(whole, "hybrid"), **OPTIONS[name], backend="torch")
    gradients(whole, sharded)
    for (_, p), (_, q) in zip(sharded, other, strict=True):
        q.grad = p.grad.clone()
    for optimizer in (ours, expected, nearest):
        optimizer.step()
    differ = 0
    for (_, p), (_, q) in zip(sharded, other, strict=True):
        torch.testing.assert_close(full(p.detach()), full(q.detach()), rtol=2**-7, atol=1e-6)
        differ += (full(p.detach()) != full(q.detach())).sum().item()
        replicas = [torch.empty_like(here(p)) for _ in range(2)]
        torch.distributed.all_gather(replicas, here(p), group=mesh(2, 2).get_group("x"))
        same(*replicas)
    assert differ > 1000


@pytest.mark.parametrize("scaling", [Hyperball(), ELR(0.1, retract="sphere")], ids=["Hyperball", "ELR"])
def test_radii_that_are_changed_in_place_count(scaling):
    ours, expected, sharded, whole = pair("sgd", "rows", scaling=scaling)
    for step in range(3):
        gradients(whole, sharded)
        for optimizer in (ours, expected):
            optimizer.step()
            for state in optimizer.state.values():
                if "radius" in state:
                    state["radius"].mul_(2)
        compare(lambda a, b, step=step: close(a, b, step + 1), ours, expected, sharded, whole)


def test_rates_are_uploaded_for_groups_and_not_for_layers():
    """A rate on a GPU is read by one operation for each hyper row."""
    ours, _, sharded, whole = pair("sgd", "rows", scaling=LARS(0.1))
    gradients(whole, sharded)
    with patch("fused_lwlr.optim.sharded.as_tensor", wraps=as_tensor) as seen:
        ours.step()
    assert [len(call.args[0]) for call in seen.call_args_list] == [1, 1]
