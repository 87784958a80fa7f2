"""Float32 parameters with half-precision gradients step as with the same gradients in float32."""

from functools import partial

import pytest
import torch
from cases import BACKENDS, every_backend, long
from pairs import twin_parameters
from steps import ALL, OPTIONS, compare, identical, parameters, snapshot, twin
from tolerances import close, same, same_on_cpu

from fused_lwlr import ELR, LAMB, Hyperball, step_in_backward

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
SHAPES = [(40, 30), (), (1030,), (0,)]
HALF = [torch.bfloat16, torch.float16]
OPTIONAL = [
    {}, {"clip_global_norm": 0.5}, {"nonfinite": "skip", "maximize": True}, {"scaling": ELR(0.1)},
    {"scaling": LAMB(), "clip_global_norm": 0.5}, {"scaling": Hyperball()},
    {"ema": 0.9, "layers": {"p0[3:7]": 0.5, "p2": {"weight_decay": 0.0}}}, {"capturable": True},
    {"state_dtype": torch.bfloat16},
]  # fmt: skip
every_name = pytest.mark.parametrize("name", ALL)
every_dtype = pytest.mark.parametrize("dtype", HALF, ids=str)


def half_gradients(named, dtype):
    for _, p in named:
        p.grad_dtype = dtype
    return named


def backward(named, seed, factor=1.0):
    """One backward pass; gradients accumulate. Products of the seed's numbers are rounded to the dtype of `.grad`."""
    torch.manual_seed(seed)
    loss = sum((p * (torch.rand_like(p) * 2 - 1)).sum() for _, p in named)
    (loss * factor).backward()


