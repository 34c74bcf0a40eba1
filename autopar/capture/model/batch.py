"""Batches: from what ``collate`` gives to named tensors, to rows of them, and into the model's call; and reading data.

A sample is a dict, a tuple or a tensor. Keys of a dict that are parameters of ``forward`` are its inputs (all keys, if
it takes ``**keywords`` only). A tuple's last item is the target where there is a loss; the others are the positional
inputs. The loss is given the whole batch. A dict's values may be dicts or tuples of tensors in turn.

Every tensor of a batch has the samples as its first dimension. Other sizes are fixed, so ``collate`` pads.

A model that a script holds already, with its batch and functions, becomes what a model file would give.

Every rank, or loader, has a dataset of its own. A sample is the same however often, and in whichever order, samples are
read: what one gives may depend on its index and on the default generators, which are seeded alike wherever it is read
(``docs/howto/verify.md``), and on nothing that was read before. ``dataset()`` and ``collate`` may cache. A few samples
are read twice, and once more from another ``dataset()``, in other orders and seeded alike; if they differ,
``dataset()[i]`` or ``collate()`` is refused.

``collate`` is given the samples of a micro-batch. So it may pad, sort and draw, but one that weights, centres or mixes
samples by the others of their batch is refused: with ``whole_batches = True`` it is given those of a mini-batch.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from autopar.capture.model.hooks import HOOKS, LOSS, a, check_hook, unlike
from autopar.capture.model.python_state import contents, roots_of, tensors_reached
from autopar.capture.model.sizes import check_sizes, tensors_by_path
from autopar.capture.model.source import UserModel, check_shapes
from autopar.capture.model.state import preserve_generators
from autopar.capture.model.terms import LOG, output_names
from autopar.errors import ModelError


def named_tensors(batch: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch in a fixed order, named by their place in it.

    >>> list(named_tensors({"x": torch.zeros(2, 3), "y": torch.zeros(2)}))
    ['batch.x', 'batch.y']
    >>> list(named_tensors([torch.zeros(2, 3), torch.zeros(2)]))
    ['batch.0', 'batch.1']

    Raises:
        ModelError: something in the batch is no tensor, or the tensors differ in their first (batch) dimension.
    """
    named = dict(_leaves(batch, "batch"))
    if not named:
        raise ModelError("the batch that collate() made holds no tensors")
    rows = {name: tensor.shape[0] for name, tensor in named.items()}
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise ModelError(
            f"the batch's tensors differ in their first dimension ({sizes}); it must be the samples': "
            "give every tensor a row for each sample (expand what is one for all), or keep it in the model"
        )
    return named


def _leaves(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, PackedSequence):
        raise ModelError(
            f"{name} is a PackedSequence, whose rows are no samples; let collate() give padded tensors and a mask of "
            "what is padded, and let the model leave that out"
        )
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise ModelError(f"{name} has no dimensions; the first dimension of every tensor must be the samples'")
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ModelError(f"{name} has the key {key!r}; keys of a batch must be strings")
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    else:
        raise ModelError(f"{name} is {a(value)}; {_instead_of(value)}")


def _instead_of(value: object) -> str:
    if value is None:
        return (
            "leave it out of the batch, so that forward's default stands, or give a tensor with a row for each sample"
        )
    if isinstance(value, (bool, int, float, str)):
        return (
            "only tensors with a row for each sample come along: leave it out of the batch and set it in the model, or "
            "let collate() make a tensor of it (torch.full((len(samples),), value))"
        )
    return "give a collate(samples) that makes tensors of it"


def rebuild(template: object, tensors: Mapping[str, torch.Tensor], name: str = "batch") -> object:
    """Return a batch of the template's structure that holds the named tensors; ``name`` is that of the whole."""
    if isinstance(template, Mapping):
        return {key: rebuild(item, tensors, f"{name}.{key}") for key, item in template.items()}
    if isinstance(template, (tuple, list)):
        items: Any = [rebuild(item, tensors, f"{name}.{index}") for index, item in enumerate(template)]
        if hasattr(template, "_fields"):
            return type(template)(*items)
        return items if isinstance(template, list) else tuple(items)
    return tensors[name]


def row_count(tensors: Mapping[str, torch.Tensor]) -> int:
    return int(next(iter(tensors.values())).shape[0])


