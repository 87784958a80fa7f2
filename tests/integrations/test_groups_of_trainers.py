"""The ways in which torchtitan, Megatron and DeepSpeed hold an optimizer and change its groups, without these."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from steps import OPTIONS, OURS, TORCH, identical, uniform
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fused_lwlr import LARS

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
every_name = pytest.mark.parametrize("name", OURS)


def part(device, seed):
    """Different names in each part, as the parts of a pipeline have."""
    torch.manual_seed(seed)
    return nn.ModuleDict({f"block{seed}": nn.Linear(4, 3), f"norm{seed}": nn.LayerNorm(3)}).to(device)


def give_gradients(params, seed):
    torch.manual_seed(seed)
    for param in params:
        param.grad = uniform(param.shape, param.dtype, param.device)


class Container(torch.optim.Optimizer):
    """torchtitan's `OptimizersContainer`: an optimizer for each part of a model, with one flat state dict."""

    def __init__(self, parts, cls, options):
        self.parts = parts
        self.optimizers = [cls(part.named_parameters(), **options) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {"lr": options["lr"]})

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self):
        found = {}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            found |= get_optimizer_state_dict(part, optimizer, options=FLAT)
        return found

    def load_state_dict(self, state_dict):
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, optim_state_dict=state_dict, options=FLAT)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("merge", [False, True])
@every_name
def test_other_stages(name, merge, named, device):
    """State of two stages continues in one, and the other way round. The constructor sets the options of layers."""
    layers = {"*.weight": 0.5} if named else None
    sides = []
    for split in (merge, not merge):
        blocks = nn.ModuleDict({**part(device, 0), **part(device, 1)})
        stages = [nn.ModuleDict({key: blocks[key] for key in blocks if key[-1] == end}) for end in "01"]
        parts = stages if split else [blocks]
        optimizers = [
            OURS[name](each.named_parameters() if named else each.parameters(), **OPTIONS[name], layers=layers)
            for each in parts
        ]
        sides.append((blocks, parts, optimizers))
    (source, parts, optimizers), (target, others, loaded) = sides
    give_gradients(source.parameters(), 2)
    saved = {}
    for each, optimizer in zip(parts, optimizers, strict=True):
        optimizer.step()
        saved |= get_optimizer_state_dict(each, optimizer, options=FLAT)
    target.load_state_dict(source.state_dict())
    for each, optimizer in zip(others, loaded, strict=True):
        with pytest.warns(UserWarning, match="was saved with other parameters") if named else nullcontext():
            set_optimizer_state_dict(each, optimizer, optim_state_dict=deepcopy(saved), options=FLAT)
    for blocks, among in ((source, optimizers), (target, loaded)):
        give_gradients(blocks.parameters(), 3)
        for optimizer in among:
            optimizer.step()
    assert identical(target.state_dict(), source.state_dict())


def test_stages_of_as_many_parameters(device):
    """State and options of layers go with names, not with positions."""
    model = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in "abcd"}).to(device)
    layers, found = {"a.weight": 0.1, "b.weight": 0.2, "c.weight": 0.3, "d.weight": 0.4}, []
    for stages in ("ab", "cd"), ("ac", "bd"):
        parts = [nn.ModuleDict({key: model[key] for key in keys}) for keys in stages]
        found.append([])
        for part, keys in zip(parts, stages, strict=True):
            own = {f"{key}.weight": layers[f"{key}.weight"] for key in keys}
            found[-1].append((part, OURS["sgd"](part.named_parameters(), lr=0.1, momentum=0.9, layers=own)))
    give_gradients(model.parameters(), 2)
    saved, expected = {}, {}
    for part, optimizer in found[0]:
        optimizer.step()
        saved |= get_optimizer_state_dict(part, optimizer, options=FLAT)
        expected |= optimizer.layers()
    # torch does not load state of parameters with a gradient
    model.zero_grad()
    for part, optimizer in found[1]:
        with pytest.warns(UserWarning, match="was saved with other parameters"):
            set_optimizer_state_dict(part, optimizer, optim_state_dict=deepcopy(saved), options=FLAT)
        assert optimizer.layers() == {name: expected[name] for name, _ in part.named_parameters()}
        for name, param in part.named_parameters():
            assert torch.equal(optimizer.state[param]["momentum_buffer"], saved[f"state.{name}.momentum_buffer"])


