"""Run the parts of a layer as threads of this process, and hold their gradients against the whole layer's."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from autopar.capture.graph import Layer
from autopar.capture.split.analysis import analyse
from autopar.capture.split.choice import Split, choose
from autopar.capture.split.rewrite import LayerPart, rewrite
from autopar.capture.split.sequence import find_edges

Result = TypeVar("Result")
Slice = TypeVar("Slice", bound=torch.Tensor | None)
Pairs = list[tuple[torch.Tensor | None, torch.Tensor | None]]

SEED = 7
"""What a layer's random numbers are drawn from, whole and in parts."""


class Table:
    """Where threads lay their summands; each takes the sum of all, in the order of parts.

    They take turns, and each finds the one generator of random numbers that they share as it left it.
    """

    def __init__(self) -> None:
        self._turn, self._states = threading.Lock(), dict[int, torch.Tensor]()
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._lock, self._broken = threading.Lock(), False
        self.summands: dict[int, torch.Tensor] = {}
        """By part: one sums one tensor at a time."""

    def begin(self, index: int) -> None:
        """Wait until no other thread computes."""
        self._turn.acquire()
        torch.set_rng_state(self._states.get(index, torch.Generator().manual_seed(SEED).get_state()))

    def end(self, index: int) -> None:
        self._states[index] = torch.get_rng_state()
        self._turn.release()

    def wait(self, index: int, parts: tuple[int, ...]) -> None:
        """Wait for these parts, which compute meanwhile."""
        with self._lock:
            if self._broken:
                raise threading.BrokenBarrierError
            barrier = self._barriers.setdefault(parts, threading.Barrier(len(parts), timeout=30))
        self.end(index)
        try:
            barrier.wait()
        finally:
            self.begin(index)

    def abort(self) -> None:
        with self._lock:
            self._broken = True
            for barrier in self._barriers.values():
                barrier.abort()


