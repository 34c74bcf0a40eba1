"""Losses: whether training depends on how a mini-batch is divided, and what to write so that it does not.

A mini-batch's loss must be that of its parts, weighted by their samples or counts; micro-batches and shares are such
parts. A mean over labelled tokens is not, where samples have unevenly many: return its sum and their number. Neither is
a loss that compares samples with one another.

``autopar profile`` compares loss and gradients of six samples with those of one, two and three of them; of a model that
takes long for a sample, of shorter samples (``shortening.py``), or the losses alone. Samples are picked that have
unevenly much padding; where the loss leaves out a label other than torch's own -100 (``ignore_index=0``), some samples
get more of it. Models of more than 16 million parameters compare losses of three samples, without gradients. A loss
that does not add up is refused with both remedies: to return a sum and a count, and, of a loss that compares samples
(contrastive losses, a router's balance), what is exact: one micro-batch, and one replica of every stage where samples
meet. ``accept_loss`` takes it as it is. The difference then stands in the profile, and plan and report state it where
the plan divides the mini-batch.

Losses are compared in float64, computed so that rows of a batch meet in the loss only: random numbers are replaced by
their means (dropout leaves everything as it is), buffers stay as they are (no average moves), and batch normalisation
uses its running statistics. Where float64 does not run, 20 times the difference that another order of the rows makes is
taken for rounding.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autopar.capture.graph import LayerGraph
from autopar.capture.layers.shortening import DifferentError, Shortening, is_long
from autopar.capture.model.batch import (
    StepModule,
    check_module,
    given_model,
    named_tensors,
    rebuild,
    row_count,
    slice_rows,
)
from autopar.capture.model.effects import OperatorMode, reachable, storage_of, written_values
from autopar.capture.model.huggingface import PREFIX, Task, task_of
from autopar.capture.model.python_state import preserve_state, roots_of
from autopar.capture.model.source import UserModel
from autopar.capture.model.state import deep_copy, preserve_modes
from autopar.capture.model.terms import LOG, terms_of
from autopar.errors import AutoparError, ModelError, cause_of

_SMALLER = (torch.float16, torch.bfloat16, torch.float32)
_MEANS: dict[str, Callable[..., float | torch.Tensor]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda *_, **__: 0.5),
    **dict.fromkeys(("randn", "randn_like", "randint", "randint_like", "random_"), lambda *_, **__: 0.0),
    "uniform_": lambda value, low=0.0, high=1.0, **_: (low + high) / 2,
    "normal_": lambda value, mean=0.0, *_, **__: mean,
    "bernoulli_": lambda value, p=0.5, **_: p,
    "exponential_": lambda value, rate=1.0, **_: 1 / rate,
}
"""Of what operators draw, by their arguments."""


@contextlib.contextmanager
def neutral(model: nn.Module, *, double: bool) -> Iterator[None]:
    """Compute so inside the block; ``double`` makes float64 of all that the code asks in less precision."""
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    with preserve_modes(norms):
        for part in norms:
            part.eval()
        with _Neutral({storage_of(buffer) for buffer in model.buffers()}, double):
            yield


class _Neutral(OperatorMode):  # type: ignore[no-untyped-call]
    def __init__(self, buffers: set[int], double: bool) -> None:
        super().__init__()
        self._buffers, self._double = buffers, double

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        out = [value for value in written_values(operator, args, kwargs) if isinstance(value, torch.Tensor)]
        if out and all(storage_of(tensor) in self._buffers for tensor in out):
            return out[0] if len(out) == 1 else tuple(out)
        written = out[0] if out else None
        if self._double:
            args, kwargs = self._to_double(args, out), {**self._to_double(kwargs, out)}
            if kwargs.get("dtype") in _SMALLER:
                kwargs["dtype"] = torch.float64
        mean = _MEANS.get(operator.overloadpacket.__name__)
        if mean is None:
            return super().run(operator, args, kwargs)
        value = mean(*args, **{name: item for name, item in kwargs.items() if name in ("p", "mean")})
        if written is not None:
            return written.copy_(value) if isinstance(value, torch.Tensor) else written.fill_(value)
        return super().run(operator, args, kwargs).fill_(value)

    def _to_double(self, arguments: Any, written_tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401
        def double(value: torch.Tensor) -> torch.Tensor:
            smaller = value.dtype in _SMALLER and not any(value is each for each in written_tensors)
            return value.double() if smaller else value

        return tree_map_only(torch.Tensor, double, arguments)


_PARTS = (1, 2, 3)
"""How many rows each part of a batch has."""
EXACT = 1e-9
"""Up to this relative difference in float64 is rounding, however little another order of the rows changes."""
_ORDERS = 20
"""Up to so many times what another order of the rows changes is rounding, too."""
_LARGE = 2**24
"""Of models with more parameters, losses of three samples are compared, without gradients."""
_MOST_ELEMENTS = 2**18
"""How many numbers of all gradients together are compared."""
_USUAL = -100
"""The label that torch leaves out unless it is told another: it says nothing about the labels."""
_IGNORING = {"aten.cross_entropy_loss": 4, "aten.nll_loss": 4, "aten.nll_loss_nd": 4, "aten.nll_loss2d": 4}
"""Which argument of an operator is the label that it leaves out."""
_DEPENDENT = 1e-6
"""A gradient is a combination of others where less than this share of its norm is left beside them."""
_LARGEST = {torch.float64: 1e-5, torch.float32: 1e-2}
"""A larger relative difference is no rounding, even if another order of the rows changes as much."""


class _IncomparableError(Exception):
    """A batch's loss could not be compared with that of its parts; says why."""


