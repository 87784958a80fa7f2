"""A tiny training, and its parts."""

import itertools
from copy import deepcopy

import torch
from steps import OPTIONS, OURS
from torch import nn

CONFIG = {"lr": 0.1, "augment": {"mixup": 0.2}, "out": "here"}


def network(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths or (3, 4, 2))), nn.BatchNorm1d(2))


def run_of(model, make=OURS["sgd"], **options):
    named = list(model.named_parameters())
    return {
        "model": model,
        "optimizer": make(named, **(options or OPTIONS["sgd"])),
        "config": CONFIG,
    }


def train(run, steps):
    model, optimizer = run["model"], run["optimizer"]
    for step in steps:
        optimizer.zero_grad()
        model(torch.rand(8, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def everything(run):
    modules = [run["model"], *([run["averages"]] if "averages" in run else [])]
    return deepcopy(([module.state_dict() for module in modules], run["optimizer"].state_dict()))
