"""The kinds of minibatches that every method takes: pairs, mappings, and tensors of token ids."""

import re
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fused_lwlr import calibrate, coordinate_check, gradinit_, metainit_
from fused_lwlr.methods.elr import scale_invariant
from fused_lwlr.methods.minibatches import loss_of

VOCABULARY, WIDTH = 11, 6


class Language(nn.Module):
    """Logits of the next token: ids [samples, length] -> [samples, length, vocabulary]."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        return self.head(self.norm(self.hidden(self.wte(input_ids)).tanh()))


def next_token(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ids(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (4, 5), generator=generator) for _ in range(count)]


def named(labels):
    """Mappings whose labels have this name, which `forward` does not take."""
    return lambda x: {"input_ids": x, labels: x}, lambda logits, batch: next_token(logits, batch[labels])


KINDS = {
    "pair": (lambda x: (x, x), next_token),
    "tensor": (lambda x: x, next_token),
    "list": (lambda x: [x], next_token),  # as a DataLoader makes it of TensorDataset(ids)
    "tuple": (lambda x: (x,), next_token),
    "int32": (lambda x: x.int(), lambda logits, x: next_token(logits, x.long())),
    **{labels: named(labels) for labels in ("label", "labels", "target", "targets")},
}
METHODS = {
    "calibrate": lambda model, batches, loss_fn: dict(calibrate(model, batches, loss_fn)),
    "gradinit_": lambda model, batches, loss_fn: gradinit_(model, batches, loss_fn, lr=0.1, steps=2, gamma=0.5),
    "metainit_": lambda model, batches, loss_fn: metainit_(model, batches, loss_fn, steps=2),
    "scale_invariant": lambda model, batches, loss_fn: scale_invariant(model, batches[0], loss_fn).cosines,
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_every_kind(method):
    results = []
    for make, loss_fn in KINDS.values():
        torch.manual_seed(0)
        results.append(METHODS[method](Language(), [make(x) for x in ids(3)], loss_fn))
    assert all(result == results[0] for result in results)


def checked(model, batches, loss_fn):
    def descent(model):
        return torch.optim.SGD(model.parameters(), 0.1)

    return coordinate_check(lambda width: Language(), [1, 2], descent, batches, loss_fn, steps=2).scale.tolist()


@pytest.mark.parametrize("method", [*METHODS, "coordinate_check"])
def test_inference_mode_is_left_for_gradients(method):
    call, results = {**METHODS, "coordinate_check": checked}[method], []
    for inference in (False, True):
        torch.manual_seed(0)
        model = Language()
        with torch.inference_mode(inference):
            results.append(call(model, ids(3), next_token))
            assert torch.is_inference_mode_enabled() == inference
    assert results[0] == results[1]


def made_for_inference():
    with torch.inference_mode():
        return Language()


def expanded():
    model = Language()
    model.hidden.bias = nn.Parameter(torch.zeros(1).expand(WIDTH))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (made_for_inference, "the parameter 'wte.weight' is an inference tensor: clone() it"),
        (expanded, "the parameter 'hidden.bias' is expanded: clone() it"),
        (lambda: Language().to("meta"), "the parameter 'wte.weight' is on the meta device: give it values"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_models_without_values_are_refused(method, make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        METHODS[method](make(), ids(3), next_token)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.5, "loss_fn returned 1.5: it must return a scalar tensor"),
        (None, "loss_fn returned None: it must return a scalar tensor"),
        (torch.ones(2), "loss_fn returned a tensor of shape (2,): it must return a scalar tensor"),
        (torch.ones(()), "the loss depends on no parameter that requires a gradient: compute it from the output of"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_other_losses_are_refused(method, loss, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        METHODS[method](Language(), ids(3), lambda logits, x: loss)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_is_no_function_is_refused(method):
    with pytest.raises(TypeError, match=r"loss_fn=None must be a function .* lambda outputs, batch: outputs.loss$"):
        METHODS[method](Language(), ids(3), None)
    with pytest.raises(TypeError, match=r"loss_fn=<class .*> must be a function .*: write CrossEntropyLoss\(\)$"):
        METHODS[method](Language(), ids(3), nn.CrossEntropyLoss)


@pytest.mark.parametrize("method", METHODS)
def test_arguments_in_another_order_are_refused(method):
    for model, kind in ((ids(3), "list"), (next_token, "function"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"^model must be a torch.nn.Module, not {kind}$"):
            METHODS[method](model, ids(3), next_token)
    if method != "scale_invariant":
        with pytest.raises(TypeError, match=r"^batches=<function .* must be a list of minibatches"):
            METHODS[method](Language(), next_token, ids(3))


class TwoInputs(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize("make", [lambda *two: two, lambda *two: list(two), TwoInputs])
@pytest.mark.parametrize("method", METHODS)
def test_sequences_of_inputs_keep_their_type(method, make):
    seen = set()

    class Sum(Language):
        def forward(self, inputs):
            seen.add(type(inputs))
            return sum(super(Sum, self).forward(one) for one in inputs)

    torch.manual_seed(0)
    METHODS[method](Sum(), [(make(x, x.flip(0)), x) for x in ids(3)], next_token)
    assert seen == {type(make(1, 2))}


class Recorded(nn.Module):
    """Notes the names that forward was called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def note(self, **given):
        self.given = set(given)
        return self.weight.sum()


