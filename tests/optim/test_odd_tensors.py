"""Tensors that kernels cannot address, or that must not be written to: stepped as torch does, or refused whole."""

import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from cases import every_backend, every_case, every_name, long, name_of
from steps import OPTIONS, OURS, TORCH, identical, snapshot
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from fused_lwlr import ELR, LAMB, Hyperball, layer_statistics
from fused_lwlr.backends import pick
from fused_lwlr.kernels import reference
from fused_lwlr.memory import find_overlap, is_addressable

BUFFER = {"sgd": "momentum_buffer", "adamw": "exp_avg"}
AUTO_AND_TORCH = pytest.mark.parametrize("backend", ["auto", "torch"])


def two(values):
    return TwoTensor(values.clone(), values.clone())


class Wrapped(torch.Tensor):
    """A gradient without storage that stands for the tensor it wraps."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map_only(cls, lambda t: t.inner, args), **(kwargs or {}))


def freed(values):
    values.untyped_storage().resize_(0)
    return values


def optimizer_of(name, backend, *params, **options):
    return OURS[name]([(f"p{i}", p) for i, p in enumerate(params)], **{**OPTIONS[name], **options}, backend=backend)


def step(optimizer, grads=None):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 0.5) if grads is None else grads[i]
    optimizer.step()


def refuses(optimizer, message, error=RuntimeError, grads=None):
    """The next step raises, and does not change the plain parameters and the state."""
    named = [("p", p) for group in optimizer.param_groups for p in group["params"] if type(p) is nn.Parameter]
    named = [(label, p) for label, p in named if p.untyped_storage().nbytes()]
    before = [p.detach().clone() for _, p in named]
    state = {p: dict(entries) for p, entries in optimizer.state.items()}
    for _ in range(2):
        with pytest.raises(error, match=message):
            step(optimizer, grads)
    assert identical([p.detach() for _, p in named], before)
    assert all(optimizer.state[p].keys() == entries.keys() for p, entries in state.items())


@every_name
@AUTO_AND_TORCH
@pytest.mark.parametrize("scaling", [None, ELR(0.1), LAMB()], ids=name_of)
def test_wrapper_subclasses_step_their_inner_tensor(name, backend, scaling):
    values = torch.rand(3, 2)
    expected, beside, wrapped = nn.Parameter(values.clone()), nn.Parameter(torch.ones(4)), nn.Parameter(two(values))
    ours = optimizer_of(name, backend, wrapped, beside, scaling=scaling)
    same = optimizer_of(name, "torch", expected, scaling=scaling)
    for _ in range(3):
        step(ours)
        step(same)
    for inner in (wrapped.a, wrapped.b):
        assert torch.equal(inner, expected)
    assert type(ours.state[wrapped][BUFFER[name]]) is TwoTensor
    assert not torch.equal(beside, torch.ones(4))


@every_name
@AUTO_AND_TORCH
def test_a_wrapper_gradient_of_a_plain_parameter(name, backend):
    """The error comes after a plan for plain gradients was made."""
    param, expected = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ours, torchs = optimizer_of(name, backend, param), TORCH[name]([expected], **OPTIONS[name], foreach=False)
    for wrap in (torch.clone, torch.clone, Wrapped, torch.clone, Wrapped):
        grad = torch.rand(3)
        step(ours, [wrap(grad)])
        step(torchs, [grad])
        assert torch.equal(param, expected)


@every_name
def test_an_explicit_triton_backend_refuses_wrapper_subclasses(name):
    beside, wrapped = nn.Parameter(torch.ones(4)), nn.Parameter(two(torch.ones(3)))
    refuses(optimizer_of(name, "triton", beside, wrapped), "without a data pointer", ValueError)
    assert torch.equal(wrapped.a, torch.ones(3))


@every_name
def test_an_explicit_triton_backend_refuses_a_wrapper_gradient_that_comes_late(name):
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    optimizer = optimizer_of(name, "triton", *params)
    step(optimizer)
    step(optimizer)
    refuses(optimizer, "without a data pointer", ValueError, [torch.ones(4), two(torch.ones(3))])
    step(optimizer)


def test_the_reference_steps_unaddressable_tensors_on_a_gpu():
    cuda = torch.device("cuda")
    assert pick("auto", cuda, torch.float32, addressable=False) is reference
    with pytest.raises(ValueError, match="without a data pointer"):
        pick("triton", cuda, torch.float32, addressable=False)


def test_addressable_tensors():
    base = torch.zeros(8)
    assert all(map(is_addressable, (base, base[3:], torch.zeros(0), nn.Parameter(base))))
    assert not any(map(is_addressable, (two(base), base.to("meta"), base.to("meta")[3:])))
    with FakeTensorMode():
        # its data pointer is its offset, not 0
        assert not is_addressable(torch.zeros(8)[3:])
    view = base[3:]
    freed(base)
    assert view.data_ptr() != 0
    assert not is_addressable(view)


@every_case
def test_freed_storage_is_refused(name, backend):
    for which in ("param", "view", "grad", "state"):
        params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(6)[2:])]
        optimizer = optimizer_of(name, backend, *params)
        grads = [torch.ones(4), torch.ones(4)]
        step(optimizer, grads)
        step(optimizer, grads)
        if which == "param":
            freed(params[1])
        elif which == "view":
            freed(params[1]._base if params[1]._base is not None else params[1])
        elif which == "grad":
            freed(grads[1])
        else:
            freed(optimizer.state[params[1]][BUFFER[name]])
        refuses(optimizer, "'p1'.* was freed", ValueError if which == "state" else RuntimeError, grads)


@every_case
@pytest.mark.parametrize(
    "options", [{"ema": 0.9}, {"master_weights": True}, {"scaling": Hyperball(select="*")}], ids=name_of
)
def test_state_is_not_made_of_freed_weights(name, backend, options):
    """It begins with the weights. To read them would end the process."""
    params = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = optimizer_of(name, backend, *params, **options)
    freed(params[1])
    refuses(optimizer, "the storage of parameter 'p1' was freed", grads=[torch.ones_like(p) for p in params])


@every_backend
@pytest.mark.parametrize(("shape", "options"), [((0,), {}), ((3,), {"nonfinite": "raise"}), ((3,), {"ema": 0.9})])
def test_steps_do_not_repeat_warnings_of_users(shape, options, backend):
    """Python shows a warning again after any `warnings.catch_warnings()`."""
    params = [nn.Parameter(torch.ones(size)) for size in ((2, 3), shape)]
    optimizer = OURS["sgd"](params, lr=0.1, momentum=0.9, backend=backend, **options)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(4):
            warnings.warn("of a user", stacklevel=1)
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
    assert [str(warning.message) for warning in shown] == ["of a user"]


@pytest.fixture
def _every_warning():
    """Not once in a process, as torch warns of addresses of fake tensors."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.parametrize(
    ("name", "backend"), [("sgd", "auto"), ("sgd", "triton"), ("adamw", "auto"), long("sgd", "torch"),
                          long("adamw", "torch"), long("adamw", "triton")],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("_every_warning")