class ThreadSums:
    """The sums of one part (:class:`autopar.capture.split.rewrite.Sums`), with the shape of each."""

    def __init__(self, table: Table, index: int) -> None:
        self._table, self._index = table, index
        self.shapes, self.kinds = list[tuple[int, ...]](), list[str]()
        """Of all that was summed, gathered or scattered (of the whole, where parts have slices), and what it was."""

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        self._note("sum", tensor.shape)
        return torch.stack(self._exchange(tensor, parts)).sum(0)

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        found = torch.cat(self._exchange(tensor, parts), dim)
        self._note("gather", found.shape)
        return found

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        self._note("reduce_scatter", tensor.shape)
        assert tensor.shape[dim] % len(parts) == 0, "slices would not be even"
        return torch.stack(self._exchange(tensor, parts)).sum(0).chunk(len(parts), dim)[parts.index(self._index)]

    def _note(self, kind: str, shape: torch.Size) -> None:
        self.kinds.append(kind)
        self.shapes.append(tuple(shape))

    def _exchange(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> list[torch.Tensor]:
        self._table.summands[self._index] = tensor.detach()
        self._table.wait(self._index, parts)
        found = [self._table.summands[part] for part in parts]
        assert len({each.shape for each in found}) == 1, "parts sum tensors of different sizes"
        self._table.wait(self._index, parts)
        return found


def run_parts(count: int, act: Callable[[ThreadSums, int], Result]) -> list[Result]:
    """Do something for every part, in turns from sum to sum; raise what one of them raised first.

    Each has a generator of random numbers as if it were alone, which begins at ``SEED``.
    """
    table, errors = Table(), list[BaseException]()
    results: dict[int, Result] = {}

    def work(index: int) -> None:
        table.begin(index)
        try:
            results[index] = act(ThreadSums(table, index), index)
        except BaseException as error:
            errors.append(error)
            table.abort()
        finally:
            table.end(index)

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
    """Of the parameters' numbers."""
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
    whole, wanted, _ = _run(layer.module, rows, inputs)
    state = torch.get_rng_state()
    drawn = _gradients(whole)
    expected = {name: each.grad for name, each in layer.module.named_parameters() if name in layer.parameters}
    edges = find_edges(analysis.module, layer, sequence or {}, count)
    entering, leaving = ([(sequence or {}).get(name) for name in names] for names in (layer.inputs, layer.outputs))

    table: list[ThreadSums] = [None] * count  # type: ignore[list-item]

    def act(sums: ThreadSums, index: int) -> tuple[LayerPart, list[torch.Tensor], list[torch.Tensor | None], int]:
        table[index] = sums
        part = rewrite(analysis, splits, sums, index, count, edges, list(layer.parameters) if deferred else [])
        own, drawn_slices = _slices(inputs, entering, count, index), _slices(drawn, leaving, count, index)
        outputs, gradients, forward = _run(part.module, rows, own, sums, drawn_slices)
        assert deferred or not part.summands
        _add_up(part, sums)
        assert torch.equal(torch.get_rng_state(), state), "a part draws more or less than the whole layer"
        return part, outputs, gradients, forward

    runs = run_parts(count, act)
    assert len({tuple(sums.shapes) for sums in table}) == 1, "parts sum other tensors, or in another order"
    pairs, gradient_pairs = Pairs(), _parameter_pairs([run[0] for run in runs], expected)
    for index, (_, outputs, gradients, _) in enumerate(runs):
        pairs += zip(outputs, _slices(whole, leaving, count, index), strict=True)
        gradient_pairs += zip(gradients, _slices(wanted, entering, count, index), strict=True)
    cuts, first = runs[0][0].cuts, runs[0][3]
    sizes = {name: layer.module.get_parameter(name).numel() for name in layer.parameters}
    apart, share = max(map(_difference, (pairs, gradient_pairs))), sum(sizes[name] for name in cuts)
    halves = [(each[:first], each[first:]) for each in (table[0].shapes, table[0].kinds)]
    are_cut = {name: name in cuts for name in layer.parameters}
    return Comparison(apart, share / sum(sizes.values()), *halves[0], are_cut, splits, halves[1])  # type: ignore[arg-type]


def _add_up(part: LayerPart, sums: ThreadSums) -> None:
    for name, summands in part.summands.items():
        gradient = part.module.get_parameter(name).grad
        for summand in summands if gradient is not None else ():
            rows = range(gradient.shape[summand.dim])
            if summand.indices is not None:
                rows = [row for start, stop in summand.indices for row in range(start, stop)]
            index = torch.tensor(rows, dtype=torch.int64)
            total = sums.sum(gradient.index_select(summand.dim, index), summand.parts)
            gradient.index_copy_(summand.dim, index, total)


def _slices(tensors: Sequence[Slice], dims: Sequence[int | None], count: int, index: int) -> list[Slice]:
    """Return a part's slices of what crosses a layer's edge, or of its gradients, in the dimensions that are cut."""
    both = zip(tensors, dims, strict=True)
    return [each if each is None or dim is None else each.chunk(count, dim)[index] for each, dim in both]  # type: ignore[misc]


def _run(
    module: nn.Module,
    rows: int,
    inputs: Sequence[torch.Tensor],
    sums: ThreadSums | None = None,
    given: Sequence[torch.Tensor | None] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], int]:
    """Run forwards, and backwards from gradients that are given or drawn.

    Returns outputs, gradients of inputs, and how many sums the forward made.
    """
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
    outputs = module(rows, *leaves)
    forward = len(sums.shapes) if sums is not None else 0
    gradients = _gradients(outputs) if given is None else given
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    return [each.detach() for each in outputs], [leaf.grad for leaf in leaves], forward


def _gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype) for each in outputs]


def _parameter_pairs(parts: Sequence[LayerPart], expected: Mapping[str, torch.Tensor | None]) -> Pairs:
    """Return the gradients of parameters beside the whole layer's: of every part, of cuts what it has."""
    pairs = Pairs()
    for name, whole in expected.items():
        own = [part.module.get_parameter(name).grad for part in parts]
        cut = parts[0].cuts.get(name)
        if cut is None or whole is None:
            pairs += [(gradient, whole) for gradient in own]
            continue
        indices = [cut.indices(part) for part in range(len(parts))]
        pairs += [(gradient, whole.index_select(cut.dim, rows)) for rows, gradient in zip(indices, own, strict=True)]
        every = torch.cat(indices).unique().tolist()
        assert every == list(range(whole.shape[cut.dim])), f"no part has some of {name}"
    return pairs


def _difference(pairs: Pairs) -> float:
    """Return the largest difference over the largest number; without a bound where a gradient is missing, or NaN."""
    largest, worst = 0.0, 0.0
    for found, wanted in pairs:
        if found is not None and wanted is not None:
            worst = max(worst, float((found - wanted).abs().nan_to_num(float("inf")).max()))
            largest = max(largest, float(wanted.abs().max()))
        elif found is not wanted:
            worst = float("inf")
    return worst / (largest or 1.0)
