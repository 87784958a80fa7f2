"""The look at parameters, gradients and state before a step, in C and in Python."""

import ctypes
import gc
import shutil
import subprocess
import sys
import sysconfig
from array import array
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from lazy import imaginary, negated
from torch.nn import Parameter

from fused_lwlr.kernels import look as python
from fused_lwlr.kernels.c_library import compiler
from fused_lwlr.kernels.triton import look as native

NAMES = ("b", "step")
every_backend = pytest.mark.parametrize("backend", [native, python], ids=["compiled", "python"])
in_c = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(torch._C.__file__), "aoti_torch_get_layout") or shutil.which("gcc") is None,
    reason="needs a function in C that torch 2.8 lacks, and a C compiler",
)


def made(backend):
    """Parameters of which one has no gradient, the state of two of them, and a look at them."""
    params = [Parameter(torch.ones(shape)) for shape in [(3, 4), (5,), (), (4, 4)]]
    for param in params[:2] + params[3:]:
        param.grad = torch.ones_like(param)
    state = {param: {"b": torch.ones_like(param), "step": 1.0, "other": 0} for param in params[:2]}
    look = backend.look_at(params, state, NAMES)
    return SimpleNamespace(params=params, state=state, look=look, again=lambda: look.again(params, None, state))


def grads_of(params):
    return [param.grad for param in params]


def check(found, grads, matching=True):
    """Checks a result against the gradients of all parameters."""
    present, gradients, addresses, agree = found
    assert type(present) is type(addresses) is bytes
    assert list(present) == [grad is not None for grad in grads]
    assert type(gradients) is tuple
    assert all(a is b for a, b in zip(gradients, grads, strict=True))
    assert list(memoryview(addresses).cast("q")) == [0 if grad is None else grad.data_ptr() for grad in grads]
    assert agree is matching


def replace(param, **entries):
    for name, value in entries.items():
        setattr(param, name, value)


def first(made):
    return next(iter(made.state.values()))


# what is done, and whether it is noticed; gradients that are where they were, or elsewhere, are found either way
EDITS = {
    "nothing": (lambda m: None, False),
    "parameter of the same memory": (lambda m: m.params.__setitem__(0, Parameter(m.params[0].detach())), True),
    "parameter elsewhere": (lambda m: replace(m.params[0], data=torch.ones(3, 4)), True),
    "parameter as another view": (lambda m: replace(m.params[3], data=m.params[3].data.T), True),
    "parameter lazily negated": (lambda m: replace(m.params[1], data=negated(torch.ones(5))), True),
    "one parameter less": (lambda m: m.params.pop(), True),
    "one parameter more": (lambda m: m.params.append(Parameter(torch.ones(1))), True),
    "parameters in another order": (lambda m: m.params.reverse(), True),
    "values": (lambda m: [param.data.mul_(2) for param in m.params], False),
    "requires no gradient": (lambda m: m.params[0].requires_grad_(False), False),
    "gradient elsewhere": (lambda m: replace(m.params[0], grad=torch.ones(3, 4)), False),
    "entry elsewhere": (lambda m: first(m).update(b=torch.ones(3, 4)), True),
    "entry moved": (lambda m: replace(first(m)["b"], data=torch.ones(3, 4)), True),
    "entry gone": (lambda m: first(m).pop("b"), True),
    "entry no tensor": (lambda m: first(m).update(b=None), True),
    "number is a tensor": (lambda m: first(m).update(step=torch.ones(())), True),
    "another number": (lambda m: first(m).update(step=2.0), False),
    "another object of an entry": (lambda m: first(m).update(b=first(m)["b"].detach()), False),
    "entry that does not matter": (lambda m: first(m).update(other=torch.ones(1)), False),
    "state that is no dict": (lambda m: m.state.update({m.params[1]: None}), True),
    "state gone": (lambda m: m.state.pop(m.params[1]), True),
    "more state": (lambda m: m.state.update({m.params[3]: {"b": torch.ones(1)}}), True),
    "as much state as parameters": (lambda m: m.state.update({i: {} for i in range(2)}), True),
    "more state than parameters": (lambda m: m.state.update({i: {} for i in range(5)}), True),
}


@every_backend
@pytest.mark.parametrize("edit", EDITS)
def test_what_is_noticed(backend, edit):
    it = made(backend)
    apply, noticed = EDITS[edit]
    # what is replaced must live on, so that nothing new takes its address
    kept = [*it.params, *grads_of(it.params), *first(it).values()]
    apply(it)
    for _ in range(2):
        if noticed:
            assert it.again() is None
        else:
            check(it.again(), grads_of(it.params))
    del kept


PRESENT = {
    "first has none": lambda m: replace(m.params[0], grad=None),
    "last has none": lambda m: replace(m.params[3], grad=None),
    "another has one": lambda m: replace(m.params[2], grad=torch.ones(())),
    "none": lambda m: [replace(param, grad=None) for param in m.params],
}


