"""Twins that run the same random operations: our optimizer, and torch's single-tensor one."""

import json
from copy import deepcopy

import torch
from lazy import imaginary, negated
from plain_hyperball import PlainHyperball
from plain_lion import PlainLion
from plain_lr_in_momentum import PlainLRInMomentum
from steps import ALL, TORCH, identical, parameters, saved, twin, uniform
from tolerances import EPS, same
from torch import nn

from fused_lwlr import Hyperball


def _own_options(group):
    """The options of each parameter of a group. A loaded group has them as text."""
    layers = group.get("layers") or [1.0] * len(group["params"])
    if isinstance(layers, str):
        return [own for ((_, _, own),) in json.loads(layers)]
    return [dict(entry) if isinstance(entry, dict) else {"lr": entry} for entry in layers]


def _by_layers(cls):
    """An optimizer that applies the `layers` entries of its groups by making each parameter a separate group."""

    def step(self):
        groups, self.param_groups = self.param_groups, []
        for group in groups:
            for param, options in zip(group["params"], _own_options(group), strict=True):
                own = dict(options)
                products = {key: group[key] * own.pop(key) for key in ("lr", "weight_decay") if key in own}
                if own.pop("corrected_decay", False):
                    products["weight_decay"] = group["weight_decay"] * (group["lr"] / group["max_lr"])
                self.param_groups.append({**group, **own, **products, "params": [param]})
        try:
            cls.step(self)
        finally:
            self.param_groups = groups

    def state_dict(self):
        found = cls.state_dict(self)
        for group, own in zip(found["param_groups"], self.param_groups, strict=True):
            if group.get("layers") is not None:
                group["layers"] = json.dumps([[[0, None, options]] for options in _own_options(own)])
        return found

    return type(cls.__name__, (cls,), {"step": step, "state_dict": state_dict})


OURS = {**ALL, "lr in momentum": ALL["sgd"], "hyperball": ALL["sgd"]}
PLAIN = {**TORCH, "lion": PlainLion, "lr in momentum": PlainLRInMomentum, "hyperball": PlainHyperball}
PLAIN = {name: _by_layers(cls) for name, cls in PLAIN.items()}
OPTIONS_OF_LAYERS = {"adamw": [{"betas": (0.5, 0.9), "eps": 1e-3}], "lion": [{"lr": 0.5, "betas": (0.3, 0.5)}]}
"""Options of a layer other than multipliers."""
# options that a state dict of another optimizer must also have
ALWAYS = {"lr in momentum": {"momentum": 0.9, "lr_in_momentum": True}, "hyperball": {"scaling": Hyperball()}}
SHAPES = [(3,), (2, 3), (), (2, 2, 2, 2), (0,)]
HALF = (torch.float16, torch.bfloat16)
# ours has multipliers and averages, torch's one of its implementations
NOT_COMPARED = ("capturable", "params", "layers", "ema", "lr_in_momentum", "foreach", "fused")


def _large(grad, size):
    return torch.where(grad < 0, grad - 1, grad + 1) * size


def _transposed(tensor):
    """The same values, last dimension first in memory."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.clone()


def _strided(tensor):
    """The same values, at every other place in memory."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def _first(grad, value):
    """The first element replaced."""
    place = torch.arange(grad.numel(), device=grad.device).view(grad.shape)
    return torch.where(place == 0, value, grad)


# the next gradient of a parameter, from a random one and the old one. Squares of "huge" fit in float32 and squares of
# "overflowing" do not, in any order of multiplication
GRADIENTS = {
    "uniform": lambda g, old: g,
    "none": lambda g, old: None,
    "kept": lambda g, old: old,
    "halved in place": lambda g, old: old.mul_(0.5) if old is not None and 0 not in old.stride() else g,
    "zero": lambda g, old: torch.zeros_like(g),
    "tiny": lambda g, old: g * 1e-9,
    "huge": lambda g, old: _large(g, 1e15),
    "overflowing": lambda g, old: _large(g, 1e30),
    "one NaN": lambda g, old: _first(g, torch.nan),
    "one infinity": lambda g, old: _first(g, torch.inf),
    "transposed": lambda g, old: _transposed(g),
    "strided": lambda g, old: _strided(g),
    "expanded": lambda g, old: g[:1].expand(g.shape) if g.dim() else g,
    "imaginary part": lambda g, old: imaginary(g),
    "lazily negated": lambda g, old: negated(g),
}

REPLACED = {
    "clone": lambda data: data.clone(),
    "offset": lambda data: torch.cat((data.new_zeros(1), data.flatten()))[1:].view(data.shape),
    "transposed": _transposed,
    "contiguous": lambda data: data.contiguous(),
    "channels last": lambda data: data.contiguous(
        memory_format=torch.channels_last if data.dim() == 4 else torch.contiguous_format
    ),
    "strided": _strided,
}