def test_fake_tensors_are_stepped_on_shapes(name, backend, device):
    options = [
        {},
        {"scaling": ELR(0.1), "ema": 0.9},
        {"scaling": Hyperball(), "capturable": True},
        {"nonfinite": "raise"},
    ]
    if backend == "auto" or (device == "cuda" and not torch.cuda.is_available()):
        options = [{}]
    for more in options:
        with FakeTensorMode():
            params = [nn.Parameter(torch.ones(shape, device=device)) for shape in ((3, 2), (4,))]
            expected = [nn.Parameter(torch.ones_like(p)) for p in params]
            ours, torchs = optimizer_of(name, backend, *params, **more), TORCH[name](expected, **OPTIONS[name])
            for _ in range(2):
                step(ours)
                step(torchs)
                ours.load_state_dict(ours.state_dict())
            for p, q in zip(params, expected, strict=True):
                for key, entry in torchs.state[q].items():
                    found = ours.state[p][key]
                    assert (found.shape, found.dtype) == (entry.shape, entry.dtype)
                    assert key == "step" or found.device == entry.device


@every_name
@AUTO_AND_TORCH
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"nonfinite": "skip"}, {"nonfinite": "raise"}], ids=str)
def test_meta_parameters_are_stepped_on_shapes_as_torch_does(name, backend, options):
    """State dicts load, too, with step counts that have no value."""
    param = nn.Parameter(torch.ones(3, device="meta"))
    optimizer = optimizer_of(name, backend, param, **options)
    for _ in range(3):
        step(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[param][BUFFER[name]].is_meta


@every_case
def test_inference_parameters_are_refused_outside_of_inference_mode(name, backend):
    with torch.inference_mode():
        param = nn.Parameter(torch.ones(3))
    refuses(optimizer_of(name, backend, nn.Parameter(torch.ones(4)), param), "'p1' is an inference tensor")
    assert torch.equal(param, torch.ones(3))


@every_name
@AUTO_AND_TORCH
def test_inference_parameters_are_stepped_in_inference_mode(name, backend):
    with torch.inference_mode():
        param, expected = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        ours, torchs = optimizer_of(name, backend, param), TORCH[name]([expected], **OPTIONS[name], foreach=False)
        for _ in range(3):
            step(ours)
            step(torchs)
        assert torch.equal(param, expected)


@every_case
def test_state_of_inference_mode_is_refused_outside_of_it(name, backend):
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    optimizer = optimizer_of(name, backend, *params)
    with torch.inference_mode():
        for _ in range(3):
            step(optimizer)
    refuses(optimizer, f"'{BUFFER[name]}' in the state of parameter 'p0' is an inference tensor")


@every_case
def test_nested_parameters_are_refused(name, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    beside, param = nn.Parameter(torch.ones(4)), nn.Parameter(jagged)
    beside.grad, param.grad = torch.ones(4), torch.ones_like(param)
    with pytest.raises(RuntimeError, match="does not support nested tensors, such as parameter 'p1'"):
        optimizer_of(name, backend, beside, param).step()
    assert torch.equal(beside, torch.ones(4))


@every_name
def test_gradients_within_a_torch_func_transform(name):
    def stepped(make):
        found = []

        def function(x):
            param = nn.Parameter(torch.ones(3))
            optimizer = make(param)
            for _ in range(2):
                param.grad = x * 2
                optimizer.step()
            found.append(param.sum())
            return found[0]

        torch.func.grad(function)(torch.ones(3))
        return found[0].item()

    expected = stepped(lambda param: TORCH[name]([param], **OPTIONS[name], foreach=False))
    assert stepped(lambda param: optimizer_of(name, "auto", param)) == expected
    with pytest.raises(ValueError, match=r"without a data pointer .*torch.func transforms"):
        stepped(lambda param: optimizer_of(name, "triton", param))


@every_case
def test_updates_that_autograd_must_see(name, backend):
    param, expected = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ours, torchs = optimizer_of(name, backend, param), TORCH[name]([expected], **OPTIONS[name], foreach=False)
    for optimizer in (ours, torchs):
        step(optimizer)
    grads = []
    for optimizer, p in ((ours, param), (torchs, expected)):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            loss = (p * p).sum()
            if optimizer is ours and backend == "triton":
                with pytest.raises(RuntimeError, match="allow_mutation_on_saved_tensors"):
                    optimizer.step()
                return
            optimizer.step()
            p.grad = None
            loss.backward()
            grads.append(p.grad)
    assert torch.equal(*grads)


@every_name
def test_a_traced_step(name):
    """The trace contains the step, or tracing raises."""

    def traced(backend):
        param = nn.Parameter(torch.ones(3))
        optimizer = optimizer_of(name, backend, param)

        def function(grad):
            param.grad = grad
            optimizer.step()
            return param.detach().clone()

        return param, make_fx(function)(torch.ones(3))

    _, graph = traced("torch")
    assert any("add" in str(node.target) for node in graph.graph.nodes)
    with pytest.raises(RuntimeError, match="cannot run within make_fx"):
        traced("triton")


@every_name
def test_meta_parameters_are_refused_where_torch_refuses_them(name):
    param = nn.Parameter(torch.ones(3, device="meta"))
    for optimizer in (optimizer_of(name, "auto", param, fused=True), TORCH[name]([param], fused=True)):
        with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors of"):
            step(optimizer)


BUFFERS = {
    **{str(dtype): torch.ones(4).to(dtype) for dtype in (torch.int32, torch.bool, torch.float8_e4m3fn)},
    "short": torch.ones(3), "sparse": torch.ones(4).to_sparse(), "text": "text", "number": 2.0,
    "expanded": torch.ones(1).expand(4), "negative": torch._neg_view(torch.ones(4)),
}  # fmt: skip
UNUSABLE = [({}, None, value, "") for value in BUFFERS.values()] + [
    ({"ema": 0.9}, "ema", torch.zeros(3), r" is \(3,\), but"),
    ({"ema": 0.9}, "ema", torch.zeros(4).bfloat16(), " is torch.bfloat16, but must be torch.float32"),
    ({"master_weights": True}, "master_weight", torch.zeros(3), r" is \(3,\)"),
    ({"scaling": Hyperball(select="*")}, "radius", torch.ones(3), r" is \(3,\), .* layer of .*: delete"),
    ({"scaling": Hyperball(select="*")}, "radius", torch.ones(1).double(), " is torch.float64 on .* be torch.float32"),
    ({"scaling": Hyperball(select="*")}, "radius", torch._neg_view(-torch.ones(1)), " is a lazy conjugate or negative"),
]


@every_case
@pytest.mark.parametrize(("options", "key", "value", "message"), UNUSABLE)
def test_state_that_no_step_can_use_is_refused_whole(name, backend, options, key, value, message):
    """State that is put there by hand; loading a state dict would not allow it."""
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in (3, 4)]
    optimizer = optimizer_of(name, backend, *params, **options)
    step(optimizer)
    step(optimizer)
    key = key or BUFFER[name]
    optimizer.state[params[1]][key] = value
    error = ValueError if message else (ValueError, RuntimeError)
    refuses(optimizer, f"'{key}' in the state of parameter 'p1'{message}", error)


@every_case
def test_parameters_that_share_memory_are_refused(name, backend):
    whole = torch.ones(5)
    first, second = nn.Parameter(whole), nn.Parameter(whole[1:3])
    optimizer = optimizer_of(name, backend, nn.Parameter(torch.ones(2)), first, second)
    refuses(optimizer, "parameter 'p1' and parameter 'p2' share memory")
    twice = nn.Parameter(torch.ones(6).as_strided((3, 2), (1, 1)))
    grads = [torch.ones(2), torch.ones(3, 2)]
    refuses(optimizer_of(name, backend, nn.Parameter(torch.ones(2)), twice), "'p1' share memory", grads=grads)
    # columns of one matrix interleave but share no memory
    columns = [nn.Parameter(column) for column in torch.ones(4, 6).split(2, dim=1)]
    step(optimizer_of(name, backend, *columns))
    assert all((p < 1).all() for p in columns)


@pytest.mark.parametrize(
    ("strides", "shares"), [((3, 2), False), ((2, 1), False), ((1, 1), True), ((0, 1), True), ((2, 4), False)]
)
def test_elements_of_one_tensor_that_share_memory(strides, shares):
    tensor = torch.zeros(20).as_strided((2, 2), strides)
    offsets = {i * strides[0] + j * strides[1] for i in range(2) for j in range(2)}
    assert shares == (len(offsets) < 4)
    assert find_overlap([torch.zeros(3), tensor]) == ((1, 1) if shares else None)


@every_backend
@every_name
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 1e300), ("weight_decay", 1e300), ("lr", 1e38), ("lr", 10**40), ("lr", np.float64(1e300)),
        ("lr", torch.tensor(1e300, dtype=torch.float64)), ("weight_decay", torch.tensor([1e38])),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_beyond_float32_are_refused(name, backend, option, value):
    """The step refuses the cases where torch raises midway; the third parameter becomes invalid with the multiplier."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    groups = [{"params": [("p0", params[0])]}, {"params": [("p1", params[1])], option: value}]
    optimizer = OURS[name](groups, **OPTIONS[name], layers={"p1": 10.0}, backend=backend)
    refuses(optimizer, f"{option}=.* is too large for float32", ValueError)


@every_case
def test_a_corrected_decay_beyond_float32_is_refused(name, backend):
    group = {"params": [("p0", nn.Parameter(torch.ones(3))), ("p1", nn.Parameter(torch.ones(4)))], "max_lr": 1e-320}
    optimizer = OURS[name]([group], **OPTIONS[name], layers={"p*": {"corrected_decay": True}}, backend=backend)
    refuses(optimizer, "weight_decay=inf is too large for float32", ValueError)


@every_case
def test_multipliers_beyond_float32_are_refused(name, backend):
    """Also where their product with lr is small."""
    named = [("p0", nn.Parameter(torch.ones(3))), ("p1", nn.Parameter(torch.ones(4, 2)))]
    optimizer = OURS[name](named, **{**OPTIONS[name], "lr": 1e-30}, layers={"p1[1:3]": 1e39}, backend=backend)
    refuses(optimizer, r"'lr' of layer 'p1\[1:3\]' is 1e\+39: for float32 it must be at most 3\.4e\+38", ValueError)


@every_name
@pytest.mark.parametrize(("lr", "multiplier"), [(1e300, 1.0), (1.0, 1e300)])
def test_numbers_beyond_float32_are_right_in_double_precision(name, lr, multiplier):
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    named = [("p0", param)]
    if lr == 1.0:
        # the multiplier is not too large for it
        named.append(("p1", nn.Parameter(torch.ones(3))))
    step(OURS[name](named, **{**OPTIONS[name], "lr": lr, "weight_decay": 0}, layers={"p0": multiplier}))
    assert param.isfinite().all()
    assert (param < -1e298).all()


@every_case
def test_state_in_another_mapping(name, backend):
    class Defaults(UserDict):
        def __missing__(self, key):
            return self.setdefault(key, {})

    params = [[nn.Parameter(torch.ones(3))] for _ in range(2)]
    ours, same = (optimizer_of(name, backend, *each) for each in params)
    for i in range(5):
        if i == 2:
            ours.state = Defaults(ours.state)
        step(ours)
        step(same)
    assert torch.equal(params[0][0], params[1][0])


@every_case
def test_param_groups_of_another_optimizer(name, backend):
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    ours, torchs = optimizer_of(name, backend, params[0]), TORCH[name]([params[0]], **OPTIONS[name])
    same = optimizer_of(name, backend, params[1])
    for i in range(6):
        if i == 1:
            ours.param_groups = torchs.param_groups
        if i == 3:
            ours.__setstate__({"param_groups": TORCH[name]([params[0]], **OPTIONS[name]).param_groups})
        if i == 5:
            ours.param_groups = TORCH[name]([params[0]], **OPTIONS[name]).param_groups
            ours.load_state_dict(same.state_dict())
        step(ours)
        step(same)
    assert torch.equal(*params)
    mine, expected = snapshot(ours, [("p", params[0])])[0], snapshot(same, [("p", params[1])])[0]
    # the other groups had no names, and got the names of the dict
    assert identical(mine, expected)


@AUTO_AND_TORCH
def test_layer_statistics_of_wrapper_subclasses(backend):
    values, grad = torch.rand(3, 2), torch.rand(3, 2)
    plain, wrapped = nn.Parameter(values.clone()), nn.Parameter(two(values))
    plain.grad, wrapped.grad = grad, two(grad)
    expected = layer_statistics({"w": plain}, backend="torch").to_dict()
    assert layer_statistics({"w": wrapped}, backend=backend).to_dict() == expected
    with pytest.raises(ValueError, match="without a data pointer"):
        layer_statistics({"w": wrapped}, backend="triton")


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("scaling", [None, LAMB(), Hyperball()], ids=name_of)
@pytest.mark.parametrize("first", [nn.Linear, nn.LazyLinear])
@every_case
def test_lazy_parameters_are_stepped_when_they_are_there(name, backend, first, scaling):
    """As in torch, a parameter that is not initialized yet has no gradient, and is skipped; state dicts have none."""
    model = nn.Sequential(first(3, 3) if first is nn.Linear else first(3), nn.LazyLinear(2))
    optimizer = OURS[name](model.named_parameters(), **OPTIONS[name], scaling=scaling, backend=backend)
    assert optimizer.backend == {"cpu": backend}
    optimizer.scaling = scaling
    for layers, stepped in ((model[0], 2), (model, 4)):
        for _ in range(2):
            layers(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        assert len(optimizer.state) == stepped
        optimizer.load_state_dict(optimizer.state_dict())


@every_case
def test_parameters_without_a_gradient_may_have_any_layout(name, backend):
    """Frozen parameters that no step could update."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    whole = torch.ones(4)
    odd = [nested, torch.ones(3, dtype=torch.int8), torch.ones(1).expand(3), whole, whole[1:], freed(torch.ones(3))]
    frozen = [nn.Parameter(tensor, requires_grad=False) for tensor in odd]
    param, expected = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ours, torchs = optimizer_of(name, backend, param, *frozen), TORCH[name]([expected], **OPTIONS[name], foreach=False)
    for options in ({}, {"momentum": 0.0} if name == "sgd" else {}):
        for optimizer in (ours, torchs):
            optimizer.param_groups[0].update(options)
        for _ in range(3):
            param.grad, expected.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
            ours.step()
            torchs.step()
        torch.testing.assert_close(param, expected)
