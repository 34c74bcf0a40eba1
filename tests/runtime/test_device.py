"""What is watched inside stages, and copies of a GPU, which happen after what makes a tensor and before what uses it.

Layers' times are held against a clock that counts, operations against their closed form. Streams and events are
stand-ins that keep count of what happened before what, by vector clocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from autopar.formats.program import Action, RankProgram
from autopar.runtime.device import Copies, HostCopy, LayerTimes
from autopar.runtime.outcome import ForwardFlops, peak_of


class CountingClock:
    """A clock that only layers move."""

    def __init__(self) -> None:
        self.now = 0.0

    def start(self) -> None:
        """Begin a step."""

    def mark(self) -> object:
        return self.now

    def resolve(self, marks: list[object]) -> list[float]:
        return [float(str(mark)) for mark in marks]


class Slow(torch.autograd.Function):
    """Moves a clock forward and backward, and nothing else."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, clock: CountingClock, times: tuple[float, float]
    ) -> torch.Tensor:
        ctx.clock, ctx.backward_s = clock, times[1]
        clock.now += times[0]
        return value * 1.0

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.now += ctx.backward_s
        return gradient * 1.0, None, None


def _layer(clock: CountingClock, forward_s: float, backward_s: float, value: torch.Tensor) -> Sequence[torch.Tensor]:
    return (Slow.apply(value, clock, (forward_s, backward_s)),)


def _forward(times: LayerTimes, clock: CountingClock, seconds: dict[str, tuple[float, float]]) -> torch.Tensor:
    value = torch.ones(2, requires_grad=True)
    for name, (forward_s, backward_s) in seconds.items():
        run: Callable[[], Sequence[torch.Tensor]] = partial(_layer, clock, forward_s, backward_s, value)
        (value,) = times(name, run, False)
    return value


def _program(text: str) -> RankProgram:
    return RankProgram.of(map(Action.parse, text.split()))


def test_a_layers_backward_lasts_from_its_outputs_gradients_to_the_next_ones() -> None:
    clock, seconds = CountingClock(), {"a": (1.0, 2.0), "b": (3.0, 7.0), "c": (4.0, 5.0)}
    times = LayerTimes(_program("F0@0 F1@0 B0@0 B1@0 U@0"), {0: list(seconds)}, clock)
    for step in range(2):
        times.begin_step()
        spans, ends = [], []
        for _ in range(2):
            start = clock.now
            ends.append(_forward(times, clock, seconds))
            spans.append((start, clock.now))
        for value in ends:
            start = clock.now
            value.sum().backward()
            spans.append((start, clock.now))
        times.end_step([*spans, (clock.now, clock.now + step)])
    assert times.medians() == seconds
    # Of layers whose gradients seem to come in another order, or behind the end, the later ones take no time.
    times = LayerTimes(_program("F0@0 B0@0"), {0: list(seconds)}, clock)
    times._part(0, {"a": 9.0, "b": 3.0, "c": 5.0}, (1.0, 8.0))
    assert [times._seconds[layer][1] for layer in seconds] == [[0.0], [3.0], [0.0]]


def test_a_recomputed_layers_backward_begins_with_its_recomputation_and_halves_have_no_time() -> None:
    clock = CountingClock()
    times = LayerTimes(_program("F0@0 F1@0 B1@0 B0@0"), {0: ["a", "b"]}, clock)
    times.begin_step()
    spans, made, given = [], [], torch.ones(2, requires_grad=True)
    for _ in range(2):
        start = clock.now
        with torch.no_grad():
            times("a", partial(_layer, clock, 1.0, 0.0, given), False)
        made += times("b", partial(_layer, clock, 4.0, 7.0, given), False)
        spans.append((start, clock.now))
    for last in reversed(made):
        start = clock.now
        last.sum().backward()
        (again,) = times("a", partial(_layer, clock, 1.0, 2.0, given), True)
        again.sum().backward()
        spans.append((start, clock.now))
    times.end_step(spans)
    assert times.medians() == {"a": (1.0, 3.0), "b": (4.0, 7.0)}
    # Layers whose backward goes in halves have forwards only.
    clock = CountingClock()
    times = LayerTimes(_program("F0@0 I0@0 W0@0 U@0"), {0: ["a"]}, clock)
    times.begin_step()
    _forward(times, clock, {"a": (3.0, 1.0)}).sum().backward()
    times.end_step([(0.0, 3.0), (3.0, 4.0), (4.0, 4.0), (4.0, 4.0)])
    assert times.medians() == {"a": (3.0, 0.0)}


