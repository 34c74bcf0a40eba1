"""Outcome: what the ranks bring back from a training run becomes a report and a timeline.

In come the ranks' results, which are plain data: losses, times of steps and actions, most bytes, FLOPs of forwards.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, quantiles
from typing import TypedDict

import torch

from autopar.capture.model.operations import OperationCount
from autopar.errors import UsageError, printable
from autopar.formats.document import least_certain
from autopar.formats.plan import Plan
from autopar.formats.profile import Precision
from autopar.formats.program import Program
from autopar.formats.report import CheckpointTimes, Evaluated, LoadingTimes, RankTimes, Report, StepTimes
from autopar.formats.timeline import OwnTimes, Timeline, TimeUse, medians, own_times, time_use_between
from autopar.hardware.gpus import find
from autopar.runtime.checkpoint.weights import StoredFile
from autopar.runtime.checkpoint.writer import SaveResult
from autopar.schedules.order import in_flight
from autopar.schedules.repetition import filling, written_out


class StepResults(TypedDict):
    """What a rank's steps gave; lists are by step. Times are of repetitions, where these have several mini-batches."""

    loss: list[float]
    count: list[float]
    terms: list[dict[str, float]]
    """Its parts of the terms of a loss that has several, by name."""
    starts_s: list[float]
    ends_s: list[float]
    pauses_s: list[float]
    """How long something else was done before."""
    evaluations: Mapping[int, float]
    """Losses by the number of steps trained."""
    times_s: dict[str, list[tuple[float, float]]]
    """Step -> start and end of every action, for the last steps."""
    loading_s: dict[str, list[tuple[float, float]]]
    """Step -> when the rank waited for its mini-batch, for the same steps."""
    loading_work_s: list[float]
    """Seconds in which samples were read and collated for it."""
    gradient_norm: list[float | None]
    overflow: list[bool]
    layers_s: dict[str, tuple[float, float]]
    """Layer -> median seconds forward and backward, where layers were timed."""
    forward_flops: int
    """Of all forwards of a step, where the device's peak is known."""
    peak_flops_per_s: float | None


class RankResult(StepResults):
    """What a rank brings back from a run."""

    rank: int
    host: int
    """The rank that leads its host."""
    loaders: int
    """Of its host."""
    stages: list[int]
    replica: int
    backend: str
    """What carried tensors between the ranks."""
    peak_bytes: int
    peak_kind: str
    samples: int
    """In the dataset; 0 where this rank does not read it."""
    notes: list[str]
    """What whoever reads the report should know."""
    checkpoints: list[SaveResult]
    """Those that were saved, and how that went."""
    buffers_bytes: int
    """What their copies take of the host's memory."""
    saved_files: list[StoredFile]
    """Files of trained weights that this rank wrote."""


class Steps:
    """The steps of a run, from what the ranks bring back.

    The first step, which allocates memory and opens connections, counts for nothing where there are others.
    """

    def __init__(self, program: Program, results: Sequence[RankResult], span: int = 1) -> None:
        """Take them in; ``span`` is how many mini-batches end at a time."""
        self.program, self.results, self._span = program, results, span
        ends = [max(moments) for moments in zip(*(result["ends_s"] for result in results), strict=True)]
        begin = min(result["starts_s"][0] for result in results)
        # Ranks end pauses together, and some have waited for others.
        pauses_s = [min(each) for each in zip(*(result["pauses_s"] for result in results), strict=True)]
        self._begins_s = [before + pause_s for before, pause_s in zip([begin, *ends], pauses_s, strict=False)]
        self.lengths_s: list[float] = [(end - before) / span for before, end in zip(self._begins_s, ends, strict=True)]
        """A step lasts from the end of the one before it, on the slowest rank, to its own end there."""
        self._steady = self.lengths_s[1:] or self.lengths_s
        recorded = [int(step) for step in results[0]["times_s"]]
        self._recorded_steps = [step for step in recorded if step > 0] or recorded
        self._ends_s = ends

    def times(self) -> StepTimes:
        """Return how the lengths are distributed."""
        several = len(self._steady) > 1
        deciles = quantiles(self._steady, n=10, method="inclusive") if several else 9 * self._steady
        return StepTimes(
            median=median(self._steady),
            p10=deciles[0],
            p90=deciles[8],
            longest=max(self._steady),
            first=self.lengths_s[0],
        )

    @cached_property
    def typical(self) -> int:
        """The recorded step with one after it whose length is nearest to the median; of equal ones the last."""
        middle = median(self._steady)
        return min(
            self._recorded_steps[:-1] or self._recorded_steps,
            key=lambda step: (abs(self.lengths_s[step] - middle), -step),
        )

    def timeline(self, step: int) -> Timeline:
        """Return when the actions of a recorded step ran, from the beginning of the first."""
        return self._timeline(step, min(result["times_s"][str(step)][0][0] for result in self.results))

    def time_use(self, step: int) -> list[TimeUse]:
        """Return where the ranks' time went in a recorded step."""
        steps = [self._timeline(each, 0.0) for each in self._recorded_steps if each in (step, step + 1)]
        found = time_use_between(steps, self._begins_s[step], self._ends_s[step])
        return [TimeUse(*(seconds / self._span for seconds in each)) for each in found]

    def _timeline(self, step: int, begin: float) -> Timeline:
        times = [result["times_s"][str(step)] for result in self.results]
        timeline = Timeline("measured")
        for rank, actions in enumerate(self.program.ranks):
            for action, (start, end) in zip(actions, times[rank], strict=True):
                timeline.add(rank, action, start - begin, end - begin)
            for start, end in self.results[rank]["loading_s"][str(step)]:
                timeline.loading.append((rank, start - begin, end - begin))
        return timeline

    def loading(self, where: Sequence[TimeUse]) -> LoadingTimes:
        """Return what loading took, given where the time of a typical step went."""
        work: dict[tuple[int, int], float] = defaultdict(float)
        for each in self.results:
            # Of ranks that load for themselves, every stage has its own read the samples.
            place = each["host"], 0 if each["loaders"] else each["stages"][0]
            work[place] += median(each["loading_work_s"][1:] or each["loading_work_s"]) / self._span
        step_s, waiting_s, work_s = median(self._steady), max(each.loading_s for each in where), max(work.values())
        needed = 0
        if waiting_s > max(_NOTICED * step_s, _NOTICED_S):
            needed = math.ceil(_SPARE * work_s / max(step_s - waiting_s, _LEAST_REST * step_s))
        loaders = max(each["loaders"] for each in self.results)
        return LoadingTimes(loaders=loaders, waiting_s=waiting_s, work_s=work_s, loaders_needed=needed)

    def own_times(self) -> OwnTimes:
        """Return the median of every action by itself over the recorded steps."""
        return medians(own_times(self.timeline(step)) for step in self._recorded_steps)

    def overhead_s(self) -> float:
        """Return the median, of the rank where it is largest, of what recorded steps take before their first action."""
        found = (
            median(result["times_s"][str(step)][0][0] - result["starts_s"][step] for step in self._recorded_steps)
            for result in self.results
        )
        return max(0.0, *found)


