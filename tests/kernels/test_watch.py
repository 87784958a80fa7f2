"""What a step notices of parameters, gradients and state since the one before: in C, and in Python."""

import sys
from types import SimpleNamespace

import pytest
import torch
from lazy import imaginary, negated
from torch.nn import Parameter

from fused_lwlr.kernels import reference
from fused_lwlr.kernels.triton import native

NAMES = ("b", "step")
every_backend = pytest.mark.parametrize("backend", [native, reference], ids=["compiled", "python"])


def made(backend):
    """Parameters of which one has no gradient, the state of two of them, and a watch."""
    params = [Parameter(torch.ones(shape)) for shape in [(3, 4), (5,), (), (4, 4)]]
    for param in params[:2] + params[3:]:
        param.grad = torch.ones_like(param)
    state = {param: {"b": torch.ones_like(param), "step": 1.0, "other": 0} for param in params[:2]}
    watch = backend.watch(params, state, NAMES)
    return SimpleNamespace(params=params, state=state, watch=watch, look=lambda: watch.look(params, None, state, False))


def addresses(tensors):
    return [t.data_ptr() for t in tensors]


def found(look):
    _, grads, where, _ = look
    return list(grads), None if where is None else list(memoryview(where).cast("q"))


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
    kept = [*it.params, *(param.grad for param in it.params), *first(it).values()]
    apply(it)
    for _ in range(2):
        if noticed:
            assert it.look() is None
        else:
            grads = [param.grad for param in it.params if param.grad is not None]
            assert [id(grad) for grad in found(it.look())[0]] == [id(grad) for grad in grads]
            assert found(it.look())[1] == addresses(grads)
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
    grads = [param.grad for param in it.params if param.grad is not None]
    for _ in range(2):
        look = it.look()
        assert list(look[0]) == [param.grad is not None for param in it.params]
        again, where = found(look)
        assert [id(grad) for grad in again] == [id(grad) for grad in grads]
        assert where == addresses(grads)


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
    "negative": (1, lambda: negated(torch.ones(5)), False),
    "parameter": (1, lambda: Parameter(torch.ones(5)), False),
    "class": (1, lambda: torch.ones(5).as_subclass(Tagged), False),
    "of memory of its own": (1, lambda: torch.ones(9)[3:8], True),
}


@every_backend
@pytest.mark.parametrize("other", GRADIENTS)
def test_gradients_that_do_not_go_with_their_parameters(backend, other):
    """They are found, but whoever takes them has to look for himself; given or their parameters' own."""
    it = made(backend)
    it.params.append(Parameter(torch.ones(2, 1)))
    watch = backend.watch(it.params, it.state, NAMES)
    place, make, goes = GRADIENTS[other]
    usual = [None if param.grad is None else param.grad for param in it.params]
    odd = [make() if i == place else grad for i, grad in enumerate(usual)]
    for grads, good in [(usual, True), (odd, goes), (odd, goes), (usual, True), (odd, goes)]:
        there = [grad for grad in grads if grad is not None]
        again, where = found(watch.look(it.params, grads, it.state, False))
        assert all(a is b for a, b in zip(again, there, strict=True))
        assert where == (addresses(there) if good else None)


@every_backend
def test_a_negative_parameter_and_its_gradient(backend):
    param = Parameter(negated(torch.ones(5)))
    watch = backend.watch([param], {}, ())
    for grad, goes in [(imaginary(torch.ones(5)), False), (negated(torch.ones(5)), True)]:
        assert found(watch.look([param], [grad], {}, False))[1] == (addresses([grad]) if goes else None)


@every_backend
def test_versions_of_what_has_a_gradient(backend):
    it = made(backend)
    for param, times in zip(it.params, (1, 2, 10, 4), strict=True):
        for _ in range(times):
            param.detach().add_(1)
    assert it.watch.look(it.params, None, it.state, True)[3] == sum(p._version for p in it.params if p.grad is not None)
    assert it.look()[3] is None