class _NothingCountedError(_IncomparableError):
    """The count is 0."""


@dataclass(frozen=True)
class _Separation:
    """How far a batch's loss and gradients are from those of its parts."""

    difference: float
    """Relative; 0 where they differ by rounding."""
    combination: int | None = None
    """A term of the loss that is made of the others, as a total beside its parts is, if there is one."""


@dataclass(frozen=True)
class _Value:
    """The loss of some rows: of every term, times what it is weighted with."""

    totals: tuple[float, ...]
    counts: tuple[float, ...]
    gradients: torch.Tensor
    """A row for each term."""

    @property
    def total(self) -> float:
        """The loss times what it is divided by, where it has one term; else the loss itself."""
        return self.totals[0] if len(self.totals) == 1 else _quotients([self])[0]

    @property
    def count(self) -> float:
        """What :attr:`total` is divided by."""
        return self.counts[0] if len(self.counts) == 1 else float(any(self.counts))

    @property
    def gradient(self) -> torch.Tensor:
        """That of :attr:`total`."""
        return self.gradients[0] if len(self.totals) == 1 else _quotients([self])[1]


def _quotients(parts: Sequence[_Value]) -> tuple[float, torch.Tensor]:
    """Return the loss of several parts together, and its gradient: of every term the sum, divided by all counts."""
    found, gradient = 0.0, torch.zeros_like(parts[0].gradients[0])
    for term in range(len(parts[0].totals)):
        count = sum(part.counts[term] for part in parts)
        if count:
            found += sum(part.totals[term] for part in parts) / count
            gradient += sum(part.gradients[term] for part in parts) / count
    return found, gradient


def separation(
    model: nn.Module, batch: object, loss: Callable[..., Any] | None, ignored_state: tuple[str, ...] = ()
) -> _Separation:
    """Compare the loss and the gradients of a batch with those of its rows in uneven parts.

    A copy of the model computes in float64, or the model as it is where that cannot; rows meet in the loss only:
    dropout, batch normalisation and moving averages are neutral.

    Args:
        model: in training mode.
        batch: of at most a few rows, as :func:`_uneven_rows` picks them.
        loss: as of a model file.
        ignored_state: Python state that is not put back.

    Raises:
        IncomparableError: the model does not run so, or nothing in the batch counts.
    """
    with contextlib.suppress(Exception):
        return _PartLosses(model, batch, loss, ignored_state, double=True).separation()
    try:
        return _PartLosses(model, batch, loss, ignored_state, double=False).separation()
    except _IncomparableError:
        raise
    except Exception as error:
        raise _IncomparableError(f"a few samples made the model raise {cause_of(error)}") from error