@every_backend
@pytest.mark.parametrize("edit", PRESENT)
def test_others_have_a_gradient(backend, edit):
    """They are found, and where they are."""
    it = made(backend)
    PRESENT[edit](it)
    for _ in range(2):
        check(it.again(), grads_of(it.params))


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


# of which parameter, the gradient, and whether it goes with it
GRADIENTS = {
    "strides": (3, lambda: torch.ones(4, 4).T, False),
    "expanded": (1, lambda: torch.ones(1).expand(5), False),
    "strides of one element": (4, lambda: torch.ones(2, 1).as_strided((2, 1), (1, 7)), True),
    "shape": (1, lambda: torch.ones(6), False),
    "dimensions": (1, lambda: torch.ones(5, 1), False),
    "dtype": (1, lambda: torch.ones(5, dtype=torch.bfloat16), False),
    "dtype of one size": (1, lambda: torch.ones(5, dtype=torch.int32), False),
    "none": (1, lambda: None, True),
    "negative": (1, lambda: negated(torch.ones(5)), False),
    "parameter": (1, lambda: Parameter(torch.ones(5)), False),
    "class": (1, lambda: torch.ones(5).as_subclass(Tagged), False),
    "of memory of its own": (1, lambda: torch.ones(9)[3:8], True),
}


@every_backend
@pytest.mark.parametrize("other", GRADIENTS)
def test_gradients_that_do_not_match(backend, other):
    """They are found all the same; given or their parameters' own."""
    it = made(backend)
    it.params.append(Parameter(torch.ones(2, 1)))
    look = backend.look_at(it.params, it.state, NAMES)
    place, make, matching = GRADIENTS[other]
    usual = grads_of(it.params)
    odd = [make() if i == place else grad for i, grad in enumerate(usual)]
    for grads, good in [(usual, True), (odd, matching), (tuple(odd), matching), (usual, True)]:
        check(look.again(it.params, grads, it.state), grads, good)


def conjugate(shape):
    return torch.ones(shape, dtype=torch.complex64).conj()


# two tensors of which neither matches the other
LAZY = {
    "negative": (negated(torch.ones(5)), imaginary(torch.ones(5))),
    "negative matrix": (negated(torch.ones(4, 3)).T, imaginary(torch.ones(4, 3)).T),
    "negative element": (negated(torch.ones(1)), imaginary(torch.ones(1))),
    "negative scalar": (negated(torch.ones(())), imaginary(torch.ones(()))),
    "conjugate": (conjugate(3), torch.ones(3, dtype=torch.complex64)),
    "negative conjugate": (torch._neg_view(conjugate(3)), conjugate(3)),
    "negative complex": (torch._neg_view(torch.ones(3, dtype=torch.complex64)), torch.ones(3, dtype=torch.complex64)),
    "8 bits": (torch.ones(5).to(torch.float8_e4m3fn), torch.ones(5).to(torch.float8_e5m2)),
}


@every_backend
@pytest.mark.parametrize("kind", LAZY)
def test_lazy_bits(backend, kind):
    for param, other in (LAZY[kind], LAZY[kind][::-1]):
        look = backend.look_at([param], {}, ())
        for grad, matching in [(other, False), (param.detach(), True)]:
            check(look.again([param], [grad], {}), [grad], matching)


@every_backend
def test_after_something_was_noticed(backend):
    """A look tells what is there, not what happened."""
    it = made(backend)
    param = it.params.pop()
    assert it.again() is None
    it.params.append(param)
    check(it.again(), grads_of(it.params))


@every_backend
def test_nothing(backend):
    look = backend.look_at([], {}, ())
    check(look.again([], None, {}), [])
    assert look.again([Parameter(torch.ones(1))], None, {}) is None
    assert look.again([], [None], {}) is None
    empty = Parameter(torch.ones(8)[8:])
    found = backend.look_at([empty], {}, ()).again([empty], [empty.detach()], {})
    assert found[0] == b"\1"
    assert found[2:] == (bytes(8), True)


@every_backend
def test_the_same_gradient_of_another_parameter(backend):
    """Of other strides: it matches one of them only."""
    params = [Parameter(torch.ones(3, 4)), Parameter(torch.ones(4, 3).T)]
    look = backend.look_at(params, {}, ())
    grad = torch.ones(3, 4)
    for grads, matching in [((grad, None), True), ((None, grad), False), ((grad, None), True)]:
        check(look.again(params, grads, {}), grads, matching)


@every_backend
def test_surroundings_do_not_matter(backend):
    it = made(backend)
    with torch.autocast("cpu"):
        check(it.again(), grads_of(it.params))
    with torch.inference_mode():
        check(it.again(), grads_of(it.params))
        it.params[0].grad = torch.ones(3, 4)
        check(it.again(), grads_of(it.params))


