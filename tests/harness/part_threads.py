"""Run the parts of a layer as threads of this process, and hold their gradients against the whole layer's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from autopar.capture.graph import Layer
from autopar.capture.split.analysis import analyse
from autopar.capture.split.choice import Split, choose
from autopar.capture.split.edges import find_edges
from autopar.capture.split.rewrite import LayerPart, rewrite

Result = TypeVar("Result")
Slice = TypeVar("Slice", bound=torch.Tensor | None)


SEED = 7
"""What a layer's random numbers are drawn from, whole and in parts."""


class Turns:
    """Threads take turns, and each finds the one generator of random numbers that they share as it left it."""

    def __init__(self) -> None:
        self._lock, self._states = threading.Lock(), dict[int, torch.Tensor]()

    def begin(self, index: int) -> None:
        """Wait until no other thread computes."""
        self._lock.acquire()
        if index in self._states:
            torch.set_rng_state(self._states[index])
        else:
            torch.manual_seed(SEED)

    def end(self, index: int) -> None:
        """Let others compute."""
        self._states[index] = torch.get_rng_state()
        self._lock.release()


class Table:
    """Where threads lay their summands; each takes the sum of all, in the order of parts."""

    def __init__(self) -> None:
        self.turns = Turns()
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._lock, self._broken = threading.Lock(), False
        self.summands: dict[int, torch.Tensor] = {}
        """By part: one sums one tensor at a time."""

    def barrier(self, parts: tuple[int, ...]) -> threading.Barrier:
        """Return where these parts wait for each other."""
        with self._lock:
            if self._broken:
                raise threading.BrokenBarrierError
            return self._barriers.setdefault(parts, threading.Barrier(len(parts), timeout=30))

    def abort(self) -> None:
        """Let all who wait fail."""
        with self._lock:
            self._broken = True
            for barrier in self._barriers.values():
                barrier.abort()