class Inputs(Recorded):
    def forward(self, x):
        return self.note(x=x)


class WithLabels(Recorded):
    def forward(self, x, labels=None):
        return self.note(x=x, labels=labels)


class Anything(Recorded):
    def forward(self, x, **rest):
        return self.note(x=x, **rest)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("model", "taken", "wrap"),
    [
        (Inputs, {"x"}, lambda model: model),
        pytest.param(Inputs, {"x"}, lambda model: torch.compile(model, backend="eager"), marks=pytest.mark.long),
        pytest.param(
            Inputs,
            {"x"},
            lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
            marks=pytest.mark.long,
        ),
        (Inputs, {"x"}, DistributedDataParallel),
        (Inputs, {"x"}, nn.DataParallel),
        (WithLabels, {"x", "labels"}, lambda model: model),
        (Anything, {"x", "labels", "targets"}, lambda model: model),
    ],
)
def test_labels_go_to_a_forward_that_takes_them(model, taken, wrap):
    """The loss function has the whole mapping in every case."""
    inner = model()
    batch = {"x": torch.ones(2), "labels": torch.zeros(2)} | ({"targets": torch.ones(1)} if "targets" in taken else {})
    seen = []
    loss_of(wrap(inner), batch, lambda output, batch: seen.append(set(batch)) or output, torch.device("cpu"))
    assert inner.given == taken
    assert seen == [set(batch)]


def test_other_entries_are_not_dropped():
    """A misspelt entry raises an error of the model instead of being ignored."""
    with pytest.raises(TypeError, match="attention_msk"):
        loss_of(Inputs(), {"x": 1, "attention_msk": 2}, lambda output, _: output, torch.device("cpu"))


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (torch.randn(4, 3), "a torch.float32 tensor"), (torch.ones(4, dtype=torch.bool), "a torch.bool tensor"),
        ((torch.ones(4),) * 3, "tuple"), ([torch.ones(4)], "list"), ("text", "str"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused(batch, kind):
    message = rf"must be a pair \(inputs, targets\), a mapping, or an integer tensor of token ids, not {kind}"
    for call in (
        lambda: calibrate(Language(), [batch], next_token),
        lambda: scale_invariant(Language(), batch, next_token),
        lambda: gradinit_(Language(), [batch] * 3, next_token, lr=0.1, steps=1),
        lambda: metainit_(Language(), [batch], next_token),
    ):
        with pytest.raises(ValueError, match=message):
            call()