class Scaler(torch.amp.GradScaler):
    """Looks for infinity by itself, since torch does not in bfloat16 on a GPU."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        assert inv_scale.item() == 1
        for p in optimizer.param_groups[0]["params"]:
            found_inf += ~p.grad.isfinite().all()
        return {found_inf.device: found_inf}


def take(other, named):
    """The gradients of `named` in float32."""
    for (_, p), (_, q) in zip(named, other, strict=True):
        q.grad = None if p.grad is None else p.grad.float()


# kernels of all rules load gradients in the same way: the other options go with one of them
every_kernel = pytest.mark.parametrize(("name", "backend"), [*((name, "torch") for name in ALL), ("adamw", "triton")])


@pytest.mark.parametrize(
    ("name", "backend", "dtype", "more"),
    [
        (name, backend, dtype, more)
        # with other scalings and in float16, gradients are read in the same way
        if dtype == HALF[0] and i in (0, 4)
        else long(name, backend, dtype, more)
        for name in ALL
        for backend in BACKENDS
        for dtype in HALF
        for i, more in enumerate(OPTIONAL)
        if (dtype == HALF[0] or i in (0, 4))
        # kernels differ in how they load gradients: in one pass or two, by a scaling of either kind
        and (backend == "torch" or (name == "adamw" and i in (0, 3, 4, 5)))
    ],
    ids=lambda value: ("-".join(value) or "plain") if isinstance(value, dict) else str(value),
)
def test_as_with_float32(name, backend, dtype, more, device):
    """Two backward passes for each step; one parameter has no gradient in the first step."""
    named, other = twin_parameters(SHAPES, torch.float32, device)
    half_gradients(named, dtype)
    options = {**OPTIONS[name], **more, "backend": backend}
    ours, expected = ALL[name](named, **options), ALL[name](other, **options)
    for step in range(3):
        backward(named, step)
        backward(named, step + 10)
        if step == 0:
            named[2][1].grad = None
        before = [None if p.grad is None else p.grad.clone() for _, p in named]
        assert {grad.dtype for grad in before if grad is not None} == {dtype}
        take(other, named)
        ours.step()
        expected.step()
        assert identical([p.grad for _, p in named], before)
        ours.zero_grad()
    # the compiler for GPUs spreads a block over threads by the size of its elements, so sums have another order
    sums = backend == "triton" and ("scaling" in more or "clip_global_norm" in more)
    compare(partial(same_on_cpu, steps=3) if sums else same, ours, expected, named, other)
    if "scaling" in more:
        close(ours.layer_stats().values.float(), expected.layer_stats().values.float(), steps=8)


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [(name, "torch", dtype) for name in ALL for dtype in HALF]
    + [long("adamw", "triton", torch.bfloat16), ("adamw", "triton", torch.float16)],
    ids=str,
)
def test_with_a_grad_scaler(name, backend, dtype, device):
    """Scaled gradients, an overflow in the second step, and clipping of the unscaled gradients."""
    named, other = twin_parameters(SHAPES, torch.float32, device)
    half_gradients(named, dtype)
    options = {**OPTIONS[name], "clip_global_norm": 0.5, "backend": backend}
    # with its counts on the device as well, which rounds differently
    ours, expected = ALL[name](named, **options), ALL[name](other, capturable=True, **options)
    make = Scaler if device.type == "cuda" and dtype == torch.bfloat16 else torch.amp.GradScaler
    scaler = make(device.type, init_scale=1024.0, growth_interval=100)
    for step in range(4):
        ours.zero_grad()
        backward(named, step, scaler.get_scale())
        if step == 1:
            named[0][1].grad[0, 0] = torch.inf
        before = snapshot(ours, named)
        # the gradients are scaled already
        scaler.scale(torch.ones((), device=device))
        scaler.step(ours)
        scaler.update()
        if step == 1:
            assert identical(before, snapshot(ours, named))
            continue
        scale = 1024.0 if step == 0 else 512.0
        for (_, p), (_, q) in zip(named, other, strict=True):
            q.grad = p.grad.float() / scale
        expected.step()
    assert scaler.get_scale() == 512
    compare(partial(close, steps=4), ours, expected, named, other)


@every_kernel
def test_dtypes_may_differ_and_change(name, backend, device):
    """One parameter has other gradients than the rest, and they change between steps."""
    named, other = twin_parameters(SHAPES, torch.float32, device)
    options = {**OPTIONS[name], "clip_global_norm": 0.5, "backend": backend}
    ours, expected = ALL[name](named, **options), ALL[name](other, **options)
    for step, dtypes in enumerate([(None, *HALF, None), (*HALF, None, None), (None,) * 4, (*HALF, *HALF)]):
        for (_, p), dtype in zip(named, dtypes, strict=True):
            p.grad = None
            p.grad_dtype = dtype or torch.float32
        backward(named, step)
        assert named[1][1].grad.dtype == (dtypes[1] or torch.float32)
        take(other, named)
        ours.step()
        expected.step()
    compare(partial(close, steps=4), ours, expected, named, other)


@every_backend
@every_name
def test_steps_in_backward(name, backend, device):
    named, other = twin_parameters(SHAPES, torch.float32, device)
    half_gradients(named, torch.bfloat16)
    ours, expected = (ALL[name](each, **OPTIONS[name], backend=backend) for each in (named, other))
    step_in_backward(torch.nn.ParameterDict(named), ours)
    for step in range(3):
        mirror = half_gradients(twin(named), torch.bfloat16)
        backward(mirror, step)
        take(other, mirror)
        backward(named, step)
        ours.step()
        expected.step()
        assert all(p.grad is None for _, p in named)
    compare(partial(close, steps=3), ours, expected, named, other)


@every_backend
@every_name
def test_plans_are_kept_and_gradients_taken_by_their_addresses(name, backend, device):
    """Without a look at each gradient, which takes longer: the first look is the only one."""
    named = half_gradients(parameters(SHAPES, torch.float32, device), torch.bfloat16)
    ours = ALL[name](named, **OPTIONS[name], backend=backend)
    plans, forms = [], []
    for step in range(3):
        ours.zero_grad()
        backward(named, step)
        ours.step()
        plans.append(ours._last_plans[0])
        forms.append([plan.table.version for plan in ours._last_plans[0].launch_plans])
    assert plans[0] is plans[1] is plans[2]
    assert forms[1] == forms[2] == [1] * len(forms[0])


@every_name
def test_gradients_of_another_precision_are_refused(name, device):
    named = parameters([(6, 5)], torch.float32, device)
    named[0][1].grad_dtype = torch.float64
    backward(named, 0)
    ours = ALL[name](named, lr=0.1)
    with pytest.raises(RuntimeError, match=r"is torch.float64, but the parameter is torch.float32: set .grad to"):
        ours.step()


@every_backend
@every_dtype
@pytest.mark.parametrize("of_grad", [torch.float32, None], ids=str)
def test_a_resumed_training_has_the_same_noise_if_a_gradient_is_absent(of_grad, dtype, backend, device):
    """The noise does not depend on the plan of a parameter; None allows gradients of any dtype."""

    def made(values):
        named = [(f"p{i}", torch.nn.Parameter(value.clone())) for i, value in enumerate(values)]
        return half_gradients(named, of_grad)

    named = made([torch.linspace(1, 2, 64, device=device).to(dtype) for _ in range(2)])
    options = {"lr": 0.1, "stochastic_rounding": True, "backend": backend}
    ours = ALL["sgd"](named, **options)
    backward(named, 0)
    ours.step()
    again = made([p.detach() for _, p in named])
    resumed = ALL["sgd"](again, **options)
    resumed.load_state_dict(ours.state_dict())
    for params, optimizer in ((named, ours), (again, resumed)):
        optimizer.zero_grad()
        backward(params[1:], 1)
        optimizer.step()
    assert identical(named[1][1].detach(), again[1][1].detach())


@pytest.mark.parametrize(
    ("dtype", "first", "backend"),
    [
        (torch.float32, torch.bfloat16, "torch"), (torch.bfloat16, torch.float32, "torch"),
        (torch.float32, torch.bfloat16, "triton"), long(torch.bfloat16, torch.float32, "triton"),
    ],
)  # fmt: skip
def test_a_gradient_in_another_dtype_after_a_step_without_one(dtype, first, backend, device):
    params = [torch.nn.Parameter(torch.zeros(6, dtype=dtype, device=device)) for _ in range(2)]
    ours = ALL["sgd"](params, lr=1.0, backend=backend)
    for own, value in ((first, 1.0), (None, 0.0), (dtype, 0.25)):
        for param, of in ((params[0], own), (params[1], first)):
            param.grad = None
            param.grad_dtype = of
            param.grad = None if of is None else torch.full_like(param.detach(), value, dtype=of)
        ours.step()
    assert params[0].tolist() == [-1.25] * 6