def freed():
    tensor = torch.ones(8)[2:]
    tensor.untyped_storage().resize_(0)
    return tensor


ADDRESSLESS = {
    "sparse": lambda: torch.ones(5).to_sparse(),
    "meta": lambda: torch.ones(5, device="meta"),
    "meta view": lambda: torch.ones(8, device="meta")[3:],
    "freed": freed,
}


@every_backend
@pytest.mark.parametrize("kind", ADDRESSLESS)
def test_what_has_no_address(backend, kind, capfd):
    it = made(backend)
    tensor = ADDRESSLESS[kind]()
    grads = [None, tensor, None, None]
    with pytest.raises(RuntimeError):
        it.look.again(it.params, grads, it.state)
    first(it)["b"] = tensor
    with pytest.raises(RuntimeError):
        it.again()
    with pytest.raises(RuntimeError):
        backend.look_at(it.params, it.state, NAMES)
    with pytest.raises(RuntimeError):
        backend.look_at([tensor], {}, ())
    # a function of torch in C that fails prints an error, in torch 2.11
    assert not capfd.readouterr().err


def test_a_wrapper_and_a_fake_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    with FakeTensorMode():
        fake = torch.ones(5)
    for backend in (native, python):
        it = made(backend)
        for tensor in (TwoTensor(torch.ones(5), torch.ones(5)), fake):
            with pytest.raises(RuntimeError):
                it.look.again(it.params, [None, tensor, None, None], it.state)
            with pytest.raises(RuntimeError):
                backend.look_at([tensor], {}, ())


class Own(Parameter):
    """Says itself what its gradient is."""

    grad = property(lambda self: torch.full_like(self, 7.0))


class Moody(Parameter):
    """Has no gradient to show."""

    @property
    def grad(self):
        raise LookupError("not now")


@every_backend
def test_classes_of_their_own(backend):
    plain = torch.ones(1, requires_grad=True)
    plain.grad = torch.zeros(1)
    params = [plain, Own(torch.ones(3))]
    look = backend.look_at(params, {}, ())
    _, (grad, own), *_ = look.again(params, None, {})
    assert grad is plain.grad
    assert own.tolist() == [7.0] * 3
    moody = Moody(torch.ones(3))
    look = backend.look_at([moody], {}, ())
    with pytest.raises(LookupError, match="not now"):
        look.again([moody], None, {})
    grad = torch.ones(3)
    check(look.again([moody], [grad], {}), [grad])


@every_backend
def test_nothing_is_kept(backend):
    """No reference too many, or too few, whether all is as it was, or not, or cannot be looked at."""
    it = made(backend)
    grads = [None if param.grad is None else param.grad.to_sparse() for param in it.params]
    some = [*it.params, *grads_of(it.params), *it.state.values(), first(it)["b"], it.state, NAMES]
    some = [None, True, *filter(lambda thing: thing is not None, some), *filter(lambda thing: thing is not None, grads)]
    moody = Moody(torch.ones(3))
    unable = backend.look_at([moody], {}, ())
    # garbage that is collected in between may have referred to None and True
    gc.collect()
    counts = list(map(sys.getrefcount, some))
    for _ in range(400):
        it.again()
        assert it.look.again(it.params[:2], None, it.state) is None
        assert it.look.again(it.params, None, {}) is None
        with pytest.raises(RuntimeError):
            it.look.again(it.params, grads, it.state)
        with pytest.raises(LookupError):
            unable.again([moody], None, {})
        with pytest.raises(RuntimeError):
            backend.look_at([*it.params, grads[0]], it.state, NAMES)
        backend.look_at(it.params, it.state, NAMES).again(it.params, it.params, it.state)
    gc.collect()
    # None and True are referred to from everywhere
    after = list(map(sys.getrefcount, some))
    assert after[2:] == counts[2:]
    assert all(abs(a - b) < 200 for a, b in zip(after[:2], counts[:2], strict=True))


@every_backend
def test_no_memory_is_lost(backend):
    resource = pytest.importorskip("resource")
    it = made(backend)
    many = [Parameter(torch.ones(2, 2)) for _ in range(200)]

    def run(times):
        for _ in range(times):
            backend.look_at(many, it.state, NAMES).again(many, many, it.state)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    # the words of a look take 16 KiB
    before = run(50)
    assert run(500) - before < 4096