_NOTICED, _NOTICED_S = 0.02, 0.001
"""The share of a step, and the seconds, that are waited for a mini-batch before anything is said of it."""
_SPARE = 1.1
"""How much faster than steps loaders should be, so that a slow sample is not waited for."""
_LEAST_REST = 0.01
"""The share of a step that at least is no waiting."""
_BACKWARD_FLOPS = 2
"""Of a forward's: the products that make the gradients of inputs and of weights."""


@dataclass(frozen=True)
class Outcome:
    """What a training run gives."""

    report: Report
    timeline: Timeline
    """The actions of a step of median length."""
    own_times: OwnTimes
    """Seconds of every action by itself."""
    overhead_s: float
    """What a step takes before its first action."""
    layers_s: tuple[Mapping[str, tuple[float, float]], ...]
    """By rank, the seconds of its layers forward and backward inside actions, where they were timed."""


def outcome_of(
    plan: Plan,
    program: Program,
    results: Sequence[RankResult],
    initial_weights: str,
    notes: Sequence[str] = (),
    first_step: int = 0,
) -> Outcome:
    """Put the ranks' results, in rank order, together; ``first_step`` is the number of their first."""
    steps = Steps(program, results, plan.span)
    report = _report(plan, steps, initial_weights, notes, first_step)
    layers_s = tuple(result["layers_s"] for result in results)
    return Outcome(report, steps.timeline(steps.typical), steps.own_times(), steps.overhead_s(), layers_s)


def loss_of(parts: Sequence[tuple[float, float]]) -> float:
    """Return a mini-batch's loss from the ranks' parts: (part of the mean, 0), or (sum, count).

    >>> loss_of([(0.5, 0), (0.25, 0)]), loss_of([(6.0, 4), (2.0, 4)])
    (0.75, 1.0)
    """
    total, count = sum(part for part, _ in parts), sum(count for _, count in parts)
    return total / count if count else total


def loss_of_step(plan: Plan, parts: Mapping[int, tuple[float, float]]) -> float:
    """Return a step's loss from ranks' parts: of several pipelines, the mean of their mini-batches'."""
    own = [
        [part for rank, part in sorted(parts.items()) if plan.ownership.ranks[rank].stage in stages]
        for stages in plan.stages_by_pipeline
    ]
    return sum(map(loss_of, own)) / len(own)


