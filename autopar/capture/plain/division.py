"""Division: how the forward of a whole model is run so that every stage of a plan sees its own shares of rows.

Where all stages divide a micro-batch alike, the model runs once a share. Where they do not, it runs once, and each call
of a module that lies within one stage is run share by share. What the calls of a model look like is found by trying
them out on two and on three rows, and following each forward call by call, so that it is known which layer of a plan
runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture.model.batch import model_arguments, named_tensors, rebuild, row_count, slice_rows
from autopar.capture.model.source import UserModel
from autopar.capture.model.state import preserve_buffers
from autopar.errors import ModelError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.stage import Stage
from autopar.ownership import samples_of

Key = tuple[str, int]
"""A call: the module's path, and how often it has been called in this forward, from 1."""


class LayerTracer:
    """Runs forwards, and knows at every call of a module which layer it belongs to.

    A layer begins with the call that it is named after, ``path`` or ``path@2``, and lasts until the next one begins;
    what the model computes before the first such call belongs to the first layer.
    """

    def __init__(self, model: nn.Module, plan: Plan, user: UserModel) -> None:
        """Take the model, the plan that has its layers, and the file that may list its modules.

        Raises:
            ModelError: the model has no module that a layer of the plan is named after.
        """
        self.model, self._has_loss = model, user.loss is not None
        self._elements = None if user.layers is None else list(user.layers(model))
        self._order = [layer for stage in plan.stages for layer in stage.layers]
        self._stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
        self._paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
        for index, element in enumerate(self._elements or []):
            self._paths.setdefault(id(element), f"layers.{index}")
        self._starts = {} if self._elements is not None else self._first_calls(self._order[1:], user)
        self._counts: Counter[str] = Counter()
        self.layer = self._order[0]

    @property
    def stage(self) -> int:
        """The stage of the layer that runs."""
        return self._stage_of[self.layer]

    def forward(self, batch: object) -> object:
        """Run the model, or the modules that its file lists, on a batch; return its output."""
        self._counts.clear()
        self.switch(self._order[0])
        positional, named = model_arguments(self.model, batch, self._has_loss)
        with self._follow_calls():
            if self._elements is None:
                return self.model(*positional, **named)
            output: object = self._elements[0](*positional, **named)
            for layer, element in zip(self._order[1:], self._elements[1:], strict=True):
                self.switch(layer)
                output = element(tuple(output) if isinstance(output, list) else output)
            return output

    def switch(self, layer: str) -> None:
        """Begin a layer."""
        self.layer = layer

    def arrive(self, key: Key) -> None:
        """Begin the layer that a call starts, if it starts one."""
        if key in self._starts:
            self.switch(self._starts[key])

    def around(
        self,
        module: nn.Module,
        key: Key,
        run: Callable[..., Any],
        arguments: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run one call of a module of the model."""
        self.arrive(key)
        return run(module, *arguments, **kwargs)

    def _first_calls(self, layers: Sequence[str], user: UserModel) -> dict[Key, str]:
        found: dict[Key, str] = {}
        named = dict(self.model.named_modules(remove_duplicate=False))
        for layer in layers:
            # A layer that joins modules begins with the first that it is named after; a module's own name may have a +.
            parts = layer.split("+")
            calls = [_call("+".join(parts[:count])) for count in range(len(parts), 0, -1)]
            path, count = next((call for call in calls if call[0] in named), calls[-1])
            if path not in named:
                raise ModelError(f"{user.path}: the model has no module {path}, which the plan places")
            canonical = self._paths[id(named[path])]
            while (canonical, count) in found:
                # Two names of one module: its next call.
                count += 1
            found[canonical, count] = layer
        return found

    @contextmanager
    def _follow_calls(self) -> Iterator[None]:
        """Let all calls of the model's modules pass through :meth:`around`."""
        run = nn.Module.__call__

        def call(module: nn.Module, *arguments: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            path = self._paths.get(id(module))
            if path is None:
                return run(module, *arguments, **kwargs)
            self._counts[path] += 1
            return self.around(module, (path, self._counts[path]), run, arguments, kwargs)

        with patch.object(nn.Module, "__call__", call):
            yield


def _call(unit: str) -> Key:
    """Return the call that is written ``path`` or ``path@2``.

    >>> _call("norm@2"), _call("norm")
    (('norm', 2), ('norm', 1))
    """
    path, _, again = unit.rpartition("@")
    return (path, int(again)) if path and again.isdigit() else (unit, 1)


ROWS, WHOLE = -1, -2
"""Stand for a dimension where a leaf is an integer that counts rows, or is the same for every share."""
_Dims = tuple[int, ...]
"""For every leaf of arguments or results, the dimension that the samples are, or one of the above."""


class Batch:
    """A micro-batch as ``collate`` gave it."""

    def __init__(self, value: object) -> None:
        """Take it.

        Raises:
            ModelError: it holds something else than tensors, or tensors of different lengths.
        """
        self._value, self.tensors = value, named_tensors(value)
        self.rows = row_count(self.tensors)

    def part(self, start: int, stop: int) -> object:
        """Return some of its rows, in its structure."""
        return rebuild(self._value, slice_rows(self.tensors, start, stop))


@dataclass(frozen=True)
class RowShare:
    """The rows of a micro-batch that one replica of a stage takes."""

    replica: int
    index: int
    """As seeds count shares."""
    start: int
    stop: int


def shares_of(stage: Stage, micro_batch: int) -> tuple[RowShare, ...]:
    """Return the shares of a micro-batch, in row order; of replicas that take turns, one takes all."""
    every = enumerate(samples_of(stage.rows, stage.division))
    having = ((replica, own) for replica, own in every if own.has(micro_batch))
    return tuple(RowShare(replica, replica // own.period, int(own.start), int(own.stop)) for replica, own in having)


@dataclass(frozen=True)
class Pattern:
    """Where the samples are in what a call is given, and in what it makes."""

    argument_dims: _Dims
    result_dims: _Dims

    def share(self, leaves: Sequence[Any], share: RowShare) -> list[Any]:
        """Return one share of what a call is given, as copies: what it writes is not what another share has read."""
        copies: dict[int, torch.Tensor] = {}
        parts = _share(leaves, self.argument_dims, share)
        for place, (leaf, dim) in enumerate(zip(leaves, self.argument_dims, strict=True)):
            if dim >= 0:
                parts[place] = copies.setdefault(id(leaf), parts[place].clone())
        return parts

    def give_back(self, leaves: Sequence[Any], shares: Sequence[Sequence[Any]]) -> None:
        """Write what the shares of a call wrote of their copies into what it was given."""
        for leaf, dim, copies in zip(leaves, self.argument_dims, zip(*shares, strict=True), strict=True):
            if dim >= 0 and any(copy._version for copy in copies):
                leaf.copy_(torch.cat(copies, dim))


def join_results(results: Sequence[Any], dims: _Dims) -> Any:  # noqa: ANN401
    """Join the results of shares along the samples."""
    flat = [tree_flatten(result) for result in results]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [column[0] if dim < 0 else torch.cat(column, dim) for column, dim in zip(columns, dims, strict=True)]
    return tree_unflatten(leaves, flat[0][1])


def result_share(result: Any, dims: _Dims, share: RowShare) -> Any:  # noqa: ANN401
    """Return one share of a whole result."""
    leaves, structure = tree_flatten(result)
    return tree_unflatten(_share(leaves, dims, share), structure)


def _share(leaves: Sequence[Any], dims: _Dims, share: RowShare) -> list[Any]:
    rows = share.stop - share.start
    parts = []
    for leaf, dim in zip(leaves, dims, strict=True):
        part = leaf.narrow(dim, share.start, rows) if dim >= 0 else leaf
        parts.append(rows if dim == ROWS else part)
    return parts


@dataclass(frozen=True)
class Division:
    """How forwards are run."""

    share_stage: int | None = None
    """The stage by whose shares the whole model is run; none: on whole micro-batches."""
    splits: dict[Key, Pattern] = field(default_factory=dict)
    """Calls that are run share by share."""
    written_buffers: dict[int, list[str]] = field(default_factory=dict)
    """Stage -> names of the buffers that its forward writes."""
    output: _Dims | None = None
    """Of the model's output, if its samples can be told."""


def divide(build: Callable[[], nn.Module], plan: Plan, user: UserModel, batch: Batch) -> Division:
    """Find how a model's forward is run by the shares of a plan; what ``build`` returns is left as it was.

    Raises:
        UsageError: stages divide micro-batches differently, and one does what cannot be divided; names the layer.
    """
    if all(stage.replicas == 1 for stage in plan.stages):
        return Division()
    calls, patterns, output = _record_calls(build(), plan, user, batch)
    ranges = [tuple((share.start, share.stop) for share in shares_of(stage, 0)) for stage in plan.stages]
    if len(set(ranges)) == 1:
        return Division(0, {}, calls.written_buffers, output)
    several = {index for index, each in enumerate(ranges) if len(each) > 1}
    splits = {key: pattern for key, (stage, pattern) in patterns.items() if stage in several and pattern}
    obstacles = [(layer, stage) for layer, stage in calls.obstacles(splits) if stage in several]
    carried = user.loss is None and len(plan.stages) - 1 in several
    if not obstacles and not carried:
        return Division(None, splits, calls.written_buffers, output)
    sensitive = calls.sensitive | ({len(plan.stages) - 1} if carried else set())
    if len({ranges[stage] for stage in sensitive}) == 1:
        return Division(min(sensitive), {}, calls.written_buffers, output)
    if not obstacles:
        return Division(None, splits, calls.written_buffers, output)
    layer, stage = obstacles[0]
    raise UsageError(
        f"layer {layer} (stage {stage}) draws random numbers or keeps statistics in code that no single module of its "
        "stage runs, and stages divide micro-batches differently: plain training cannot be divided so; put that code "
        "into a module, or plan with as many replicas of every stage"
    )


@dataclass
class _Call:
    """One call of a module, as it was seen."""

    stage: int
    parent: _Call | None
    argument_leaves: list[Any]
    end: int = -1
    result_leaves: list[Any] = field(default_factory=list)
    side_effects: list[tuple[str, int]] = field(default_factory=list)
    """Layers and stages in which the call's own code drew or wrote, or normalised a batch."""

    @property
    def outermost(self) -> bool:
        """Whether it lies within one stage, and the call that it is part of does not."""
        return self.stage == self.end and (self.parent is None or self.parent.stage != self.parent.end)


class _CallRecorder(LayerTracer):
    """A walk that notes what calls are given and make, and where random numbers are drawn and buffers written."""

    def __init__(self, model: nn.Module, plan: Plan, user: UserModel) -> None:
        super().__init__(model, plan, user)
        self.calls: dict[Key, _Call] = {}
        self._top = _Call(0, None, [])
        """What runs outside of all calls."""
        self._writing_stages: dict[str, int] = {}
        self._now = self._top
        self._generator = torch.get_rng_state()
        self._buffers = {name: (value, value._version, value.clone()) for name, value in model.named_buffers()}

    def switch(self, layer: str) -> None:
        self._look()
        super().switch(layer)

    def around(self, module: nn.Module, key: Key, run: Callable[..., Any], arguments: Any, kwargs: Any) -> Any:  # noqa: ANN401
        self._look()
        self.arrive(key)
        before, call = self._now, _Call(self.stage, self._now, _leaves((arguments, kwargs)))
        self.calls[key] = self._now = call
        if isinstance(module, _BatchNorm) and module.training:
            call.side_effects.append((self.layer, self.stage))
        made = run(module, *arguments, **kwargs)
        self._look()
        call.end, call.result_leaves, self._now = self.stage, _leaves(made), before
        return made

    def _look(self) -> None:
        """Note what was drawn and written since the last look, by the call that is running."""
        # Batch normalisation counts no version of the statistics that it writes, and what is written may be what was.
        for name, value in self.model.named_buffers():
            before, version, copy = self._buffers[name]
            if value is not before or value._version != version or not torch.equal(value, copy):
                self._buffers[name] = value, value._version, value.clone()
                self._writing_stages.setdefault(name, self.stage)
                self._now.side_effects.append((self.layer, self.stage))
        state = torch.get_rng_state()
        if not torch.equal(state, self._generator):
            self._generator = state
            self._now.side_effects.append((self.layer, self.stage))

    @property
    def written_buffers(self) -> dict[int, list[str]]:
        """Names of written buffers, by stage."""
        found: dict[int, list[str]] = {}
        for name, stage in self._writing_stages.items():
            found.setdefault(stage, []).append(name)
        return found

    @property
    def sensitive(self) -> set[int]:
        """Stages whose results depend on how they divide rows."""
        return {stage for call in (self._top, *self.calls.values()) for _, stage in call.side_effects}

    def obstacles(self, splits: dict[Key, Pattern]) -> list[tuple[str, int]]:
        """Return the layers, with their stages, that draw or write outside of the calls that are split."""
        covered = {id(self.calls[key]) for key in splits}
        found = list(self._top.side_effects)
        for call in self.calls.values():
            above: _Call | None = call
            while above is not None and id(above) not in covered:
                above = above.parent
            found += call.side_effects if above is None else []
        return found


def _record_calls(
    model: nn.Module, plan: Plan, user: UserModel, batch: Batch
) -> tuple[_CallRecorder, dict[Key, tuple[int, Pattern | None]], _Dims | None]:
    """Return a walk, its outermost calls in one stage (the stage, and where the samples are, if clear), its output."""
    whole = {name: torch.cat([tensor] * 3)[:3] for name, tensor in batch.tensors.items()}
    three = Batch(rebuild(batch.part(0, 0), whole))
    walks, outputs = [], []
    with preserve_buffers(model):
        for rows in (2, 3):
            walks.append(_CallRecorder(model, plan, user))
            outputs.append(_leaves(walks[-1].forward(three.part(0, rows))))
            walks[-1].switch(walks[-1].layer)
    small, large = walks
    patterns = {
        key: (call.stage, _pattern(small.calls.get(key), call)) for key, call in large.calls.items() if call.outermost
    }
    return large, patterns, _dims(*outputs)


def _pattern(small: _Call | None, large: _Call) -> Pattern | None:
    if small is None:
        return None
    arguments = _dims(small.argument_leaves, large.argument_leaves)
    results = _dims(small.result_leaves, large.result_leaves)
    if arguments is None or results is None:
        return None
    results_and_dims = zip(large.result_leaves, results, strict=True)
    if any(isinstance(leaf, torch.Size) and dim == WHOLE for leaf, dim in results_and_dims):
        return None
    return Pattern(arguments, results)


def _leaves(value: object) -> list[Any]:
    """Return shapes of tensors, and other leaves as they are."""
    return [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_flatten(value)[0]]


_PLAIN = (bool, float, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def _dims(small: Sequence[Any], large: Sequence[Any]) -> _Dims | None:
    """Return where the samples are, from the same leaves for two and for three rows; None if that is not clear."""
    if len(small) != len(large):
        return None
    found = [_dim(*pair) for pair in zip(small, large, strict=True)]
    return None if None in found else tuple(dim for dim in found if dim is not None)


def _dim(small: Any, large: Any) -> int | None:  # noqa: ANN401
    if isinstance(small, torch.Size) and isinstance(large, torch.Size):
        differ = [(at, pair) for at, pair in enumerate(zip(small, large, strict=False)) if pair[0] != pair[1]]
        if len(small) != len(large) or len(differ) > 1 or (differ and differ[0][1] != (2, 3)):
            return None
        return differ[0][0] if differ else WHOLE
    if isinstance(small, _PLAIN) or callable(small):
        return WHOLE if small is large or small == large else None
    if isinstance(small, int) and isinstance(large, int):
        return WHOLE if small == large else ROWS if (small, large) == (2, 3) else None
    return None
