"""The loss of a minibatch, and its parts."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_LABELS = frozenset({"label", "labels", "target", "targets"})


def check_batch(batch: Any) -> None:
    """Raise ValueError unless `loss_of` accepts a minibatch."""
    if isinstance(batch, Mapping) or (isinstance(batch, (tuple, list)) and len(batch) == 2):
        return
    ids = _alone(batch)
    # a tensor of another dtype is more likely one half of a pair
    if isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        return
    kind = f"a {batch.dtype} tensor" if isinstance(batch, Tensor) else type(batch).__name__
    raise ValueError(
        f"a minibatch must be a pair (inputs, targets), a mapping, or an integer tensor of token ids, not {kind}"
    )


def loss_of(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor], device: torch.device) -> Tensor:
    """Returns the loss of a minibatch, which is moved to `device` first.

    - A pair (inputs, targets): `loss_fn(model(inputs), targets)`.
    - A mapping: `loss_fn(model(**batch), batch)`. Entries named "label", "labels", "target" or "targets" go to the
      model only if its `forward` has a parameter of that name or `**kwargs`.
    - An integer tensor of token ids, or a list or tuple with only this tensor, as from a `TensorDataset` of ids:
      `loss_fn(model(ids), ids)`. `loss_fn` shifts them to get the next tokens.

    Raises:
        ValueError: the minibatch has another type, or the loss is not a scalar or, unless gradients are off, depends on
            no parameter.
        TypeError: `loss_fn` is not a function.
    """
    check_batch(batch)
    if isinstance(loss_fn, type):
        raise TypeError(f"loss_fn={loss_fn!r} must be a function of outputs and targets: write {loss_fn.__name__}()")
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn={loss_fn!r:.80} must be a function of outputs and targets; for a model of transformers that "
            "computes its loss, pass lambda outputs, batch: outputs.loss"
        )
    # autograd cannot save an inference tensor, but it can save a clone
    batch = _changed(lambda x: (x.clone() if x.is_inference() else x).to(device, non_blocking=True), batch)
    if isinstance(batch, Mapping):
        labels = _LABELS & batch.keys()
        withheld = labels - _taken(model, labels) if labels else labels
        loss = loss_fn(model(**{key: value for key, value in batch.items() if key not in withheld}), batch)
    else:
        batch = _alone(batch)
        inputs, targets = (batch, batch) if isinstance(batch, Tensor) else batch
        loss = loss_fn(model(inputs), targets)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"loss_fn returned {kind:.80}: it must return a scalar tensor")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter that requires a gradient: compute it from the output of model"
        )
    return loss


def _alone(batch: Any) -> Any:
    """The only item of a list or tuple; other values are returned unchanged."""
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 1 else batch


def unwrapped(model: Any) -> Any:
    """The model within `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    while (compiled := hasattr(model, "_orig_mod")) or isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        model = model._orig_mod if compiled else model.module
    return model


def _taken(model: Any, names: AbstractSet[str]) -> AbstractSet[str]:
    """Returns the `names` that the model's `forward` accepts as keywords."""
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return names
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} & names


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        yield from chain.from_iterable(map(tensors_in, value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])


def samples(batch: Any) -> int:
    """The most frequent first size of the tensors of a minibatch; 0 without tensors."""
    sizes = Counter(len(tensor) for tensor in tensors_in(batch) if tensor.dim() > 0)
    return max(sizes, key=sizes.__getitem__, default=0)


def part_of(batch: Any, part: slice) -> Any:
    """Some samples of a minibatch; values other than tensors of this first size stay."""
    size = samples(batch)
    return _changed(lambda tensor: tensor[part] if tensor.dim() > 0 and len(tensor) == size else tensor, batch)


def _changed(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies a function to the tensors in nested mappings, which become dicts, and sequences."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(change, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return sequence_like(value, [_changed(change, item) for item in value])
    return value


def sequence_like(example: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Returns items as a list, tuple or named tuple, as the example is."""
    if isinstance(example, list):
        return items
    return type(example)(*items) if hasattr(example, "_fields") else tuple(items)
