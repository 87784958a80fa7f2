"""Master weights combined with every other option, and with skipped steps."""

from functools import partial
from itertools import cycle

import pytest
import torch
from cases import ALL, every_backend, long, name_of, nan_arithmetic, one_kernel
from steps import OPTIONS, OURS, gradients, identical, parameters, snapshot
from tolerances import close, same
from torch import nn

from fused_lwlr import ELR, LAMB, LARS, ClipByLayer, NormalizedGradient
from fused_lwlr.methods.elr import ScaleInvariant

SHAPES = [(6, 5), (), (40,)]
SLICES = {"p0[0:2]": 0.5, "p0[3:6]": 2.0, "p1": 0.0}
# norms of weights use the rounded parameter: these options need none
WITHOUT_NORMS = [
    {"layers": SLICES}, {"clip_global_norm": 0.5}, {"scaling": NormalizedGradient()},
    {"scaling": ClipByLayer(0.5), "layers": SLICES, "clip_global_norm": 3.0}, {"nonfinite": "skip"},
]  # fmt: skip


def master_of(optimizer, param):
    return optimizer.state[param]["master_weight"]


# each option compiles a kernel, with one of the rules
@pytest.mark.parametrize(
    ("name", "backend", "options"),
    [(name, "torch", options) for name in OURS for options in WITHOUT_NORMS]
    + [(name, "triton", options) for name, options in zip(OURS, WITHOUT_NORMS, strict=False)]
    + [long(name, "triton", options) for name, options in zip(cycle(OURS), WITHOUT_NORMS[2:], strict=False)],
    ids=lambda o: o if isinstance(o, str) else "-".join(name_of(v) if k == "scaling" else k for k, v in o.items()),
)
def test_equals_float32(name, backend, options, device):
    """The same result as an optimizer of float32 parameters with the same gradients."""
    named = parameters(SHAPES, torch.bfloat16, device)
    wide = [(key, nn.Parameter(p.detach().float())) for key, p in named]
    options = {**OPTIONS[name], **options}
    ours = OURS[name](named, **options, master_weights=True, state_dtype=torch.float32, backend=backend)
    expected = OURS[name](wide, **options, backend="torch")
    check = same if backend == "torch" else partial(close, steps=16)
    for _ in range(2):
        gradients(named)
        for (_, p), (_, q) in zip(named, wide, strict=True):
            q.grad = p.grad.float()
        ours.step(), expected.step()
        for (_, p), (_, q) in zip(named, wide, strict=True):
            check(master_of(ours, p), q.detach())
            same(p.detach(), master_of(ours, p).to(p.dtype))


BY_NORM = [ELR(0.1, **ALL), LARS(0.5, **ALL), LAMB(**ALL)]


@pytest.mark.parametrize(
    ("scaling", "backend"),
    [(scaling, "torch") for scaling in BY_NORM]
    # a factor of the gradient and one of the direction
    + [(BY_NORM[0], "triton"), long(BY_NORM[1], "triton"), (BY_NORM[2], "triton")],
    ids=name_of,
)
def test_scalings_by_the_norm_of_the_weight(backend, scaling, device):
    """w ← w − lr · trust ratio · g in double precision.

    A factor of the direction goes by the norm of the master weight, other factors by the norm of the parameter.
    """
    named = parameters(SHAPES, torch.bfloat16, device)
    ours = OURS["sgd"](named, lr=0.1, scaling=scaling, master_weights=True, backend=backend)
    exact = [p.detach().double() for _, p in named]
    for _ in range(3):
        gradients(named)
        norms = [
            weight.norm() if isinstance(scaling, LAMB) else p.double().norm()
            for weight, (_, p) in zip(exact, named, strict=True)
        ]
        ours.step()
        stats = ours.layer_stats()
        close(stats.weight_norm.float(), torch.stack(norms).float(), steps=8)
        for i, (_, p) in enumerate(named):
            exact[i] -= 0.1 * stats.trust_ratio[i] * p.grad.double()
            close(master_of(ours, p), exact[i].float(), steps=8)
            same(p.detach(), master_of(ours, p).to(p.dtype))


