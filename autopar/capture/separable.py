"""Separable: whether a mini-batch's loss is that of its parts, weighted by their samples or counts.

Micro-batches and shares are such parts. A mean over labelled tokens is not, where samples have unevenly many; neither
is a loss that compares samples with one another.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.batch import StepModule, named_tensors, rebuild, row_count
from autopar.capture.copied import copied
from autopar.capture.graph import LayerGraph
from autopar.capture.neutral import neutral
from autopar.capture.state import preserved, roots_of

PARTS = (1, 2, 3)
"""How many rows each has."""
EXACT = 1e-9
"""Relative difference in float64 that is rounding, whatever the order of rows changes."""
ORDERS = 20
"""How many times what another order of the rows changes is still rounding."""
LARGE = 2**24
"""Parameters."""
MOST_ELEMENTS = 2**18
"""Of all gradients together, that are compared."""
USUAL = -100
"""The label that torch leaves out unless it is told another: it says nothing about the labels."""
_IGNORING = {"aten.cross_entropy_loss": 4, "aten.nll_loss": 4, "aten.nll_loss_nd": 4, "aten.nll_loss2d": 4}
"""Which argument of an operator is the label that it leaves out."""
LARGEST = {torch.float64: 1e-5, torch.float32: 1e-2}
"""No rounding is larger: a loss depends on the order of its rows."""


class IncomparableError(Exception):
    """A batch's loss could not be compared with that of its parts; says why."""


@dataclass(frozen=True)
class Separation:
    """How far a batch's loss and gradients are from those of its parts."""

    difference: float
    """Relative; 0 where they differ by rounding."""
    weights: tuple[float, ...] | None = None
    """What the single rows' losses are to be weighted with to give the batch's, where some weights do."""
    additive: bool = False
    """Whether the batch's loss is the sum of its rows' losses, not their mean."""


@dataclass(frozen=True)
class _Value:
    """The loss of some rows, times what it is weighted with."""

    total: float
    count: float
    gradient: torch.Tensor
    counted: bool
    """Whether the user's loss gives the count."""


def separation(
    model: nn.Module, batch: object, loss: Callable[..., Any] | None, ignored_state: tuple[str, ...] = ()
) -> Separation:
    """Compare the loss and the gradients of a batch with those of its rows in uneven parts.

    A copy of the model computes in float64, or the model as it is where that cannot; rows meet in the loss only:
    dropout, batch normalisation and moving averages are neutral.

    Args:
        model: in training mode.
        batch: of at most a few rows, as :func:`uneven_rows` picks them.
        loss: as of a model file.
        ignored_state: Python state that is not put back.

    Raises:
        IncomparableError: the model does not run so, or nothing in the batch counts.
    """
    with contextlib.suppress(Exception):
        return _Losses(model, batch, loss, ignored_state, double=True).separation()
    try:
        return _Losses(model, batch, loss, ignored_state, double=False).separation()
    except IncomparableError:
        raise
    except Exception as error:
        said = (str(error).strip().splitlines() or ["(no message)"])[0]
        raise IncomparableError(f"a few samples made the model raise {type(error).__name__}: {said}") from error


