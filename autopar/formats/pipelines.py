"""Pipelines: those of a plan that train one model together, and which layers their ranks have in common.

In come a plan's stages, one pipeline's behind the other's; out comes every pipeline as a plan of its own. Stages, ranks
and devices are counted through all pipelines, so that each has one number wherever it is named.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from autopar.formats.document import ascending, each_once, fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autopar.formats.plan import Crossing, Plan, SharedParameter, Stage
    from autopar.formats.prediction import Prediction
    from autopar.ownership import Ownership
    from autopar.policies import Policy


BY_STAGE = ("peak_bytes", "limit_bytes", "forward_s", "backward_s", "compute")
"""What predictions have a number, or a word, of for every stage."""


class SharedLayers(NamedTuple):
    """Layers that the same ranks hold, one of each pipeline."""

    ranks: tuple[int, ...]
    """By pipeline, ascending."""
    layers: tuple[str, ...]


class Pipelines:
    """What a plan says of its pipelines, which are one in most plans."""

    if TYPE_CHECKING:
        pipelines: tuple[int, ...]
        stages: tuple[Stage, ...]
        tensors: tuple[Crossing, ...]
        tied: tuple[SharedParameter, ...]
        predicted: Prediction
        weight_policy: str
        wave: int | None
        staleness: int | None
        eager: bool
        batch: int
        micro_batches: int
        divisible: bool

        @cached_property
        def ownership(self) -> Ownership: ...

        @property
        def span(self) -> int: ...

        @property
        def policy(self) -> Policy: ...

        def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...

    def check_pipelines(self) -> None:
        """Several pipelines place the same layers in one order."""
        if sum(self.pipelines) not in (0, len(self.stages)) or len(self.pipelines) == 1:
            wanted = f"two pipelines or more have the {len(self.stages)} stages, found {list(self.pipelines)}"
            fault("pipelines", wanted if self.pipelines[1:] else "a single pipeline has all stages, and is left out")
        if self.pipelines and self.divisible:
            fault("divisible", "several pipelines are not priced as papers do")
        waves = self.weight_policy == "wsp"
        for name in ("wave", "staleness"):
            if (getattr(self, name) is not None) != waves:
                fault(name, "wsp has waves and a bound on their staleness, and no other policy does")
        if self.eager and not waves:
            fault("eager", "wsp has pulls, and no other policy does")
        if bool(self.pipelines) != waves:
            fault("pipelines", "several pipelines train under wsp, and a single one under no such policy")
        if waves and max(stage.warmup for stage in self.stages) > (self.wave or 1):
            fault("wave", f"{self.wave} mini-batches are fewer than a stage has in flight")
        if waves and self.micro_batches > 1:
            fault("micro_batches", f"wsp has whole mini-batches in flight, found {self.micro_batches} parts of each")
        first, *others = [[name for at in own for name in self.stages[at].layers] for own in self.stages_by_pipeline]
        for at, layers in enumerate(others):
            if layers != first:
                fault(f"pipelines[{at + 1}]", "a pipeline has not the layers of the first one, in their order")

    @property
    def stages_by_pipeline(self) -> tuple[range, ...]:
        """The stages of every pipeline; of a plan with one, all."""
        ends = accumulate(self.pipelines or (len(self.stages),), initial=0)
        return tuple(range(*pair) for pair in pairwise(ends))

    def pipeline_of(self, stage: int) -> int:
        """Return which pipeline a stage is of."""
        return next(at for at, stages in enumerate(self.stages_by_pipeline) if stage in stages)

    def place_of(self, stage: int) -> str:
        """Return a stage in words, with its pipeline where there are several."""
        return f"pipeline {self.pipeline_of(stage)}, stage {stage}" if self.pipelines else f"stage {stage}"

    def tensors_of(self, stage: int) -> tuple[Crossing, ...]:
        """Return the tensors that cross between the stages of a stage's pipeline."""
        own = self.stages_by_pipeline[self.pipeline_of(stage)]
        return tuple(each for each in self.tensors if each.producer in own) if self.pipelines else self.tensors

    def number_of(self, step: int, stage: int) -> int:
        """Return which of the run's mini-batches a stage has in a step: pipelines take them in turn."""
        return step * len(self.stages_by_pipeline) + self.pipeline_of(stage) if self.pipelines else step

    @cached_property
    def separate(self) -> tuple[Self, ...]:
        """Every pipeline as a plan of its own, whose stages count from 0, on the same devices; it alone, if one."""
        return tuple(map(self._alone, self.stages_by_pipeline)) if self.pipelines else (self,)

    def _alone(self, own: range) -> Self:
        some = slice(own.start, own.stop)
        tensors = (each for each in self.tensors if each.producer in own)
        predicted = {name: getattr(self.predicted, name)[some] for name in BY_STAGE}
        return self.model_copy(
            update={
                "pipelines": (),
                "stages": self.stages[some],
                "predicted": self.predicted.model_copy(update=predicted | {"binding": ()}),
                "tensors": tuple(each.moved(-own.start) for each in tensors),
                "tied": tuple(each.moved(-own.start) for each in self.tied if each.stages[0] in own),
            }
        )

    @cached_property
    def shared_layers(self) -> tuple[SharedLayers, ...]:
        """Layers by the ranks that hold them, one of each pipeline, in the model's order; none of a single one."""
        found: dict[tuple[int, ...], list[str]] = {}
        placed: list[dict[str, int]] = []
        for stages in self.stages_by_pipeline if self.pipelines else ():
            ranks = ((self.ownership.holders(stage)[0].rank, self.stages[stage].layers) for stage in stages)
            placed.append({layer: rank for rank, layers in ranks for layer in layers})
        for layer in placed[0] if placed else ():
            found.setdefault(tuple(each[layer] for each in placed), []).append(layer)
        return tuple(SharedLayers(ranks, tuple(layers)) for ranks, layers in found.items())

    @property
    def step_samples(self) -> int:
        """Samples of a step, in which every pipeline has a mini-batch."""
        return self.batch * len(self.stages_by_pipeline)

    @property
    def counts_apart(self) -> bool:
        """Whether each rank that makes losses divides them by what its own mini-batch counts, which it has all of."""
        return self.span > 1 or bool(self.pipelines)

    @property
    def first_pull(self) -> int:
        """How many mini-batches after the pipeline's fill the first comes that pulls."""
        return self.policy.first_pull

    @property
    def early_pulls(self) -> int:
        """How many pulls come before the first that waits for waves of other pipelines."""
        return self.policy.early_pulls

    def check_flow(self) -> None:
        """Tensors and shared parameters go on to later stages, of several pipelines within each."""
        # Of several pipelines, each has its own, which do not leave it.
        names, stops = list[str](), [own.stop for own in self.stages_by_pipeline for _ in own]
        for index, tensor in enumerate(self.tensors):
            at, stop = f"tensors[{index}]", stops[min(tensor.producer, len(stops) - 1)]
            ascending(tensor.consumers, f"{at}.consumers", "stages")
            if tensor.consumers[0] <= tensor.producer or tensor.consumers[-1] >= stop:
                fault(f"{at}.consumers", f"must lie behind the producer {tensor.producer} and below {stop}")
            self._check_sequence(tensor, at)
            names.append(f"{tensor.name} before stage {stop}" if self.pipelines else tensor.name)
        each_once(names, "tensors[{}].name", "tensor")
        shared = list[str]()
        for index, tied in enumerate(self.tied):
            ascending(tied.stages, f"tied[{index}].stages", "stages")
            stop = stops[min(tied.stages[0], len(stops) - 1)]
            if tied.stages[-1] >= stop:
                fault(f"tied[{index}].stages", f"must lie below {stop}, found {tied.stages[-1]}")
            shared.append(f"{tied.parameter} before stage {stop}" if self.pipelines else tied.parameter)
        each_once(shared, "tied[{}].parameter", "parameter")

    def _check_sequence(self, tensor: Crossing, at: str) -> None:
        """A tensor goes in parts between teams of one size alone, cut alike on all of them."""
        placed = [self.stages[stage] for stage in (tensor.producer, *tensor.consumers)]
        dims = {stage.sequence_dims.get(tensor.name) for stage in placed}
        if dims != {None} and (len(dims) > 1 or len({stage.tensor_parallel for stage in placed}) > 1):
            fault(f"{at}.name", f"{tensor.name!r} is cut along its sequence, and not alike in all stages that have it")


def joined(plans: Sequence[Plan], **differing: Any) -> Plan:  # noqa: ANN401
    """Return a plan whose pipelines are those of some plans, on different devices; ``differing`` are other fields."""
    first, starts = plans[0], list(accumulate((len(each.stages) for each in plans), initial=0))
    moved = list(zip(plans, starts, strict=False))
    found = {name: tuple(value for each in plans for value in getattr(each.predicted, name)) for name in BY_STAGE}
    own = {
        "pipelines": tuple(len(each.stages) for each in plans),
        "stages": tuple(stage for each in plans for stage in each.stages),
        "tensors": tuple(tensor.moved(start) for each, start in moved for tensor in each.tensors),
        "tied": tuple(tied.moved(start) for each, start in moved for tied in each.tied),
        "predicted": first.predicted.model_copy(update=found | {"binding": ()}),
    }
    return type(first)(**{name: getattr(first, name) for name in type(first).model_fields} | own | differing)