@pytest.mark.parametrize("backend", ["torch", long("triton")])
def test_rescaled_weights(backend, device):
    """The master weight is also divided by Ŵ, computed from the parameters; a bias without a gradient too."""
    named = parameters([(6, 5), (4, 5), (6,)], torch.bfloat16, device)
    (_, first), (_, second), (_, bias) = named
    owner = torch.nn.ParameterDict(named)
    layers = ScaleInvariant(("p0", "p1"), ((owner, "p0"), (owner, "p1")), ((owner, "p2", 1),), (), {}, {})
    options = {"momentum": 0.5, "rescale_weights": layers, "master_weights": True, "state_dtype": torch.float32}
    ours = OURS["sgd"](named, lr=0.1, **options, backend=backend)
    exact = [p.detach().double() for _, p in named]
    buffers = [torch.zeros_like(w) for w in exact]
    for step in range(4):
        gradients(named)
        if step == 2:
            bias.grad = None
        largest = max(first.detach().double().norm(), second.detach().double().norm())
        ours.step()
        for i, (_, p) in enumerate(named):
            if p.grad is not None:
                buffers[i] = 0.5 * buffers[i] + p.grad.double() if step else p.grad.double()
                exact[i] -= 0.1 * buffers[i]
            exact[i] /= largest
            buffers[i] /= largest
            close(master_of(ours, p), exact[i].float(), steps=8 * (step + 1))
            close(ours.state[p]["momentum_buffer"], buffers[i].float(), steps=8 * (step + 1))
            same(p.detach(), master_of(ours, p).to(p.dtype))


@nan_arithmetic
@pytest.mark.parametrize(
    ("name", "backend", "why", "scaling"),
    [(name, "torch", why, s) for name in OURS for why in ("found_inf", "nonfinite") for s in (None, LAMB())]
    + [("sgd", "triton", "found_inf", LAMB()), long("adamw", "triton", "nonfinite", None)],
    ids=name_of,
)
def test_a_skipped_step_changes_nothing(name, backend, why, scaling, device):
    """An edit of the parameter, which the master weight has not followed yet, is not lost by it."""
    named = parameters(SHAPES, torch.float16, device)
    options = {**OPTIONS[name], "scaling": scaling, "nonfinite": "skip" if why == "nonfinite" else "propagate"}
    ours = OURS[name](named, **options, master_weights=True, backend=backend)

    def step(*, bad):
        gradients(named)
        if why == "found_inf":
            ours.grad_scale, ours.found_inf = (torch.full((), x, device=device) for x in (1.0, float(bad)))
        elif bad:
            named[2][1].grad[7] = float("inf")
        ours.step()
        ours.grad_scale = ours.found_inf = None

    step(bad=False), step(bad=False)
    with torch.no_grad():
        named[2][1][:9].mul_(3)
    before = snapshot(ours, named)
    step(bad=True)
    assert identical(snapshot(ours, named), before)
    edited = named[2][1].detach()[:9].float()
    step(bad=False)
    # from the edited weight: by far less than the edit
    assert ((master_of(ours, named[2][1])[:9] - edited).abs() <= 0.3 + 0.02 * edited.abs()).all()
    for _, p in named:
        same(p.detach(), master_of(ours, p).half())


@one_kernel
def test_grad_scaler(name, backend, device):
    """float16 parameters and gradients, unscaled in float32: no underflow, compared with float32 training."""
    param = nn.Parameter(torch.linspace(-1, 1, 33).half().to(device))
    wide = nn.Parameter(param.detach().float())
    options = {**OPTIONS[name], "state_dtype": torch.float32}
    ours = OURS[name]([param], **options, master_weights=True, backend=backend)
    expected = OURS[name]([wide], **options, backend="torch")
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14, growth_interval=100)
    for step in range(4):
        # gradients that underflow in float16 without the scale
        x = torch.rand(33, device=device) * 2.0**-24
        ours.zero_grad()
        scaler.scale((param.float() * x).sum()).backward()
        scale = scaler.get_scale()
        scaler.step(ours), scaler.update()
        wide.grad = param.grad.float() / scale
        expected.step()
        close(master_of(ours, param), wide.detach(), steps=4 * (step + 1))
        same(param.detach(), master_of(ours, param).half())
    assert param.grad.count_nonzero() == 33


@every_backend
def test_bytes(backend, device):
    """Only the master weight is added: 4 bytes for each element of a half-precision parameter."""
    named = parameters([(6, 5), (130,)], torch.bfloat16, device)
    ours = OURS["adamw"](named, master_weights=True, backend=backend)
    gradients(named)
    ours.step()
    for _, p in named:
        sizes = {key: value.element_size() * value.numel() for key, value in ours.state[p].items() if value.dim()}
        assert sizes == {"exp_avg": 2 * p.numel(), "exp_avg_sq": 2 * p.numel(), "master_weight": 4 * p.numel()}