class ThreadSums:
    """The sums of one part, with the shape of each."""

    def __init__(self, table: Table, index: int) -> None:
        self._table, self._index = table, index
        self.shapes: list[tuple[int, ...]] = []
        """Of all that was summed, gathered or scattered: of the whole, where parts have slices."""
        self.kinds: list[str] = []
        """What was done with each."""

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """See :class:`autopar.capture.split.sums.Sums`."""
        self._note("sum", tensor.shape)
        return torch.stack(self._exchange(tensor, parts)).sum(0)

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """See :class:`autopar.capture.split.sums.Sums`."""
        found = torch.cat(self._exchange(tensor, parts), dim)
        self._note("gather", found.shape)
        return found

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """See :class:`autopar.capture.split.sums.Sums`."""
        self._note("reduce_scatter", tensor.shape)
        assert tensor.shape[dim] % len(parts) == 0, "slices would not be even"
        return torch.stack(self._exchange(tensor, parts)).sum(0).chunk(len(parts), dim)[parts.index(self._index)]

    def _note(self, kind: str, shape: torch.Size) -> None:
        self.kinds.append(kind)
        self.shapes.append(tuple(shape))

    def _exchange(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> list[torch.Tensor]:
        """Return what these parts lay down."""
        self._table.summands[self._index] = tensor.detach()
        barrier = self._table.barrier(parts)
        self._wait(barrier)
        found = [self._table.summands[part] for part in parts]
        assert len({each.shape for each in found}) == 1, "parts sum tensors of different sizes"
        self._wait(barrier)
        return found

    def _wait(self, barrier: threading.Barrier) -> None:
        """Wait for others, who compute meanwhile."""
        self._table.turns.end(self._index)
        try:
            barrier.wait()
        finally:
            self._table.turns.begin(self._index)


def run_parts(count: int, act: Callable[[ThreadSums, int], Result]) -> list[Result]:
    """Do something for every part, in turns from sum to sum; raise what one of them raised first.

    Each has a generator of random numbers as if it were alone, which begins at ``SEED``.
    """
    table, errors = Table(), list[BaseException]()
    results: dict[int, Result] = {}

    def work(index: int) -> None:
        table.turns.begin(index)
        try:
            results[index] = act(ThreadSums(table, index), index)
        except BaseException as error:
            errors.append(error)
            table.abort()
        finally:
            table.turns.end(index)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    return [results[index] for index in range(count)]


@dataclass(frozen=True)
class Comparison:
    """What the parts of a layer gave, beside the whole."""

    error: float
    """The largest difference of outputs and gradients, in largest gradients or outputs."""
    split_share: float
    """Which share of the parameters' numbers is cut."""
    forward: list[tuple[int, ...]]
    """The shapes of forward sums."""
    backward: list[tuple[int, ...]]
    parameters: dict[str, bool]
    """By attribute, whether it is cut."""
    splits: tuple[Split, ...]
    kinds: tuple[list[str], list[str]] = ([], [])
    """What was done with what forwards, and backwards, sum or move."""


def compare(
    layer: Layer,
    inputs: Sequence[torch.Tensor],
    count: int,
    sequence: Mapping[str, int] | None = None,
    deferred: bool = False,
) -> Comparison:
    """Run a layer whole, and in parts, forwards and backwards from the same random gradients of its outputs.

    All draw from the same seed, and must leave the generator alike. ``sequence`` names inputs and outputs that come and
    go in slices. ``deferred`` sums of parameters' gradients come after the backward.
    """
    rows = inputs[0].shape[0]
    layer.module.zero_grad()
    analysis = analyse(layer)
    splits = choose(analysis, count)
    torch.manual_seed(SEED)
    whole, wanted = _run(layer.module, rows, inputs)
    state = torch.get_rng_state()
    drawn = _gradients(whole)
    expected = {name: each.grad for name, each in layer.module.named_parameters() if name in layer.parameters}
    edges = find_edges(analysis.module, layer, sequence or {}, count)
    slices = _Slices(layer, sequence or {}, count)

    table: list[ThreadSums] = [None] * count  # type: ignore[list-item]

    def act(sums: ThreadSums, index: int) -> tuple[LayerPart, list[torch.Tensor], list[torch.Tensor | None], int]:
        table[index] = sums
        part = rewrite(analysis, splits, sums, index, count, edges, list(layer.parameters) if deferred else [])
        own, drawn_slices = slices.inputs(inputs, index), slices.outputs(drawn, index)
        outputs, gradients, forward = _run_counted(part.module, rows, own, sums, drawn_slices)
        assert deferred or not part.summands
        _add_up(part, sums)
        assert torch.equal(torch.get_rng_state(), state), "a part draws more or less than the whole layer"
        return part, outputs, gradients, forward

    runs = run_parts(count, act)
    assert len({tuple(sums.shapes) for sums in table}) == 1, "parts sum other tensors, or in another order"
    pairs = [
        pair
        for index, (_, outputs, _, _) in enumerate(runs)
        for pair in zip(outputs, slices.outputs(whole, index), strict=True)
    ]
    gradient_pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [
        pair
        for index, (_, _, gradients, _) in enumerate(runs)
        for pair in zip(gradients, slices.inputs(wanted, index), strict=True)
    ]
    gradient_pairs += _parameter_pairs([run[0] for run in runs], expected)
    cuts, first = runs[0][0].cuts, runs[0][3]
    sizes = {name: layer.module.get_parameter(name).numel() for name in layer.parameters}
    return Comparison(
        max(_difference(pairs), _difference(gradient_pairs)),
        sum(sizes[name] for name in cuts) / sum(sizes.values()),
        table[0].shapes[:first],
        table[0].shapes[first:],
        {name: name in cuts for name in layer.parameters},
        splits,
        (table[0].kinds[:first], table[0].kinds[first:]),
    )


def _add_up(part: LayerPart, sums: ThreadSums) -> None:
    """Complete the gradients that are summands."""
    for name, summands in part.summands.items():
        gradient = part.module.get_parameter(name).grad
        for summand in summands if gradient is not None else ():
            rows = range(gradient.shape[summand.dim])
            if summand.indices is not None:
                rows = [row for start, stop in summand.indices for row in range(start, stop)]
            index = torch.tensor(rows, dtype=torch.int64)
            total = sums.sum(gradient.index_select(summand.dim, index), summand.parts)
            gradient.index_copy_(summand.dim, index, total)


class _Slices:
    """Take a part's slices of what crosses a layer's edge."""

    def __init__(self, layer: Layer, sequence: Mapping[str, int], count: int) -> None:
        self._count = count
        self._inputs = [sequence.get(name) for name in layer.inputs]
        self._outputs = [sequence.get(name) for name in layer.outputs]

    def inputs(self, tensors: Sequence[Slice], index: int) -> list[Slice]:
        """Return a part's slices of inputs, or of their gradients."""
        return [self._take(each, dim, index) for each, dim in zip(tensors, self._inputs, strict=True)]

    def outputs(self, tensors: Sequence[Slice], index: int) -> list[Slice]:
        """Return a part's slices of outputs, or of their gradients."""
        return [self._take(each, dim, index) for each, dim in zip(tensors, self._outputs, strict=True)]

    def _take(self, tensor: Slice, dim: int | None, index: int) -> Slice:
        if tensor is None or dim is None:
            return tensor
        return tensor.chunk(self._count, dim)[index]  # type: ignore[return-value]


def _run(
    module: nn.Module, rows: int, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    outputs, leaves = _forward(module, rows, inputs)
    _backward(outputs, _gradients(outputs))
    return [each.detach() for each in outputs], [leaf.grad for leaf in leaves]


def _run_counted(
    module: nn.Module,
    rows: int,
    inputs: Sequence[torch.Tensor],
    sums: ThreadSums,
    gradients: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], int]:
    """Run as :func:`_run`, and return how many sums the forward made."""
    outputs, leaves = _forward(module, rows, inputs)
    forward = len(sums.shapes)
    _backward(outputs, gradients)
    return [each.detach() for each in outputs], [leaf.grad for leaf in leaves], forward


def _forward(
    module: nn.Module, rows: int, inputs: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
    return module(rows, *leaves), leaves


def _gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Draw gradients of whole outputs."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype) for each in outputs]


def _backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    pairs = [(each, gradient) for each, gradient in zip(outputs, gradients, strict=True) if each.requires_grad]
    torch.autograd.backward([each for each, _ in pairs], [gradient for _, gradient in pairs])


def _parameter_pairs(
    parts: Sequence[LayerPart], expected: Mapping[str, torch.Tensor | None]
) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return the gradients of parameters beside the whole layer's: of every part, of cuts what it has."""
    pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    for name, whole in expected.items():
        own = [part.module.get_parameter(name).grad for part in parts]
        if name not in parts[0].cuts or whole is None:
            pairs += [(gradient, whole) for gradient in own]
            continue
        cut = parts[0].cuts[name]
        indices = [cut.indices(part) for part in range(len(parts))]
        pairs += [(gradient, whole.index_select(cut.dim, rows)) for rows, gradient in zip(indices, own, strict=True)]
        every = torch.cat(indices).unique().tolist()
        assert every == list(range(whole.shape[cut.dim])), f"no part has some of {name}"
    return pairs


def _difference(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> float:
    """Return the largest difference over the largest number; without a bound where a gradient is missing, or NaN."""
    largest, worst = 0.0, 0.0
    for found, wanted in pairs:
        if found is None or wanted is None:
            worst = worst if found is wanted else float("inf")
            continue
        difference = (found - wanted).abs().nan_to_num(float("inf"))
        worst = max(worst, float(difference.max()))
        largest = max(largest, float(wanted.abs().max()))
    return worst / (largest or 1.0)
