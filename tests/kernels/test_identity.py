"""What counts as the same tensors: by C in one call, and by Python one after the other."""

import ctypes
import shutil
from array import array

import pytest
import torch
from lazy import imaginary, negated

from fused_lwlr.kernels import identity as python
from fused_lwlr.kernels import reference
from fused_lwlr.kernels.triton import native

in_c = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(torch._C.__file__), "aoti_torch_get_layout"), reason="this torch lacks a function in C"
)


def tensors():
    return [torch.ones(3, 4), torch.ones(5), torch.ones(()), torch.ones(2, 2, dtype=torch.complex64), torch.ones(1)]


# place, what is there, what comes instead, and whether that is the same but for its address
OTHERS = {
    "values": (1, torch.ones(5), torch.zeros(5), True),
    "requires grad": (1, torch.ones(5), torch.ones(5, requires_grad=True), True),
    "parameter": (1, torch.ones(5), torch.nn.Parameter(torch.ones(5)), True),
    "shape": (0, torch.ones(3, 4), torch.ones(4, 3), False),
    "longer": (1, torch.ones(5), torch.ones(6), False),
    "strides": (0, torch.ones(3, 4), torch.ones(4, 3).T, False),
    "stride": (1, torch.ones(5), torch.ones(10)[::2], False),
    "expanded": (1, torch.ones(5), torch.ones(1).expand(5), False),
    "dimensions": (2, torch.ones(()), torch.ones(1), False),
    "dtype": (1, torch.ones(5), torch.ones(5, dtype=torch.bfloat16), False),
    "dtype of one size": (1, torch.ones(5).half(), torch.ones(5).bfloat16(), False),
    "device": (1, torch.ones(5), torch.ones(5, device="meta"), False),
    "negative": (1, imaginary(torch.ones(5)), negated(torch.ones(5)), False),
    "negative matrix": (0, imaginary(torch.ones(4, 3)).T, negated(torch.ones(4, 3)).T, False),
    "negative element": (4, imaginary(torch.ones(1)), negated(torch.ones(1)), False),
    "negative scalar": (2, imaginary(torch.ones(())), negated(torch.ones(())), False),
    "conjugate": (3, torch.ones(2, 2).to(torch.complex64), torch.ones(2, 2, dtype=torch.complex64).conj(), False),
    "absent": (2, torch.ones(()), None, False),
    "8 bits": (1, torch.ones(5).to(torch.float8_e4m3fn), torch.ones(5).to(torch.float8_e5m2), False),
}


@pytest.fixture(params=["compiled", "all at once", "one by one"])
def identify(request, monkeypatch):
    """In C; in a PyTorch that checks many tensors in one call; and in one that does not."""
    if request.param == "one by one":
        monkeypatch.setattr(python, "_guard", lambda there: None)
    return native.identify if request.param == "compiled" else reference.identify


@in_c
def test_it_is_compiled():
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    assert native._compiled() is not None


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_one_tensor_differs(identify, other, gap):
    place, before, after, same = OTHERS[other]
    rest = tensors() + ([None] if gap else [])
    known, changed = ([new if i == place else t for i, t in enumerate(rest)] for new in (before, after))
    _, traits = identify(known)
    _, others = identify(changed, traits)
    assert (others is traits) is same
    # it goes on to tell
    assert identify(known, traits)[1] is traits
    assert (identify(known, others)[1] is others) is same
    assert identify(changed, others)[1] is others


@pytest.mark.parametrize("count", [3, 6])
def test_another_number_of_tensors(identify, count):
    _, traits = identify(tensors())
    assert identify((tensors() * 2)[:count], traits)[1] is not traits


def test_surroundings_do_not_matter(identify):
    known = tensors()
    before = identify(known)
    with torch.autocast("cpu"):
        assert identify(known, before[1]) == before
    with torch.inference_mode():
        assert identify(known, before[1]) == before
        assert identify([torch.ones(4, 3), *known[1:]], before[1])[1] is not before[1]


def test_nothing(identify):
    none, one = identify([])[1], identify([None])[1]
    assert identify((), none)[1] is none
    assert identify([None], none)[1] is not none
    assert identify([], one)[1] is not one
    assert identify([None], one)[0] == bytes(8)
    assert identify([torch.ones(1)], one)[1] is not one


def test_sparse_tensors_have_none(identify):
    with pytest.raises(RuntimeError, match="sparse"):
        identify([torch.ones(3).to_sparse()])


def test_what_is_no_tensor(identify):
    with pytest.raises(AttributeError):
        identify([1.0])


def test_addresses(identify):
    memory = torch.ones(8)
    found, _ = identify([memory, None, memory[2:], torch.ones(0), torch.nn.Parameter(memory)])
    start = memory.data_ptr()
    assert list(memoryview(found).cast("q")) == [start, 0, start + 8, 0, start]


def test_version_sum():
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    before = native.version_sum(tensors)
    assert before == sum(t._version for t in tensors)
    tensors[0].add_(1)
    torch.autograd.graph.increment_version(tensors)
    assert native.version_sum(tensors) == before + 3


def test_what_c_cannot_describe(monkeypatch):
    """Python has a look where C cannot."""

    class Lost:
        def identify(self, *args):
            raise RuntimeError

        Watch = identify

    monkeypatch.setattr(native, "_compiled", Lost)
    known = tensors()
    addresses, traits = reference.identify(known)
    assert native.identify(known, traits) == (addresses, traits)
    assert isinstance(native.watch(known, {}, ()), python.Watch)


@in_c
def test_without_a_compiler(monkeypatch):
    def missing(*args):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(native, "compile_module_from_src", missing)
    native._compiled.cache_clear()
    try:
        known = tensors()
        with pytest.warns(RuntimeWarning, match="Failed to find C compiler.*headers of Python"):
            addresses, traits = native.identify(known)
        # once: warnings are errors here
        assert reference.identify(known, traits) == (addresses, traits)
        assert native.version_sum(known) == sum(t._version for t in known)
        assert isinstance(native.watch(known, {}, ()), python.Watch)
        rows = [(1, 2.5, 6), (3, 2.5, 4)]
        assert native.pack(rows, (5.5,)) == (array("f", (1, 2.5, 6, 5.5, 3, 2.5, 4, 5.5)).tobytes(), ())
        assert native.pack(rows, (5.5,), (1,)) == (array("f", (1, 0, 6, 5.5, 3, 0, 4, 5.5)).tobytes(), (2.5,))
        assert native.pack(rows, (5.5,), (1, 2)) is None
        assert native.pack([(1, known[1])], ()) is None
    finally:
        native._compiled.cache_clear()