class _Losses:
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
        self._model: nn.Module = _doubled(model) if double else model
        self._loss = _doubled(loss) if double else loss
        self._ignored, self._double, self._template = ignored_state, double, batch
        tensors = named_tensors(batch)
        self._tensors = {name: _wide(tensor) if double else tensor for name, tensor in tensors.items()}
        self._rows = row_count(tensors)
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._gradients = not is_large(model)

    def separation(self) -> Separation:
        rows = list(range(self._rows))
        whole = self._value(rows)
        if not whole.count:
            raise IncomparableError("nothing in the samples counts")
        if not math.isfinite(whole.total):
            raise IncomparableError(f"it is {whole.total}")
        found = self._difference(whole, self._parts())
        if found <= (EXACT if self._double else 0.0) or found <= self._rounding(whole):
            return Separation(0.0)
        return Separation(found, *self._weights(mean=not whole.counted))

    def _parts(self) -> list[_Value]:
        """Return the losses of uneven parts; of those that have one."""
        bounds = [min(bound, self._rows) for bound in accumulate(PARTS, initial=0)]
        parts = [self._value(range(start, stop)) for start, stop in pairwise(bounds) if start < stop]
        return [part for part in parts if math.isfinite(part.total)]

    def _rounding(self, whole: _Value) -> float:
        """Return how large a difference is no more than rounding."""
        orders = ([*range(shift, self._rows), *range(shift)] for shift in (1, self._rows // 2))
        changed = max(self._difference(whole, [self._value(order)]) for order in orders)
        kind = torch.float64 if self._double else torch.float32
        return min(LARGEST[kind], max(EXACT if self._double else 1e-6, ORDERS * changed))

    def _difference(self, whole: _Value, parts: Sequence[_Value]) -> float:
        count = sum(part.count for part in parts)
        if not count:
            return 0.0
        total = sum(part.total for part in parts) / count
        gradient = sum(part.gradient for part in parts) / count
        scale = max(abs(whole.total) / whole.count, *(abs(part.total) / count for part in parts), 1e-30)
        norms = [float(part.gradient.norm()) / count for part in parts]
        steepest = max(float(whole.gradient.norm()) / whole.count, 1e-3 * max(norms), 1e-30)
        losses = abs(whole.total / whole.count - total) / scale
        return max(losses, float((whole.gradient / whole.count - gradient).norm()) / steepest)

    def _weights(self, *, mean: bool) -> tuple[tuple[float, ...] | None, bool]:
        """Return weights of the rows that give the whole loss, a mean or a sum; and whether it is a plain sum."""
        self._gradients = True
        singles = [self._value([row]) for row in range(self._rows)]
        known = [row for row, single in enumerate(singles) if math.isfinite(single.total) and single.count]
        if not known:
            return None, False
        columns = torch.stack([_column(singles[row]) for row in known], 1)
        target = _column(self._value(range(self._rows)))
        solved = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
        residual = float((columns @ solved - target).norm() / target.norm().clamp(min=1e-30))
        total = float(solved.sum())
        if residual > (1e-6 if self._double else 1e-3) or float(solved.min()) < -1e-6:
            return None, False
        found = dict(zip(known, solved.tolist(), strict=True))
        weights = tuple(found.get(row, 0.0) for row in range(self._rows))
        if not mean or abs(total - 1) < 1e-4:
            return weights, False
        return (weights, True) if float((solved - solved.mean()).abs().max()) < 1e-4 else (None, False)

    def _value(self, rows: Sequence[int]) -> _Value:
        part = {name: tensor[list(rows)].clone() for name, tensor in self._tensors.items()}
        step = StepModule(self._model, rebuild(self._template, part), self._loss)
        generator = torch.get_rng_state()
        state = preserved(roots_of(self._model, self._loss), self._ignored)
        learning = torch.set_grad_enabled(self._gradients)
        with state, neutral(self._model, double=self._double), learning:
            torch.manual_seed(0)
            outputs = step(*part.values())
            wanted = self._parameters if self._gradients else []
            gradients = torch.autograd.grad(outputs[0], wanted, allow_unused=True) if wanted else ()
        torch.set_rng_state(generator)
        counted = len(outputs) == 2
        weight = 1.0 if counted else float(len(rows))
        gradient = _sampled(gradients, wanted) * weight
        count = float(outputs[1].item()) if counted else weight
        return _Value(outputs[0].item() * weight, count, gradient, counted)


def _sampled(gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return elements of the gradients, evenly spread, as one vector."""
    step = max(1, -(-sum(parameter.numel() for parameter in parameters) // MOST_ELEMENTS))
    found = [torch.zeros(0, dtype=torch.float64)]
    for gradient, parameter in zip(gradients, parameters, strict=True):
        value = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
        real = torch.view_as_real(value) if value.is_complex() else value
        found.append(real.detach().reshape(-1)[::step].double())
    return torch.cat(found)


def _doubled(part: Any) -> Any:  # noqa: ANN401
    return copied(part).double() if isinstance(part, nn.Module) else part


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def is_large(model: nn.Module) -> bool:
    """Tell whether losses are compared alone, of fewer rows, since gradients would take minutes."""
    return sum(parameter.numel() for parameter in model.parameters()) > LARGE


def uneven_rows(batch: object, count: int) -> object:
    """Return a few rows of a batch, from those with the least padding to those with the most."""
    tensors = named_tensors(batch)
    equal = torch.zeros(row_count(tensors))
    for tensor in tensors.values():
        flat = tensor.reshape(len(tensor), -1)
        # Padding is at one end of a row, and all alike.
        equal += ((flat == flat[:, :1]).sum(1) + (flat == flat[:, -1:]).sum(1)) / max(1, flat.shape[1])
    order = equal.argsort(stable=True).tolist()
    spread = [order[round(place * (len(order) - 1) / (count - 1))] for place in range(count)]
    rows = list(dict.fromkeys(spread))
    return rebuild(batch, {name: tensor[rows] for name, tensor in tensors.items()})


def ignored_labels(graph: LayerGraph) -> dict[str, int]:
    """Return the tensors of a batch that hold labels of which the captured loss leaves some out, and which it does."""
    found: dict[str, int] = {}
    if graph.exported is None:
        return found
    names = graph.exported.inputs.tensors
    for node in graph.exported.program.graph.nodes:
        place = _IGNORING.get(str(node.target).partition(".default")[0])
        ignored = node.args[place] if place is not None and len(node.args) > place else USUAL
        if isinstance(ignored, int) and ignored != USUAL:
            found.update({names[source.name]: ignored for source in _sources(node.args[1]) if source.name in names})
    return found


def _sources(node: fx.Node) -> set[fx.Node]:
    """Return the placeholders that a node is computed from."""
    seen, ahead = {node}, [node]
    while ahead:
        new = set(ahead.pop().all_input_nodes) - seen
        seen |= new
        ahead += new
    return {each for each in seen if each.op == "placeholder"}


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


def _column(value: _Value) -> torch.Tensor:
    """Return a mean or a sum with its gradient."""
    column = torch.cat((value.gradient, torch.tensor([value.total], dtype=torch.float64)))
    return column if value.counted else column / value.count
