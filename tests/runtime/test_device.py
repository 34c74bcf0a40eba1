"""Operations are counted, and copies of a GPU happen after what makes a tensor and before what uses it.

Operations are held against their closed form. Streams and events are stand-ins that keep count of what happened before
what, by vector clocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from autopar.runtime.device import Copies, HostCopy
from autopar.runtime.outcome import ForwardFlops, peak_of


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