def test_descriptors():
    memory = torch.ones(8)
    found = python.addresses_of([memory, None, memory[2:], torch.ones(0), Parameter(memory), memory[:3].to_sparse()])
    start = memory.data_ptr()
    assert list(memoryview(found).cast("q")) == [start, 0, start + 8, 0, start, 0]
    assert python.describe(memory) == python.describe(Parameter(torch.zeros(8)))
    assert python.describe(torch.ones(2, 1)) == python.describe(torch.ones(2, 1).as_strided((2, 1), (1, 7)))
    assert python.describe(torch.ones(2, 3)) != python.describe(torch.ones(3, 2).T)
    assert python.describe(memory[::2]) != python.describe(memory[:4])
    assert python.describe(memory) != python.describe(torch.ones(8, device="meta"))
    for sparse in (memory.to_sparse(), memory.view(2, 4).to_sparse()):
        with pytest.raises(RuntimeError, match="sparse"):
            python.describe(sparse)
    assert python.agree(torch.ones(2, 1), (1, 5))
    assert not python.agree(torch.ones(2, 2), (1, 2))


@pytest.fixture
def anew():
    """The C code is loaded anew, and once more after the test."""
    native._compiled.cache_clear()
    yield
    native._compiled.cache_clear()


@in_c
def test_it_is_compiled(anew, capfd):
    assert type(made(native).look) is native._compiled().Look
    assert not capfd.readouterr().err


@in_c
def test_it_compiles_without_warnings(tmp_path):
    source, include = Path(native.__file__).with_name("look.c"), sysconfig.get_paths()["include"]
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O3", "-fPIC", "-c", source, f"-I{include}", "-o", tmp_path / "o"]
    subprocess.run(command, check=True)


@in_c
def test_what_c_refuses():
    it = made(native)
    usual = (it.params, None, it.state)
    for arguments in [(), usual[:1], usual[:2], (*usual, False), (None, None, {}), (it.params, 1, it.state)]:
        with pytest.raises(TypeError):
            it.look.again(*arguments)
    with pytest.raises(TypeError):
        native._compiled().Look((), [], ())
    with pytest.raises(RuntimeError):
        it.look.again(it.params, [None, 1.0, None, None], it.state)
    # another type of mapping may take the place of the state at any time
    assert it.look.again(it.params, None, []) is None


def test_another_mapping():
    it = made(native)
    states = MappingProxyType(it.state)
    look = native.look_at(it.params, states, NAMES)
    assert isinstance(look, python.Look)
    check(look.again(it.params, None, states), grads_of(it.params))


def test_what_c_cannot_describe(monkeypatch):
    """Python has a look where C cannot."""

    class Lost:
        def Look(self, *args):  # noqa: N802
            raise RuntimeError

    monkeypatch.setattr(native, "_compiled", Lost)
    assert isinstance(made(native).look, python.Look)


@in_c
def test_without_a_compiler(monkeypatch, anew):
    monkeypatch.setenv("CC", "/bin/false")
    compiler.cache_clear()
    with pytest.warns(RuntimeWarning, match="C compiler does not run.*headers of Python"):
        it = made(native)
    check(it.again(), grads_of(it.params))
    # once: warnings are errors here
    assert isinstance(made(native).look, python.Look)
    compiler.cache_clear()


def test_without_a_function(monkeypatch, anew):
    """As in torch 2.8: without a warning."""
    monkeypatch.setattr(native, "GETTERS", (*native.GETTERS, "nothing"))
    assert isinstance(made(native).look, python.Look)


@in_c
@pytest.mark.parametrize("offset", [0, 8, 24, -8])
def test_a_wrong_offset(monkeypatch, anew, offset):
    right = native._handle_offset(torch.ones(1))
    monkeypatch.setattr(native, "_handle_offset", lambda tensor: right + 8 if offset == right else offset)
    with pytest.warns(RuntimeWarning, match="where expected"):
        it = made(native)
    assert isinstance(it.look, python.Look)


@in_c
def test_no_offset(monkeypatch, anew):
    monkeypatch.setattr(native, "_handle_offset", lambda tensor: array("Q").index(1))
    with pytest.warns(RuntimeWarning, match="ValueError"):
        assert isinstance(made(native).look, python.Look)


@in_c
@pytest.mark.parametrize("pair", [("sizes", "strides"), ("dtype", "device_type"), ("numel", "dim")])
def test_a_wrong_description(monkeypatch, anew, pair):
    """As if two of torch's functions did what the other does."""
    swap = dict([pair, pair[::-1]])
    monkeypatch.setattr(native, "GETTERS", [swap.get(name, name) for name in native.GETTERS])
    with pytest.warns(RuntimeWarning, match="describes a tensor as"):
        assert isinstance(made(native).look, python.Look)


@in_c
def test_the_first_look_in_a_fake_tensor_mode(anew):
    """It does not run the self-test, which a later look does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    params = [Parameter(torch.ones(3))]
    with FakeTensorMode():
        assert isinstance(native.look_at(params, {}, ()), python.Look)
    assert type(native.look_at(params, {}, ())) is native._compiled().Look