@every_name
def test_containers_of_torchtitan(name, device):
    """A flat state dict of several parts restores state and options of layers, to the bit."""
    parts = [part(device, seed) for seed in (0, 1)]
    layers = {"*.weight": {"lr": 0.5}, "norm*": {"weight_decay": 0}}
    container = Container(parts, OURS[name], {**OPTIONS[name], "layers": layers})
    give_gradients((p for each in parts for p in each.parameters()), 2)
    container.step()
    again = deepcopy(parts)
    other = Container(again, OURS[name], OPTIONS[name])
    other.load_state_dict(container.state_dict())
    for pair in zip(container.optimizers, other.optimizers, strict=True):
        assert pair[0].layers() == pair[1].layers()
    for models, each in ((parts, container), (again, other)):
        give_gradients((p for model in models for p in model.parameters()), 3)
        each.step()
    assert identical([model.state_dict() for model in again], [model.state_dict() for model in parts])
    assert identical(other.state_dict(), container.state_dict())


def megatron(cls, model, **options):
    """Megatron's groups: additional keys, one empty group, and float32 copies of half-precision parameters."""
    own = {"is_expert_parallel": False, "default_config": True}
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if not n.endswith("bias")],
            "wd_mult": 1.0,
            "max_lr": 0.1,
            "min_lr": 0.0,
            **own,
        },
        {"params": [p for n, p in named if n.endswith("bias")], "wd_mult": 0.0, "max_lr": 0.2, "min_lr": 0.0, **own},
        {"params": [], "wd_mult": 1.0, "max_lr": 0.1, "min_lr": 0.0, **own, "is_expert_parallel": True},
    ]
    optimizer = cls(groups, **options)
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone().float()) for p in group["params"]]
    # recasts the state to the new parameters
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def schedule(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"] / step
        group["weight_decay"] = 0.3 * group["wd_mult"]


@every_name
def test_groups_of_megatron(name, device):
    """Parameters that are replaced after the constructor, and rates and decay that are set before each step."""
    model = part(device, 0).bfloat16()
    ours = megatron(OURS[name], model, **OPTIONS[name], backend="torch")
    theirs = megatron(TORCH[name], model, **OPTIONS[name], foreach=False)
    for step in range(1, 5):
        for optimizer in (ours, theirs):
            schedule(optimizer, step)
            give_gradients((p for group in optimizer.param_groups for p in group["params"]), step)
            optimizer.step()
        if step == 2:
            ours.load_state_dict(deepcopy(ours.state_dict()))
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert identical([p.detach() for p in group["params"]], [p.detach() for p in other["params"]])
        assert all(
            group[key] == other[key] for key in ("wd_mult", "max_lr", "is_expert_parallel", "lr", "weight_decay")
        )


def flatten(optimizer):
    """DeepSpeed's ZeRO replaces the parameters of each group by one flat float32 partition."""
    for group in optimizer.param_groups:
        flat = torch.cat([p.detach().float().flatten() for p in group["params"]])
        group["params"] = [flat.requires_grad_()]


@every_name
def test_flat_groups_of_deepspeed(name, device):
    model = part(device, 0).bfloat16()
    ours = OURS[name](model.parameters(), **OPTIONS[name], backend="torch")
    theirs = TORCH[name](model.parameters(), **OPTIONS[name], foreach=False)
    for optimizer in (ours, theirs):
        flatten(optimizer)
    for step in range(3):
        for optimizer in (ours, theirs):
            give_gradients(optimizer.param_groups[0]["params"], step)
            optimizer.step()
    assert identical(*(optimizer.param_groups[0]["params"][0].detach() for optimizer in (ours, theirs)))
    ours.scaling = LARS()
    with pytest.warns(UserWarning, match="selects none of the 1 parameters"):
        ours.step()