@every_backend
def test_after_something_was_noticed(backend):
    """A watch says what is there, not what happened."""
    it = made(backend)
    param = it.params.pop()
    assert it.look() is None
    it.params.append(param)
    assert found(it.look())[1] == addresses([param.grad for param in it.params if param.grad is not None])


@every_backend
def test_nothing(backend):
    watch = backend.watch([], {}, ())
    watch.look([], None, {}, False)
    assert found(watch.look([], None, {}, False)) == ([], [])
    assert watch.look([Parameter(torch.ones(1))], None, {}, False) is None


@every_backend
def test_the_same_gradient_of_another_parameter(backend):
    """Of other strides: it does not go with that one."""
    params = [Parameter(torch.ones(3, 4)), Parameter(torch.ones(4, 3).T)]
    watch = backend.watch(params, {}, ())
    grad = torch.ones(3, 4)
    for grads, where in [((grad, None), addresses([grad])), ((None, grad), None), ((grad, None), addresses([grad]))]:
        assert found(watch.look(params, grads, {}, False))[1] == where


@every_backend
def test_what_has_no_address(backend, capfd):
    it = made(backend)
    grads = [None if param.grad is None else param.grad.to_sparse() for param in it.params]
    with pytest.raises(RuntimeError):
        it.watch.look(it.params, grads, it.state, False)
    grads = [None if param.grad is None else param.grad.to("meta") for param in it.params]
    with pytest.raises(RuntimeError):
        it.watch.look(it.params, grads, it.state, False)
    first(it)["b"] = first(it)["b"].to_sparse()
    with pytest.raises(RuntimeError):
        it.look()
    with pytest.raises(RuntimeError):
        backend.watch(it.params, it.state, NAMES)
    # torch 2.11 tells there of each question that it could not answer
    assert not capfd.readouterr().err


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
    watch = backend.watch(params, {}, ())
    _, (grad, own), *_ = watch.look(params, None, {}, False)
    assert grad is plain.grad
    assert own.tolist() == [7.0] * 3
    moody = Moody(torch.ones(3))
    watch = backend.watch([moody], {}, ())
    with pytest.raises(LookupError, match="not now"):
        watch.look([moody], None, {}, False)
    assert len(watch.look([moody], [torch.ones(3)], {}, False)[1]) == 1


@every_backend
def test_nothing_is_kept(backend):
    """No reference too many, or too few, whether all is as it was, or not, or cannot be looked at."""
    it = made(backend)
    grads = [None if param.grad is None else param.grad.to_sparse() for param in it.params]
    some = [*it.params, *(param.grad for param in it.params), *it.state.values(), first(it)["b"], it.state]
    some = [None, *filter(lambda thing: thing is not None, some)]
    counts = list(map(sys.getrefcount, some))
    for _ in range(100):
        it.look()
        assert it.watch.look(it.params[:2], None, it.state, False) is None
        assert it.watch.look(it.params, None, {}, False) is None
        with pytest.raises(RuntimeError):
            it.watch.look(it.params, grads, it.state, False)
        backend.watch(it.params, it.state, NAMES).look(it.params, it.params, it.state, False)
    # None is referred to from everywhere
    after = list(map(sys.getrefcount, some))
    assert after[1:] == counts[1:]
    assert abs(after[0] - counts[0]) < 50


def test_what_c_refuses():
    if native._compiled() is None:
        pytest.skip("needs functions in C that torch 2.8 lacks, and a C compiler")
    it = made(native)
    for arguments in [(), (it.params,), (it.params, None), (None, None, {}), (it.params, 1, it.state)]:
        for more in ((), (False,)):
            with pytest.raises(TypeError):
                it.watch.look(*arguments, *more)
    with pytest.raises(TypeError):
        native._compiled().Watch((), [], ())
    # another type of mapping may take the place of the state at any time
    assert it.watch.look(it.params, None, [], False) is None
