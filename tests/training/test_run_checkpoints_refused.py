"""Files that are not checkpoints, or belong to another run, are refused by name, and nothing changes."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from steps import OPTIONS, OURS, identical
from tiny_run import everything, network, run_of
from torch import nn

from fused_lwlr.data import files
from fused_lwlr.training.checkpoints import Checkpoints


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("marker"),)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ({"a": [1, (np.float64(2.0),)]}, "numpy"),
        ({"a": {Path("b"): 1}}, "pathlib"),
        ({"a": defaultdict(int)}, "collections.defaultdict"),
        ({"a": Malicious()}, "getattr"),
    ],
)
def test_unreadable_values_are_not_written(state, kind, run, tmp_path):
    with pytest.raises(ValueError, match=f"a checkpoint holds dicts, lists, tuples, strings, .*, not .*{kind}"):
        Checkpoints(tmp_path).save(1, **run, state=state)
    assert not list(tmp_path.iterdir())


def test_code_in_a_file_is_not_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Checkpoints(tmp_path).save(1, **run)
    torch.save({**files.read_tensors(path), "state": Malicious()}, path)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        Checkpoints(tmp_path).restore(**run)
    assert not Path("marker").exists()
    torch.load(path, weights_only=False)
    assert Path("marker").exists()


def frozen_last(params, **options):
    return OURS["sgd"](list(params)[:-1], **options)


def two_groups(params, **options):
    first, *rest = params
    return OURS["sgd"]([{"params": [first]}, {"params": rest}], **options)


def reordered(params, **options):
    return OURS["sgd"](list(params)[::-1], **options)


REFUSED = {
    "config": ({"config": {"lr": 0.2, "augment": {"mixup": 0.2}, "out": "there"}}, r"\n  --lr: 0.1 -> 0.2\nRepeat"),
    "shape": (
        run_of(network(3, 5, 2)),
        r"another model: 0.weight is \(4, 3\) float32 there and \(5, 3\) float32 here; 0.bias is .*; 1.weight is",
    ),
    "dtype": (run_of(network().double()), "0.weight is .* float32 there and .* float64 here"),
    "deeper": (run_of(network().append(nn.Linear(2, 2))), r"another model: it has no 3.weight; it has no 3.bias. Not"),
    "flatter": (run_of(network()[:1]), r"another model: 1.weight is not of this one; .*; 2.weight is .* and 4 more. N"),
    "averages": ({"averages": network()}, "weights of model, but this run of model, averages"),
    "fewer": (run_of(network(), frozen_last), "other parameters: parameter group 0 differs in 2.bias"),
    "groups": (run_of(network(), two_groups), "other parameters: 1 parameter groups there and 2 here"),
    "order": (run_of(network(), reordered), "parameter group 0 differs in the order of its parameters"),
    "kind": (
        run_of(network(), OURS["adamw"], **OPTIONS["adamw"]),
        r"step-000000001.pt does not fit the optimizer: .*has no '(betas|eps)': it belongs to another kind",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(kind, run, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, **run)
    changes, match = REFUSED[kind]
    if kind in ("config", "averages"):
        changes = {**run_of(network()), **changes}
        changes["optimizer"] = OURS["sgd"](changes["model"].named_parameters(), **OPTIONS["sgd"])
    before = everything(changes)
    with pytest.raises(ValueError, match=match):
        checkpoints.restore(**changes)
    assert identical(everything(changes), before)


def test_state_of_another_shape_is_refused_for_any_optimizer(tmp_path):
    """torch.optim loads it, and fails in the next step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    run = {"model": model, "optimizer": optimizer}
    path = Checkpoints(tmp_path).save(1, **run, config={}, state={})
    content = files.read_tensors(path)
    content["optimizer"]["state"]["0.weight"]["momentum_buffer"] = torch.ones(2, 2)
    files.save_tensors(path, content)
    before = everything(run)
    with pytest.raises(ValueError, match=r"'momentum_buffer' of 0.weight is \(2, 2\), but the parameter .*Nothing was"):
        Checkpoints(tmp_path).restore(**run)
    assert identical(everything(run), before)


def test_an_optimizer_of_another_model_is_not_saved(run, tmp_path):
    with pytest.raises(ValueError, match="steps a parameter that is not of the model"):
        Checkpoints(tmp_path).save(1, **{**run, "model": network()})
