"""A device may be behind its host: what the host asks of it waits for as little as it can, and says the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from autopar.errors import TrainingError
from autopar.formats.program import Action
from autopar.options.train import TrainSettings
from autopar.runtime import clocks
from autopar.runtime.clocks import Clock, CudaClock
from autopar.runtime.data import Batches, Loader
from autopar.runtime.execute import Executor
from autopar.runtime.loss import LossTally, StepRecord
from autopar.runtime.start.worker import StepClock
from autopar.schedules.repetition import Repetition
from drawn_models import equals_plain, model_case
from fake_copies import FakeCopies
from training_cases import same_bits


@pytest.mark.parametrize("parts", [[[0.5], [0.25], [2.0]], [[3.0, 2.0], [1.0, 0.0]], []])
def test_losses_that_are_brought_settle_as_others_do_after_what_is_done_meanwhile(parts: list[list[float]]) -> None:
    copies, plainly = FakeCopies(), LossTally(3, 12)
    copies.going.clear()
    # Nothing is brought before: whoever waited first would wait for ever.
    brought = LossTally(3, 12, (), copies, copies.going.set)
    for step in range(2):
        plainly.begin_step(step)
        brought.begin_step(step)
        for part in parts:
            outputs = [torch.tensor(value + step) for value in part]
            plainly.add(step, outputs)
            brought.add(step, outputs)
        assert brought.total(step) == plainly.total(step)


@pytest.mark.reliability(11, 13)
def test_losses_count_by_rows_and_a_gpu_without_room_says_so() -> None:
    tally = LossTally(1, 2, (), FakeCopies())
    for value in (1.0, float("nan")):
        tally.add(0, [torch.tensor(value)])
    with pytest.raises(TrainingError, match="not finite in micro-batch 1; nothing was updated"):
        tally.total(0)
    equals_plain("dropout", model_case("dropout").plan((1, 2), 2, 3))
    executor = object.__new__(Executor)
    predicted = Mock(peak_bytes=(3 << 30, 2 << 30), limit_bytes=())
    settings = Mock(rank=2, device=torch.device("cpu"))
    settings.plan.predicted, settings.plan.place_of = predicted, "stage {}".format
    executor._settings, executor._repetition = settings, Repetition(5, 4, 6)
    executor.actions = [Action("F", 1, 3)]
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.50 GiB is "
        "free. Including non-PyTorch memory, this process has 77.61 GiB memory in use. If reserved"
    )
    error = executor.error_at(torch.OutOfMemoryError(text), Action("F", 1, 3))
    assert str(error).startswith(
        "rank 2 (stage 1, step 5, F3@1): CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.15 GiB of which 1.50 GiB is free; the process held at most "
    )
    assert str(error).endswith(" MiB, 2,048 MiB of 2,048 MiB were planned")


def test_a_mini_batch_is_loaded_once_and_what_is_wrong_with_it_is_said_when_its_step_begins() -> None:
    all_loaded, copies = list[int](), FakeCopies()

    class Numbered(Loader):
        samples = 8

        def __init__(self) -> None:
            """Of no plan."""

        def load(self, step: int) -> list[dict[str, torch.Tensor]]:
            all_loaded.append(step)
            if step == 3:
                raise TrainingError("step 3 has no samples")
            return [{"x": torch.tensor([step, micro_batch])} for micro_batch in range(2)]

    loader = Numbered()
    batches = Batches(loader, copies)
    for step in range(3):
        loaded = batches.load(step, range(step + 1, 9))
        assert [inputs["x"].tolist() for inputs in loaded] == [[step, 0], [step, 1]]
        assert copies.admitted == 2 * (step + 1)
        batches.look_ahead()
    assert all_loaded == [0, 1, 2, 3]
    with pytest.raises(TrainingError, match="step 3 has no samples"):
        batches.load(3, range(4, 9))
    # Another step than was expected is loaded in its own right.
    batches.look_ahead()
    assert batches.load(5, range(0))[1]["x"].tolist() == [5, 1]
    batches.look_ahead()
    assert all_loaded == [0, 1, 2, 3, 3, 4, 5]


class Device:
    """A device that works through what it was given, and the clock of its host, whose calls take no time."""

    def __init__(self) -> None:
        self.host_s, self.busy_until_s = 100.0, 100.0
        self.waited = 0

    def event(self) -> DeviceEvent:
        return DeviceEvent(self)

    def work(self, seconds: float) -> None:
        self.busy_until_s = max(self.busy_until_s, self.host_s) + seconds


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self.at_s = max(self._device.busy_until_s, self._device.host_s)

    def synchronize(self) -> None:
        self._device.waited += 1
        self._device.host_s = max(self._device.host_s, self.at_s)

    def elapsed_time(self, other: DeviceEvent) -> float:
        assert other.at_s <= self._device.host_s, "the device has not come so far"
        return (other.at_s - self.at_s) * 1e3


def test_a_gpus_clock_waits_only_to_compare_clocks_and_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(clocks, "_event", device.event)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: device.host_s)
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    clock = CudaClock()
    earlier: list[object] = []
    for step in range(40):
        device.host_s += 0.01
        clock.start()
        begin_s = max(device.busy_until_s, device.host_s)
        marks = [clock.mark()]
        for _ in range(3):
            device.work(0.5)
            marks.append(clock.mark())
        if earlier:
            times = clock.resolve(earlier)
            # Of the step before, whose end is this one's beginning: the device is never without work.
            assert times == pytest.approx([begin_s - 1.5 + 0.5 * index for index in range(4)])
        earlier = marks
        compared = 1 + (device.host_s - 100.0) / 10.0
        assert device.waited <= step + compared, "once for each step that is told, and once in ten seconds"


def test_a_step_ends_when_the_device_is_done_and_begins_no_earlier_than_the_one_before_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = itertools.count(10.0, 1.0)
    monkeypatch.setattr("autopar.runtime.start.worker.time.perf_counter", lambda: next(moments))
    ends = [15.0, 19.0, 20.5]
    told: list[int] = []

    def record(step: int) -> StepRecord:
        def tell() -> list[tuple[float, float]]:
            told.append(step)
            return [(ends[step] - 1, ends[step])]

        return StepRecord(pending_times=tell)

    laps = StepClock(10.0, lags=True)
    for step in range(3):
        laps.begin()
        laps.end(record(step))
        assert told == list(range(step)), "no step is asked for before the next was given to the device"
    laps.finish()
    assert laps.starts_s == [0.0, 5.0, 9.0]
    assert laps.ends_s == [5.0, 9.0, 10.5]


def test_training_is_the_same_bit_for_bit_with_a_device_that_may_be_behind(tmp_path: Path) -> None:
    case, plainly, behind = model_case("everything"), tmp_path / "plainly", tmp_path / "behind"
    plan = case.plan((1, 2, 1), 3, 4)
    losses = case.train(plan, plainly, 3)
    records: dict[int, list[StepRecord]] = {}
    lagging = type("LaggingClock", (Clock,), {"lags": True})
    with (
        patch("autopar.runtime.job.copies_of", lambda device: FakeCopies()),
        patch("autopar.runtime.job.clock_of", lambda device: lagging()),
    ):
        assert case.train(plan, behind, 3, TrainSettings(), records) == losses
    same_bits(plan, behind, plainly)
    for record in (each for rank in range(4) for each in records[rank]):
        assert record.pending_times is not None
        assert all(start_s <= end_s for start_s, end_s in record.times_s)
        assert record.pending_times is None