def slice_rows(tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return samples ``start`` to ``stop`` of every tensor, as views."""
    return {name: tensor[start:stop] for name, tensor in tensors.items()}


def loss_outputs(value: object, loss: Callable[..., object] | None) -> dict[str, torch.Tensor]:
    """Return a loss's outputs, as :mod:`autopar.capture.model.terms` names them.

    Args:
        value: what ``loss`` returned, or the output of a model that has none.
        loss: or none.

    Raises:
        ModelError: it is neither a mean, nor a sum and a count, nor a mapping of such.
    """
    if loss is not None and isinstance(value, Mapping):
        return _named_terms(value, loss)
    if loss is not None and isinstance(value, (tuple, list)) and len(value) == 2:
        total, count = value
        if not isinstance(count, torch.Tensor):
            count = torch.full((), count)
        return {
            "loss_sum": _scalar(total, loss, "(sum, count) whose sum"),
            "loss_count": _scalar(count, loss, "a count that"),
        }
    if loss is None and isinstance(value, Mapping) and "loss" in value:
        value = value["loss"]
    elif loss is None and not isinstance(value, torch.Tensor) and hasattr(value, "loss"):
        value = value.loss
    if not isinstance(value, torch.Tensor):
        wanted = (
            f"be a scalar or carry .loss, {_OR_LOSS}"
            if loss is None
            else "return a scalar tensor, (sum, count), or these by name"
        )
        hint = "; write `return` before its last expression" if loss is not None and value is None else ""
        raise ModelError(f"{_source_of(loss)} returned {a(value)}; it must {wanted}{hint}")
    return {"loss": _scalar(value, loss, "a tensor that")}


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def _named_terms(value: Mapping[Any, Any], loss: Callable[..., object]) -> dict[str, torch.Tensor]:
    """Return the outputs of a mapping of terms, and of figures under ``log``."""
    logged = value.get(LOG, {})
    if not isinstance(logged, Mapping) or not value.keys() - {LOG}:
        raise ModelError(
            f"{_source_of(loss)} returned a mapping without a term, or with something else than a mapping under "
            f"{LOG!r}; it must name means or (sum, count) pairs, and figures under {LOG!r}"
        )
    found: dict[str, torch.Tensor] = {}
    own = [(name, each, False) for name, each in value.items() if name != LOG]
    for name, each, is_logged in [*own, *((name, each, True) for name, each in logged.items())]:
        if not isinstance(name, str) or not name or ":" in name:
            raise ModelError(f"{_source_of(loss)} returned a term {name!r}; names must be texts without a colon")
        counted = isinstance(each, (tuple, list)) and len(each) == 2
        values = each if counted else (each,)
        # Counts, and figures, may be numbers.
        tensors = [torch.full((), each) if isinstance(each, _NUMBERS) else each for each in values]  # type: ignore[arg-type]
        scalars = [_scalar(each, loss, f"a term {name!r} that") for each in tensors]
        found.update(zip(output_names(name, counted=counted, logged=is_logged), scalars, strict=True))
        if not is_logged and torch.is_grad_enabled() and not scalars[0].requires_grad:
            raise ModelError(
                f"{_source_of(loss)} returned a term {name!r} without a gradient; a figure that is only logged belongs "
                f"under {LOG!r}: return {{..., {LOG!r}: {{{name!r}: ...}}}}"
            )
    return found


def _scalar(value: object, loss: Callable[..., object] | None, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ModelError(f"{_source_of(loss)} returned {what} is {a(value)}; it must be a scalar tensor")
    if value.dim() != 0:
        shape, hint = tuple(value.shape), f", {_OR_LOSS}" if loss is None else ""
        raise ModelError(f"{_source_of(loss)} returned {what} has shape {shape}; it must be a scalar{hint}")
    return value


def _source_of(loss: Callable[..., object] | None) -> str:
    """Return what errors call the source of a loss: the model, or ``loss()`` with its file and line."""
    if loss is None:
        return "the model"
    place = _place(loss)
    return "loss()" if place is None else f"{place}: loss()"


_OR_LOSS = f"or define loss(output, batch): write {LOSS} into the model file"


def named_outputs(value: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's output by path, such as ``logits`` or ``hidden.0``; a lone one is ``output``."""
    return {path or "output": tensor for path, tensor in tensors_by_path(value, "").items()}


class StepModule(nn.Module):
    """A model with its loss: from the tensors of a batch, in order, to the loss outputs.

    A dict's keys that are parameters of ``forward`` are its inputs; a tuple's last item is the target where there is
    a loss, the others are the positional inputs; a tensor is the only input. The loss is given the whole batch.
    """

    def __init__(self, model: nn.Module, template: object, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        # In a namespace nn.Module does not see a loss that is a module, nor does export copy containers.
        self.template = SimpleNamespace(value=template)
        self.loss = SimpleNamespace(value=loss)
        self.replaced_tensors = SimpleNamespace(value=[])
        """Of the last forward: paths and tensors that Python state held before it, and no longer does."""
        self.outputs = SimpleNamespace(value=("loss",))
        """Names of what the last forward gave."""
        self.names = tuple(named_tensors(template))
        self.roots = SimpleNamespace(value=roots_of(model, loss))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = rebuild(self.template.value, dict(zip(self.names, tensors, strict=True)))
        positional, named = model_arguments(self.model, batch, self.loss.value is not None)
        before = tensors_reached(self.roots.value)
        output = self.model(*positional, **named)
        outputs = self.results(output, batch)
        self.outputs.value = tuple(outputs)
        after = {id(tensor) for _, tensor in tensors_reached(self.roots.value)}
        self.replaced_tensors.value = [(str(path), tensor) for path, tensor in before if id(tensor) not in after]
        return tuple(outputs.values())

    def results(self, output: object, batch: object) -> dict[str, torch.Tensor]:
        """Return what is given for the model's output, by name."""
        loss = self.loss.value
        return loss_outputs(loss_of(loss, output, batch) if loss else output, loss)


def loss_of(loss: Callable[..., Any], output: object, batch: object) -> object:
    """Return what a loss makes of a batch; where it fails as if it were given something else, note what it is given."""
    try:
        return loss(output, batch)
    except (TypeError, AttributeError) as error:
        if not isinstance(batch, torch.Tensor):
            error.add_note(_describe_batch(batch))
        raise


def _describe_batch(batch: object) -> str:
    if isinstance(batch, Mapping):
        keys = ", ".join(map(str, batch))
        return f"loss(output, batch) is given the whole batch, a dict of {keys}; take what it needs"
    last = len(batch) - 1 if isinstance(batch, (tuple, list)) else -1
    written = LOSS.replace("[1]", f"[{last}]")
    return f"loss(output, batch) is given the whole batch; its target is batch[{last}]: {written}"


def model_arguments(model: nn.Module, batch: object, has_loss: bool) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the positional and named arguments of the model's call for a batch; ``forward(**all)`` is given all keys.

    Raises:
        ModelError: no key of a dict is a parameter of ``forward``, or a tuple has nothing but a target.
    """
    if isinstance(batch, Mapping):
        parameters = inspect.signature(model.forward).parameters.values()
        accepted = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
        named = {key: value for key, value in batch.items() if key in accepted}
        if not accepted and any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            named = dict(batch)
        if not named:
            raise ModelError(
                f"no key of the batch ({', '.join(batch)}) is a parameter of forward({', '.join(accepted)})"
            )
        if wrong := unlike(model, (), named):
            raise ModelError(
                f"{_place_of(model)}: forward({', '.join(accepted)}): {wrong}, and the batch has the keys "
                f"{', '.join(batch)}; let dataset() or collate() give it, or give the parameter a default"
            )
        return (), named
    if isinstance(batch, (tuple, list)):
        if has_loss and len(batch) < 2:
            raise ModelError("a tuple sample has inputs and, last, the target; this one has a single item")
        inputs = batch[:-1] if has_loss else batch
        if wrong := unlike(model, inputs):
            raise ModelError(f"{_place_of(model)}: {_describe_mismatch(model, batch, wrong, has_loss)}")
        return inputs, {}
    return (batch,), {}


def _describe_mismatch(model: nn.Module, batch: Sequence[Any], wrong: str, has_loss: bool) -> str:
    """Say why a tuple's items are not what ``forward`` takes, and what to write."""
    taken = f"forward{inspect.signature(model.forward)} is given"
    if has_loss:
        return (
            f"{taken} all {len(batch)} items of a sample but the last, the target: {wrong}; let dataset() give as many "
            "inputs before the target as forward takes"
        )
    remedy = "let dataset() give as many items as forward takes"
    if not unlike(model, batch[:-1]):
        remedy = f"if the last one is the target, write {LOSS} into the model file"
    return f"there is no loss(), so {taken} all {len(batch)} items of a sample: {wrong}; {remedy}"


def _place_of(model: nn.Module) -> str:
    """Return where a model's forward is written, or the model's name where its forward is torch's own."""
    own = not type(model).__module__.startswith("torch.nn.")
    return (_place(model.forward) if own else None) or type(model).__name__


def _place(function: Callable[..., object]) -> str | None:
    """Return the file and line of a function; None of one that Python did not compile."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def given_model(model: nn.Module, batch: object, **functions: Callable[..., Any] | None) -> UserModel:
    """Describe a model like a model file would: its data set are the rows of ``batch``.

    Args:
        model: the module; it is what ``build`` returns, always.
        batch: a mini-batch as a data loader gives it.
        functions: ``loss``, ``optimizer``, ``scheduler`` and ``layers``, those that are not None.

    Raises:
        ModelError: the batch holds something else than tensors, or tensors of different lengths; or a function cannot
            be called as it will be.
    """
    check_module(model)
    check_shapes(model, type(model).__name__)
    tensors = named_tensors(batch)

    def collate(rows: Sequence[int]) -> object:
        return rebuild(batch, {name: tensor[torch.tensor(rows)] for name, tensor in tensors.items()})

    path = Path(type(model).__name__)
    given = {
        name: check_hook(path, b"", name, function, HOOKS[name])
        for name, function in functions.items()
        if function is not None
    }
    data: dict[str, Callable[..., Any]] = {"dataset": lambda: range(row_count(tensors)), "collate": collate}
    functions_and_data = {**given, **data}
    return UserModel(path.name, path, structure_of(model), lambda: model, functions_and_data, keeps_modes=True)


def check_module(model: object) -> None:
    """Refuse what is not a model.

    Raises:
        ModelError: it is something else; says what to pass.
    """
    if isinstance(model, nn.Module):
        return
    built = f": pass {model.__name__}(...)" if callable(model) and hasattr(model, "__name__") else ""
    raise ModelError(f"model is {a(model)}, where a torch.nn.Module is needed{built}")


def structure_of(model: nn.Module) -> str:
    """Return a hash of a model's modules and of the shapes and types of what they hold, its values apart."""
    lines = [f"{name} {type(module).__qualname__} {module.extra_repr()}" for name, module in model.named_modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines += [f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}" for name, value in tensors]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def seed_data(*parts: object) -> None:
    """Seed what data sets draw from: the default generators of Python, NumPy and torch's CPU.

    ``parts``, joined by ``/``, say what is drawn for. Ranks that load the same sample must draw the same for it, or
    inputs on one stage would not be those of the targets on another.

    >>> seed_data(0, "sample", 0, 17)
    >>> first = random.random(), float(np.random.rand()), float(torch.rand(()))
    >>> seed_data(0, "sample", 0, 17)
    >>> first == (random.random(), float(np.random.rand()), float(torch.rand(())))
    True
    """
    number = number_of("/".join(map(str, parts)))
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


def number_of(text: str) -> int:
    """Return the first 8 bytes, big-endian, of a text's SHA-256, without the highest bit."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


_SAMPLES = 4
_REMEDY = "seeded alike; every rank reads for itself, so it must depend on {} and the default generators only"


def check_reading(user: UserModel, seed: int, *, accept_mixing: bool = False) -> None:
    """Read a few samples twice, and once more from another ``dataset()``, in other orders, all seeded as in training.

    Raises:
        ModelError: samples or batches differ; names ``dataset()``, its item, or ``collate()``. Or ``collate()`` mixes
            samples of a micro-batch, unless ``accept_mixing``.
    """
    with preserve_generators(torch.device("cpu")):
        seed_data(seed, "dataset")
        dataset = user.dataset()
        indices = list(range(min(_SAMPLES, user.sample_count(dataset))))
        try:
            samples, batch = _read(user, dataset, indices, seed)
        except ModelError:
            # Samples of several sizes cannot be stacked.
            _check_sizes(user, dataset, seed)
            raise
        again = _read(user, dataset, indices[::-1], seed)
        seed_data(seed, "dataset")
        anew = _read(user, user.dataset(), indices[1:] + indices[:1], seed)
    file = user.data or user.path
    for what, (others, other) in (("", again), (" of dataset() called again", anew)):
        for index in indices:
            if samples[index] != others[index]:
                remedy = _REMEDY.format("its index")
                raise ModelError(
                    f"{file}: dataset()[{index}]{what} gives another sample when it is read again, {remedy}"
                )
        if batch != other:
            remedy = _REMEDY.format("its samples")
            raise ModelError(f"{file}: collate() makes another batch of the same samples, {remedy}")
    with preserve_generators(torch.device("cpu")):
        _check_sizes(user, dataset, seed)
        if not accept_mixing and _mixes(user, dataset, seed):
            raise ModelError(f"{file}: {_MIXING}")


def _read(user: UserModel, dataset: object, order: Sequence[int], seed: int) -> tuple[dict[int, object], object]:
    """Return the content of samples, and of a batch of them in the order of their indices."""
    samples = {index: _sample(user, dataset, index, seed) for index in order}
    found: dict[int, object] = {index: contents(sample) for index, sample in samples.items()}
    return found, contents(_collate(user, seed, [samples[index] for index in sorted(samples)]))


def _check_sizes(user: UserModel, dataset: Any, seed: int) -> None:  # noqa: ANN401
    collate = partial(_collate, user, seed) if user.collates else None
    read = partial(_sample, user, dataset, seed=seed)
    check_sizes(str(user.data or user.path), user.sample_count(dataset), read, collate)


def _collate(user: UserModel, seed: int, samples: Sequence[object], trial: int = 0) -> object:
    seed_data(seed, "collate", 0, trial)
    return user.collate(list(samples))


def _sample(user: UserModel, dataset: Any, index: int, seed: int) -> object:  # noqa: ANN401
    seed_data(seed, "sample", 0, index)
    return user.sample(dataset, index)


MIXED, CANDIDATES, TRIALS = 8, 64, 4
"""Samples of a batch that is looked at for mixing, others that may stand in for them, and batches."""
_MIXING = (
    "what collate() makes of a sample depends on the others of its batch (weights by their classes, centring, mixup), "
    "and collate() is given a micro-batch; write `whole_batches = True` into the file, and mini-batches are collated "
    "whole; or accept that each is mixed by itself: `accept_loss=True`"
)


def _mixes(user: UserModel, dataset: Any, seed: int) -> bool:  # noqa: ANN401
    """Tell whether what ``collate`` makes of a batch's first sample changes with the other samples.

    Others are replaced by samples of equal sizes, seeded alike, so that padding is the same, and what is drawn for the
    first sample. A row that is in both batches, wherever, is its.
    """
    count = user.sample_count(dataset)
    size = min(MIXED, count // 2)
    if not user.collates or user.whole_batches or size < 2:
        return False

    own = [_sample(user, dataset, index, seed) for index in range(size)]
    chance = random.Random(seed)
    others: dict[object, list[object]] = {}
    for index in chance.sample(range(size, count), min(CANDIDATES, count - size)):
        others.setdefault(_form(found := _sample(user, dataset, index, seed)), []).append(found)

    def rows(samples: list[object], trial: int) -> tuple[object, set[object]]:
        batch = _collate(user, seed, samples, trial)
        try:
            tensors = named_tensors(batch)
        except ModelError:
            # What is wrong with it is said where it is used.
            return None, set()
        sizes = [(name, each.shape, each.dtype) for name, each in tensors.items()]
        return sizes, {_row(tensors, at) for at in range(row_count(tensors))}

    for trial in range(TRIALS):
        replaced = [own[0], *(chance.choice(others.get(_form(each)) or [each]) for each in own[1:])]
        (sizes, before), (other_sizes, after) = rows(own, trial), rows(replaced, trial)
        if sizes is not None and sizes == other_sizes and not before & after:
            return True
    return False


def _form(value: Any) -> object:  # noqa: ANN401
    """Return the sizes of a sample, as far as padding may depend on them."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return tuple((key, _form(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return type(value), len(value) if isinstance(value, (str, bytes)) else None


def _row(tensors: Mapping[str, torch.Tensor], at: int) -> object:
    """Return the bits of one row of all tensors."""
    rows = (tensor.detach()[at].contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values())
    return tuple(row.numpy().tobytes() for row in rows)