def _report(plan: Plan, steps: Steps, initial: str, notes: Sequence[str], first_step: int) -> Report:
    results, times, where = steps.results, steps.times(), steps.time_use(steps.typical)
    losses = [zip(result["loss"], result["count"], strict=True) for result in results]
    model_flops, utilisation = _utilisation(results, times.median, plan.span)
    # A stage's peak has all that its rank holds.
    planned = plan.predicted.peak_bytes if any(plan.predicted.peak_bytes) else ()
    return Report(
        model=plan.model.source,
        plan_sha256=hashlib.sha256(plan.dumps().encode()).hexdigest(),
        device=plan.device_type,
        backend=results[0]["backend"],
        torch=torch.__version__,
        ranks=len(results),
        steps=len(results[0]["loss"]),
        first_step=first_step,
        loss=tuple(loss_of_step(plan, dict(enumerate(each))) for each in zip(*losses, strict=True)),
        losses=_terms(results, len(plan.stages_by_pipeline)),
        evaluations=_evaluations(results[0]),
        step_s=times,
        predicted_step_s=plan.predicted.step_s,
        error=plan.predicted.step_s / times.median - 1,
        predicted_compute=least_certain(plan.predicted.compute),
        predicted_communication=plan.predicted.communication,
        samples_per_s=plan.step_samples / times.median,
        peak_bytes=tuple(result["peak_bytes"] for result in results),
        peak_kind="allocated" if plan.device_type == "cuda" else "resident",
        predicted_peak_bytes=tuple(max(planned[stage] for stage in each["stages"]) for each in results if planned),
        bubble=max(0.0, 1 - sum(each.compute_s + each.update_s for each in where) / sum(map(sum, where))),
        rank_times=_rank_times(plan, steps, where),
        model_flops=model_flops,
        flops_utilisation=utilisation,
        initial_weights=initial,
        loading=steps.loading(where),
        checkpoints=_checkpoint_times(results),
        gradient_norm=tuple(results[0]["gradient_norm"]) if any(results[0]["gradient_norm"]) else (),
        overflows=sum(results[0]["overflow"]),
        notes=tuple(map(printable, (*plan.caveats, *notes))),
    )


def _evaluations(result: RankResult) -> tuple[Evaluated, ...]:
    losses = {int(step): loss for step, loss in result["evaluations"].items()}
    return tuple(Evaluated(step=step, loss=losses[step]) for step in sorted(losses))


def _terms(results: Sequence[RankResult], pipelines: int) -> dict[str, tuple[float, ...]]:
    """Return the terms of every step's loss by name, each the sum of the ranks' parts, and the mean of pipelines."""
    names = dict.fromkeys(name for result in results for step in result["terms"] for name in step)
    steps = list(zip(*(result["terms"] for result in results), strict=True))
    return {name: tuple(sum(each.get(name, 0.0) for each in step) / pipelines for step in steps) for name in names}


def _checkpoint_times(results: Sequence[RankResult]) -> CheckpointTimes | None:
    saved = [SaveResult(*each) for each in results[0]["checkpoints"]]
    if not saved:
        return None
    return CheckpointTimes(
        steps=tuple(each.step for each in saved if each.failure is None),
        failures=tuple(f"step {each.step}: {each.failure}" for each in saved if each.failure is not None),
        pause_s=median(each.pause_s for each in saved),
        busy_s=median(each.busy_s for each in saved),
        buffers_bytes=tuple(result["buffers_bytes"] for result in results),
    )


def _rank_times(plan: Plan, steps: Steps, where: Sequence[TimeUse]) -> tuple[RankTimes, ...]:
    found, whole = [], written_out(steps.program, plan, filling(plan))
    for result, actions, each in zip(steps.results, whole.ranks, where, strict=True):
        stages, depths = tuple(result["stages"]), in_flight(actions)
        found.append(
            RankTimes(
                rank=result["rank"],
                stages=stages,
                replica=result["replica"],
                **each._asdict(),
                in_flight=tuple(depths[stage] for stage in stages),
                predicted_in_flight=tuple(plan.stages[stage].warmup for stage in stages),
            )
        )
    return tuple(found)


def _utilisation(results: Sequence[RankResult], step_s: float, span: int) -> tuple[float | None, float | None]:
    """Return the model's operations of a step, and their share of what the devices' peak makes of one."""
    peaks = [result["peak_flops_per_s"] for result in results]
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(peaks):
        return None, None
    flops = (1 + _BACKWARD_FLOPS) * sum(result["forward_flops"] for result in results) / span
    return float(flops), flops / (step_s * sum(known))


class ForwardFlops:
    """Watches layers run forward, and counts the operations of their matrix products, convolutions and attention."""

    def __init__(self) -> None:
        self.total = 0
        """Multiplications and additions so far."""

    def __call__(self, layer: str, run: Callable[[], Sequence[torch.Tensor]], again: bool) -> Sequence[torch.Tensor]:
        """Run a layer forward, and count if it is the first time."""
        if again:
            return run()
        with OperationCount() as counter:
            outputs = run()
        self.total += counter.products + counter.attention
        return outputs


def peak_of(device: torch.device, precision: Precision) -> float | None:
    """Return the operations per second that a device can do; none where that is not known, as of a CPU."""
    if device.type != "cuda":
        return None
    try:
        return find(torch.cuda.get_device_name(device)).flops_per_s(precision)
    except UsageError:
        return None