class _PartLosses:
    """The losses of parts of one batch."""

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        loss: Callable[..., Any] | None,
        ignored_state: tuple[str, ...],
        *,
        double: bool,
    ) -> None:
        self._model = deep_copy(model).double() if double else model
        self._loss = deep_copy(loss).double() if double and isinstance(loss, nn.Module) else loss
        self._ignored_state, self._double, self._template = ignored_state, double, batch
        self._tensors = named_tensors(batch)
        if double:
            wide = {name: tensor.double() for name, tensor in self._tensors.items() if tensor.is_floating_point()}
            self._tensors |= wide
        self._rows = row_count(self._tensors)
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._gradients = not _is_large(model) and not is_long(model, slice_rows(self._tensors, 0, 2))

    def separation(self) -> _Separation:
        rows = list(range(self._rows))
        whole = self._value(rows)
        if not whole.count:
            raise _NothingCountedError("nothing in the samples counts")
        if not math.isfinite(whole.total):
            raise _IncomparableError(f"it is {whole.total}")
        made = None if _is_large(self._model) else self._dependent_term(whole)
        if made is not None:
            return _Separation(0.0, combination=made)
        found = self._difference(whole, self._parts())
        if found <= (EXACT if self._double else 0.0) or found <= self._rounding(whole):
            return _Separation(0.0)
        return _Separation(found)

    def _dependent_term(self, whole: _Value) -> int | None:
        """Return a term that others make, by gradients."""
        if len(whole.totals) > 1 and not self._gradients:
            self._gradients = True
            whole = self._value(range(min(2, self._rows)))
            self._gradients = False
        return _combination(whole.gradients)

    def _parts(self) -> list[_Value]:
        """Return the losses of uneven parts; of those that have one."""
        bounds = [min(bound, self._rows) for bound in accumulate(_PARTS, initial=0)]
        parts = [self._value(range(start, stop)) for start, stop in pairwise(bounds) if start < stop]
        return [part for part in parts if math.isfinite(part.total)]

    def _rounding(self, whole: _Value) -> float:
        """Return how large a difference is no more than rounding."""
        orders = ([*range(shift, self._rows), *range(shift)] for shift in (1, self._rows // 2))
        changed = max(self._difference(whole, [self._value(order)]) for order in orders)
        kind = torch.float64 if self._double else torch.float32
        return min(_LARGEST[kind], max(EXACT if self._double else 1e-6, _ORDERS * changed))

    def _difference(self, whole: _Value, parts: Sequence[_Value]) -> float:
        count = sum(part.count for part in parts)
        if not count:
            return 0.0
        total, gradient = _quotients(parts)
        scale = max(abs(whole.total) / whole.count, *(abs(part.total) / count for part in parts), 1e-30)
        norms = [float(part.gradient.norm()) / count for part in parts]
        steepest = max(float(whole.gradient.norm()) / whole.count, 1e-3 * max(norms), 1e-30)
        losses = abs(whole.total / whole.count - total) / scale
        return max(losses, float((whole.gradient / whole.count - gradient).norm()) / steepest)

    def _value(self, rows: Sequence[int]) -> _Value:
        part = {name: tensor[list(rows)].clone() for name, tensor in self._tensors.items()}
        step = StepModule(self._model, rebuild(self._template, part), self._loss)
        generator = torch.get_rng_state()
        state = preserve_state(roots_of(self._model, self._loss), self._ignored_state)
        learning = torch.set_grad_enabled(self._gradients)
        with state, neutral(self._model, double=self._double), learning:
            torch.manual_seed(0)
            values = step(*part.values())
            outputs = dict(zip(step.outputs.value, values, strict=True))
            wanted = self._parameters if self._gradients else []
            terms = [term for term in terms_of(step.outputs.value) if not term.logged]
            of_terms = [
                torch.autograd.grad(outputs[term.value], wanted, allow_unused=True, retain_graph=True) if wanted else ()
                for term in terms
            ]
        torch.set_rng_state(generator)
        weights = [1.0 if term.divisor is not None else float(len(rows)) for term in terms]
        sampled = [_sample_gradients(each, wanted) * weight for each, weight in zip(of_terms, weights, strict=True)]
        pairs = list(zip(terms, weights, strict=True))
        return _Value(
            tuple(float(outputs[term.value].item()) * weight for term, weight in pairs),
            tuple(weight if term.divisor is None else float(outputs[term.divisor].item()) for term, weight in pairs),
            torch.stack(sampled),
        )


def _combination(gradients: torch.Tensor) -> int | None:
    """Return the first gradient that is a linear combination of the others; none where one of them is zero."""
    norms = gradients.norm(dim=1)
    if len(gradients) < 2 or not bool((norms > 0).all()):
        return None
    rows = gradients / norms[:, None]
    for index in range(len(rows)):
        others = torch.cat((rows[:index], rows[index + 1 :])).T
        solved = torch.linalg.lstsq(others, rows[index][:, None], driver="gelsd").solution
        if float((others @ solved - rows[index][:, None]).norm()) < _DEPENDENT:
            return index
    return None


def _sample_gradients(gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return elements of the gradients, evenly spread, as one vector."""
    step = max(1, -(-sum(parameter.numel() for parameter in parameters) // _MOST_ELEMENTS))
    found = [torch.zeros(0, dtype=torch.float64)]
    for gradient, parameter in zip(gradients, parameters, strict=True):
        value = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
        real = torch.view_as_real(value) if value.is_complex() else value
        found.append(real.detach().reshape(-1)[::step].double())
    return torch.cat(found)


def _is_large(model: nn.Module) -> bool:
    """Tell whether losses are compared alone, of fewer rows, since gradients would take minutes."""
    return sum(parameter.numel() for parameter in model.parameters()) > _LARGE


def _uneven_rows(batch: object, count: int) -> object:
    """Return a few rows of a batch: those with the fewest and the most labels to leave out, and by their padding.

    Rows without any label are the last ones, so that few parts have no loss.
    """
    tensors = named_tensors(batch)
    equal, left_out = torch.zeros(row_count(tensors)), torch.zeros(row_count(tensors), dtype=torch.int64)
    empty = torch.zeros(row_count(tensors), dtype=torch.bool)
    for tensor in tensors.values():
        flat = tensor.reshape(len(tensor), -1)
        # Padding is at one end of a row, and all alike.
        equal += ((flat == flat[:, :1]).sum(1) + (flat == flat[:, -1:]).sum(1)) / max(1, flat.shape[1])
        # Masked tokens are anywhere.
        masked = (flat == _USUAL).sum(1) if flat.dtype is torch.int64 else torch.zeros_like(left_out)
        left_out += masked.where(masked < flat.shape[1], 0)
        empty |= masked >= max(1, flat.shape[1])
    order = [row for row in equal.argsort(stable=True).tolist() if not empty[row]]
    without = empty.nonzero()[: -(-count // 3), 0].tolist() if order else list(range(len(empty)))
    # Two parts of a row each would leave one of them without a loss.
    count = max(count, 3) if without else count
    wanted = count - len(without)
    spread = [order[round(place * (len(order) - 1) / max(1, wanted - 1))] for place in range(wanted)] if order else []
    ends = [int(left_out.argmax()), int(left_out.argmin())] if bool(left_out.any()) else []
    rows = [*dict.fromkeys([*(row for row in ends if not empty[row]), *spread])][:wanted]
    return rebuild(batch, {name: tensor[[*rows, *without][:count]] for name, tensor in tensors.items()})


def _ignored_labels(graph: LayerGraph) -> dict[str, int]:
    """Return the tensors of a batch that hold labels of which the captured loss leaves some out, and which it does."""
    found: dict[str, int] = {}
    if graph.segmented_program is None:
        return found
    names = graph.segmented_program.inputs.tensors
    for node in graph.segmented_program.program.graph.nodes:
        place = _IGNORING.get(str(node.target).partition(".default")[0])
        ignored = node.args[place] if place is not None and len(node.args) > place else _USUAL
        if isinstance(ignored, int) and ignored != _USUAL:
            sources = reachable([node.args[1]], lambda each: each.all_input_nodes)
            found.update({names[source.name]: ignored for source in sources if source.name in names})
    return found


def with_ignored(batch: object, labels: Mapping[str, int]) -> object:
    """Return a batch of which some rows have fewer labels than others; every row of several keeps two at least."""
    tensors = dict(named_tensors(batch))
    for name, ignored in labels.items():
        if tensors[name].dtype is torch.int64:
            changed = tensors[name] = tensors[name].clone()
            length = changed.shape[1] if changed.dim() > 1 else 1
            for row in range(len(changed)):
                if changed.dim() > 1:
                    changed[row, : max(0, length - max(2, length * (1 + row % 3) // 3))] = ignored
                elif row in (2, 3):
                    changed[row] = ignored
    return rebuild(batch, tensors)


_SAMPLES = 32
"""Read of a dataset, evenly spread, to find some whose labels count unevenly."""
_MOST_READ = 2048
"""Samples that are read until something counts."""
_FIGURE = "if the second is a figure to log (an accuracy, a norm), let loss() return the loss alone"
UNKNOWN = "whether the loss of a mini-batch is that of its micro-batches is not known"
_LABELS = "batch.labels"
_EXACT = (
    "a loss that compares samples (a contrastive one, a router's balance) is exact in one micro-batch that no replicas "
    "divide where samples meet: pass `accept_loss=True`, then plan with `micro_batches=1` and `stages` of one replica "
    "each (where the loss alone compares them, the last one); with `accept_loss=True` alone, results depend on "
    "micro-batches"
)


class LossCheck(NamedTuple):
    """What is known of a loss."""

    difference: float | None = None
    """How far a mini-batch's loss is from that of its parts, relative; None where it is none but rounding."""
    note: str | None = None
    """Why it is not known."""


def check_loss(user: UserModel, model: nn.Module, graph: LayerGraph, *, accept_loss: bool) -> LossCheck:
    """Compare the loss of a few samples with that of their parts; of whole ones only if short ones do not agree.

    Args:
        user: whose loss and data.
        model: in training mode, with values.
        graph: as captured.
        accept_loss: whether a difference is taken.

    Raises:
        ModelError: they differ, and it is not accepted; says what to write instead, or what is exact.
    """
    if graph.short is not None:
        with contextlib.suppress(AutoparError, DifferentError):
            found = _check_loss(user, model, graph, graph.short, accept_loss=False)
            if found == LossCheck():
                return found
    return _check_loss(user, model, graph, None, accept_loss=accept_loss)


def _check_loss(
    user: UserModel, model: nn.Module, graph: LayerGraph, shortening: Shortening | None, *, accept_loss: bool
) -> LossCheck:
    # Those of the library are known: labels of tokens and pixels are counted, others are one a sample.
    known = user.loss is None and _of_library(model)
    labels = {} if known or user.spec.startswith(PREFIX) else _ignored_labels(graph)
    batches = _uneven(user, model, labels, shortening)
    batch = next(batches)
    try:
        while True:
            try:
                found = separation(model, batch, user.loss, user.ignored_state)
                break
            except _NothingCountedError:
                # Of a loss that gives a sum and a figure that is no count, such as how many answers are right.
                batch = next(batches)
    except StopIteration:
        raise ModelError(
            f"{user.path}: loss() returns a pair, a sum and the number that it is divided by, and that number is 0 for "
            f"every sample that was tried; {_FIGURE}"
        ) from None
    except _IncomparableError as error:
        return LossCheck(note=f"{UNKNOWN}: {error}")
    if found.combination is not None:
        name = [term.name for term in terms_of(graph.outputs) if not term.logged][found.combination]
        raise ModelError(
            f"{user.path}: loss() returns terms that are added up, and {name!r} is made of the others, as a total "
            f"beside its parts; return the parts alone, or what is not to be trained under {LOG!r}"
        )
    if not found.difference:
        return LossCheck()
    if not accept_loss:
        raise ModelError(f"{user.path}: {_explain_difference(user, graph, labels, found.difference)}")
    return LossCheck(found.difference)


def counted_loss(model: nn.Module) -> Callable[..., Any] | None:
    """Return the loss that counts the labels of a Transformers model's tokens or pixels; none of other models."""
    task = _task(model)
    return None if task is None else task.loss


def _task(model: nn.Module) -> Task | None:
    if not _of_library(model):
        return None
    tasks = (task_of(kind.__name__, model.config) for kind in type(model).__mro__ if issubclass(kind, nn.Module))
    return next((task for task in tasks if task is not None), None)


def _of_library(model: nn.Module) -> bool:
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _counts_labels(model: nn.Module, batch: object) -> bool:
    """Tell whether a Transformers model's mean is one over labels, as uneven ones show, or it is too large to run."""
    task = _task(model)
    if task is None or task.loss is None or not isinstance(batch, Mapping) or "labels" not in batch:
        return False
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        return True
    rows = with_ignored(_uneven_rows(batch, _count(model)), {_LABELS: task.ignore_index})
    try:
        own, counted = (separation(model, rows, each) for each in (None, task.loss))
    except _IncomparableError:
        return False
    return own.difference > 0 and not counted.difference


def _count(model: nn.Module) -> int:
    return 3 if _is_large(model) else sum(_PARTS)


def _uneven(
    user: UserModel, model: nn.Module, labels: Mapping[str, int], shortening: Shortening | None
) -> Iterator[object]:
    """Yield samples of the dataset, picked or changed so that their labels count unevenly; then others in a row."""
    dataset = user.dataset()
    samples = user.sample_count(dataset)

    def length(batch: object) -> object:
        return batch if shortening is None else shortening.batch(batch)

    indices = sorted({round(place * (samples - 1) / (_SAMPLES - 1)) for place in range(_SAMPLES)})
    batch = user.load_batch(dataset, indices)
    together = _count(model)
    yield length(with_ignored(_uneven_rows(batch, together), labels))
    for first in range(0, min(samples, _MOST_READ) - together, together):
        yield length(user.load_batch(dataset, range(first, first + together)))


def _explain_difference(user: UserModel, graph: LayerGraph, labels: Mapping[str, int], difference: float) -> str:
    """Say what loss() has to return; ``labels`` are those of which it leaves out another than torch's own."""
    if graph.loss == "mean":
        count = f"(labels != {next(iter(labels.values()), _USUAL)}).sum()"
        written = f'return torch.nn.functional.cross_entropy(scores, labels, reduction="sum"), {count}'
        if user.loss is None:
            written = f"n = {count}; return output.loss * n, n"
        remedy = (
            "let loss(output, batch) return a sum and the number that it is divided by, such as "
            f"`{written}`, or several such pairs by name (docs/howto/own_model.md)"
        )
    else:
        names = [repr(term.name) for term in terms_of(graph.outputs) if term.name and not term.logged]
        remedy = (
            f"{' and '.join(names) or 'the pair'} that loss() returns must be a mean over samples, or a sum over "
            f"labels (or samples) and their number; {_FIGURE}"
        )
    differ = f"the loss and gradients of a mini-batch differ by {difference:.2g} from those of its micro-batches"
    return f"{differ}: {remedy}; {_EXACT}"


def copied_model(
    model: nn.Module, batch: object, ignored_state: tuple[str, ...], **functions: Callable[..., Any] | None
) -> tuple[UserModel, int]:
    """Return what a model file would say of a copy of a module, and the samples of a mini-batch.

    A Transformers model without a ``loss`` that counts labels is given one that does.
    """
    check_module(model)
    own = deep_copy(model)
    counts = functions["loss"] is None and _counts_labels(own.train(), batch)
    if counts:
        functions["loss"] = counted_loss(own)
    user = given_model(own, batch, **functions)
    user = replace(user, ignored_state=ignored_state, counts_labels=counts)
    return user, row_count(named_tensors(batch))