class Twins:
    """Runs every operation on both sides; `check` compares all results."""

    def __init__(self, name, backend, options, shapes, device, named, ema, layers=None):
        self.name, self.backend, self.options, self.device = name, backend, options, device
        self.exact, self.ema = backend == "torch" and name != "hyperball", ema
        self.named = parameters(shapes, torch.float32, device)
        self.expected = twin(self.named)
        self.with_names = named
        self.groups = [(0, len(shapes), {} if layers is None else {"layers": layers[: len(shapes)], "max_lr": 0.5})]
        self.ours, self.torchs = self._optimizers(options)
        self.check()

    def _optimizers(self, options):
        result = []
        for cls, params, more in (
            (OURS[self.name], self.named, {"backend": self.backend, "ema": self.ema}),
            (PLAIN[self.name], self.expected, {"foreach": False}),
        ):
            entries = params if self.with_names else [p for _, p in params]
            groups = [{"params": entries[start:stop], **own} for start, stop, own in self.groups]
            result.append(cls(groups, **{**ALWAYS.get(self.name, {}), **options, **more}))
        return result

    def _both(self):
        return (self.ours, self.named), (self.torchs, self.expected)

    def _pairs(self):
        return [(p, q) for (_, p), (_, q) in zip(self.named, self.expected, strict=True)]

    # operations

    def step(self, kinds):
        for i, (p, q) in enumerate(self._pairs()):
            kind = kinds[i % len(kinds)]
            random = uniform(p.shape, p.dtype, p.device)
            for one in (p, q):
                one.grad = GRADIENTS[kind](random.clone(), one.grad) if one.requires_grad else None
        self._step()

    def step_again(self):
        self._step()

    def zero_grad(self, set_to_none):
        for optimizer, _ in self._both():
            optimizer.zero_grad(set_to_none=set_to_none)

    def freeze(self, which, frozen):
        for p in self._pairs()[which % len(self.named)]:
            p.requires_grad_(not frozen)

    def add_param_group(self, shape, own):
        if len(self.named) > 3:
            return
        at = len(self.named)
        dtype = self.named[0][1].dtype
        fresh = nn.Parameter(uniform(shape, torch.float32, self.device).to(dtype))
        for optimizer, params in self._both():
            params.append((f"p{at}", nn.Parameter(fresh.detach().clone())))
            optimizer.add_param_group({"params": params[-1:] if self.with_names else [params[-1][1]], **own})
        self.groups.append((at, at + 1, own))

    def reload(self):
        for optimizer, _ in self._both():
            optimizer.load_state_dict(saved(optimizer.state_dict()))
        self._settle()

    def reload_into_new(self):
        """The new optimizers have other options; the options of the dict replace them."""
        dicts = [saved(optimizer.state_dict()) for optimizer, _ in self._both()]
        self.ours, self.torchs = self._optimizers({"lr": 0.7, "weight_decay": 0.3})
        for (optimizer, _), state_dict in zip(self._both(), dicts, strict=True):
            optimizer.load_state_dict(state_dict)
        self._settle()

    def exchange(self):
        """Each optimizer continues with the state of the other."""
        mine, theirs = (saved(optimizer.state_dict()) for optimizer, _ in self._both())
        self.ours.load_state_dict(theirs)
        self.torchs.load_state_dict(mine)
        self._settle()

    def copy(self):
        self.ours, self.named = deepcopy((self.ours, self.named))
        self.torchs, self.expected = deepcopy((self.torchs, self.expected))

    def set_option(self, which, key, value):
        for optimizer, _ in self._both():
            optimizer.param_groups[which % len(self.groups)][key] = value

    def edit(self, which, factor):
        with torch.no_grad():
            for p in self._pairs()[which % len(self.named)]:
                p.mul_(factor)

    def replace(self, which, how):
        for p in self._pairs()[which % len(self.named)]:
            p.data = REPLACED[how](p.data)

    def forget(self):
        for optimizer, _ in self._both():
            optimizer.state.clear()

    def replace_state(self):
        """Puts new tensors into the same dictionaries."""
        for optimizer, _ in self._both():
            for state in optimizer.state.values():
                state.update({key: value * 0.5 for key, value in state.items() if key != "step"})

    def cast(self, dtype):
        """State is converted when it is loaded, as torch requires."""
        if dtype == torch.float64 and self.backend == "triton":
            return
        for optimizer, params in self._both():
            for _, p in params:
                p.grad = None
                p.data = p.data.to(dtype)
            optimizer.load_state_dict(optimizer.state_dict())
        self._settle()

    def _settle(self):
        # our dicts say None, which lets torch choose another implementation
        for group in self.torchs.param_groups:
            group["foreach"] = False

    # stepping and comparing

    def _step(self):
        self._before = [self._sizes(q, self.torchs.state.get(q, {})) for _, q in self._pairs()]
        averages = [self.ours.state.get(p, {}).get("ema", p).detach().double().clone() for p, _ in self._pairs()]
        versions = [p._version for p, _ in self._pairs()]
        stepped = [p.grad is not None for p, _ in self._pairs()]
        self.ours.step()
        if self.named[0][1].dtype in HALF:
            self._step_wide()
        else:
            self.torchs.step()
        assert [p._version > v for (p, _), v in zip(self._pairs(), versions, strict=True)] == stepped
        for (p, _), average, moved in zip(self._pairs(), averages, stepped, strict=True):
            self._check_average(p, average, moved)

    def _check_average(self, p, before, moved):
        """The average uses the weight as stored, in at least float32; without a step it does not change."""
        average = self.ours.state.get(p, {}).get("ema")
        assert not moved or (average is not None) == (self.ema is not None)
        if average is None:
            return
        w = p.detach().double() if moved else before
        assert average.dtype == (p.dtype if p.dtype == torch.float64 else torch.float32)
        expected = self.ema * before + (1 - self.ema) * w
        close = (average - expected).abs() <= 4 * EPS[torch.float32] * (before.abs() + w.abs())
        assert (close | ~before.isfinite() | ~w.isfinite()).all()

    def _step_wide(self):
        """Defines half precision: torch's step on float32 copies, rounded once."""
        wide = [(key, nn.Parameter(q.detach().float())) for key, q in self.expected]
        narrow, self.expected, kept = self.expected, wide, self.torchs
        self.torchs = self._optimizers(self.options)[1]
        self.torchs.load_state_dict(deepcopy(kept.state_dict()))
        self._settle()
        for (_, q), (_, w) in zip(narrow, wide, strict=True):
            w.grad = q.grad.float() if q.grad is not None else None
        self.torchs.step()
        for (_, q), (_, w) in zip(narrow, wide, strict=True):
            if q.grad is not None:
                q.data.copy_(w.detach())
            for key, value in self.torchs.state.get(w, {}).items():
                kept.state[q][key] = value if key in ("step", "radius") else value.to(q.dtype)
        self.expected, self.torchs = narrow, kept

    @staticmethod
    def _sizes(p, state):
        """The magnitude of the terms of each element of a step."""
        terms = [p, *([p.grad] if p.grad is not None else [])]
        terms += [value for key, value in state.items() if key not in ("step", "ema")]
        return sum(torch.nan_to_num(t.detach().double().abs(), 0.0, 0.0, 0.0) for t in terms) + 1

    def check(self):
        before = getattr(self, "_before", [])
        for i, (p, q) in enumerate(self._pairs()):
            mine, theirs = self.ours.state.get(p, {}), self.torchs.state.get(q, {})
            # torch keeps averages unchanged
            keys = mine.keys() - {"ema"}
            assert keys == theirs.keys() - {"ema"}
            assert p.stride() == q.stride()
            sizes = self._sizes(q, theirs) + (before[i] if i < len(before) else 0)
            self._compare(p.detach(), q.detach(), sizes)
            for key in keys:
                self._compare(mine[key], theirs[key], None if key in ("step", "radius") else sizes)
        for group, other in zip(self.ours.param_groups, self.torchs.param_groups, strict=True):
            keys = (group.keys() | other.keys()) - set(NOT_COMPARED)
            assert identical({key: group[key] for key in keys}, {key: other[key] for key in keys})
        if not self.exact:
            self._adopt()

    def _compare(self, a, b, sizes):
        if self.exact or sizes is None:
            same(a, b.to(a.device))
            return
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.isfinite(), b.isfinite())
        single = EPS[torch.float32]
        rounding = EPS[b.dtype] if b.dtype in HALF else 2 * single
        finite = b.isfinite()
        same(a[~finite], b[~finite])
        a, b, sizes = (t[finite].double() for t in (a, b, sizes))
        # as in tolerances.py, but relative to the terms of each element, which may be huge and cancel
        assert ((a - b).abs() <= 4 * single * sizes + rounding * b.abs()).all()

    def _adopt(self):
        """Copies our values to torch's side, so that each step is compared separately."""
        with torch.no_grad():
            for p, q in self._pairs():
                q.data.copy_(p)
                for key, value in self.torchs.state.get(q, {}).items():
                    if key != "ema":
                        value.copy_(self.ours.state[p][key])