@pytest.mark.parametrize("rows", [1, 6])
def test_the_operations_of_products_are_two_per_weight_and_row(rows: int) -> None:
    counted, layer = ForwardFlops(), nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))
    value = torch.ones(rows, 5)
    (found,) = counted("layer", lambda: (layer(value),), False)
    assert torch.equal(found, layer(value))
    assert counted.total == 2 * rows * (5 * 7 + 7 * 3)
    assert peak_of(torch.device("cpu"), "fp32") is None, "no peak is known of a CPU"


class Stream:
    """Does one thing after the other; what it waits for happened before what it does from then on."""

    def __init__(self, name: str) -> None:
        self.name, self.known = name, dict[str, int]()

    def do(self) -> Event:
        self.known = {**self.known, self.name: self.known.get(self.name, 0) + 1}
        return self.record_event()

    def wait_event(self, event: Event) -> None:
        every = {**self.known, **event.known}
        self.known = {name: max(self.known.get(name, 0), event.known.get(name, 0)) for name in every}

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    """Something that a stream did last, or is yet to do."""

    def __init__(self, blocking: bool = False) -> None:
        self.blocking, self.waited = blocking, False

    def record(self, stream: Stream) -> None:
        self.stream, self.known = stream.name, stream.known

    def synchronize(self) -> None:
        self.waited = True

    def before(self, other: Event) -> bool:
        return other.known.get(self.stream, 0) >= self.known[self.stream]


class Tensor:
    """Notes what copies into it, and which streams use its memory."""

    is_cuda = True

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.copied = cuda, list[Event]()
        self.owner, self.users = cuda.current, list[Stream]()

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.copied.append(self.cuda.current.do())

    def pin_memory(self) -> Tensor:
        return self

    def to(self, device: torch.device, non_blocking: bool) -> Tensor:
        made = Tensor(self.cuda)
        made.copy_(self, non_blocking)
        return made

    def record_stream(self, stream: Stream) -> None:
        self.users.append(stream)


class Cuda:
    """Stands in for torch.cuda."""

    def __init__(self) -> None:
        self.compute = self.current = Stream("compute")
        self._numbers = itertools.count(1)

    def new_stream(self, device: torch.device) -> Stream:
        return Stream(f"stream {next(self._numbers)}")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    made = {"Stream": found.new_stream, "Event": Event, "stream": found.stream}
    for name, stand_in in {**made, "current_stream": lambda device: found.current}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Copies, "buffer", lambda self, tensor: Tensor(found))
    return found


@pytest.fixture
def copies(cuda: Cuda) -> Copies:
    return Copies(torch.device("cuda", 0))


def test_copies_to_and_from_the_device_hold_up_nothing(cuda: Cuda, copies: Copies) -> None:
    source = Tensor(cuda)
    made = cuda.compute.do()
    copy: HostCopy = copies.to_host(source)  # type: ignore[arg-type]
    (copied,) = copy.tensor.copied  # type: ignore[attr-defined]
    assert made.before(copied)
    assert not copied.before(cuda.compute.do())
    assert cuda.current is cuda.compute
    event = copy._done  # type: ignore[attr-defined]
    assert copied.before(event)
    assert event.blocking
    assert not event.waited
    # Until then the memory must not be given to others.
    assert copy._source is source  # type: ignore[attr-defined]
    copy.wait()
    assert event.waited
    assert copy._source is None  # type: ignore[attr-defined]
    computed = cuda.compute.do()
    brought: Tensor = copies.bring(Tensor(cuda))  # type: ignore[assignment, arg-type]
    (copied,) = brought.copied
    assert not computed.before(copied)
    assert not copied.before(cuda.compute.do())
    copies.admit([brought])  # type: ignore[list-item]
    assert copied.before(cuda.compute.do())
    assert brought.owner is not cuda.compute
    assert brought.users == [cuda.compute]


def test_copies_overlap_with_all_but_the_use_of_their_tensor(cuda: Cuda, copies: Copies) -> None:
    tensor = Tensor(cuda)
    used = cuda.compute.do()
    since = copies.moment()
    meanwhile = cuda.compute.do()
    copies.to_device(Tensor(cuda), tensor, since)  # type: ignore[arg-type]
    (copied,) = tensor.copied
    assert used.before(copied)
    assert not meanwhile.before(copied)
    assert copied.before(cuda.compute.do())
    since = copies.moment()
    landing = Tensor(cuda)
    brought: Tensor = copies.bring(Tensor(cuda))  # type: ignore[assignment, arg-type]
    copy: HostCopy = copies.to_host(Tensor(cuda))  # type: ignore[arg-type]
    copies.to_device(Tensor(cuda), landing, since)  # type: ignore[arg-type]
    done = [*brought.copied, *copy.tensor.copied, *landing.copied]  # type: ignore[attr-defined]
    assert not any(one.before(other) for one in done for other in done if one is not other)
