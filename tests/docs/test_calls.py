"""The calls of a step that the page on the design lists."""

import re
import sys
from pathlib import Path

import torch

import fused_lwlr

ROOT = Path(__file__).parents[2]


def listed():
    """The name of each function, and its file where the page has one."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    block = re.search(r"The main calls of a step .*?```text\n(.*?)```", text, re.DOTALL)[1]
    return [re.match(r" *(?:\w+\.)?(\w+)(?: +(\S+\.py))?", line).groups("") for line in block.splitlines()]


def test_a_step_makes_the_listed_calls_in_order():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = fused_lwlr.AdamW([param], backend="triton")
    found = []

    def watch(frame, event, _):
        if event == "call":
            found.append((frame.f_code.co_name, frame.f_code.co_filename))

    for _ in range(3):
        param.grad = torch.ones(3)
        found.clear()
        sys.setprofile(watch)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    rest = iter(found)
    for name, file in listed():
        assert any(called == name and path.endswith(file) for called, path in rest), (name, file)
