"""Follower: what a script changes between steps, found before the next one, and followed by its job on all ranks.

    weights["aux"] = 0.1 * epoch; model.dropout.p = 0.2; model.backbone.eval(); model.head.requires_grad_(False)
    job.step(batch)  # as in the script's own loop

In come the script's model and what was captured of it. Numbers that forward and loss read, and modes of modules, are
captured: where one has changed, the model is captured again, and the layers compute what the new graph does, with the
parameters that are there. A graph is kept with what was read when it was captured, so that going back is free. Buffers
that no forward writes are copied, and parameters that are trained can be frozen, and trained again.

What cannot be followed is refused on all ranks before any of them acts: other tensors between layers, parameters that
were not trained from the start, and parameters that the script writes, for the job trains its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar.capture.cache.recall import capture_to_keep
from autopar.capture.graph import LayerGraph
from autopar.capture.layers.build import running_statistics
from autopar.capture.layers.export import capture
from autopar.capture.layers.losses import check_loss, counted_loss
from autopar.capture.model.batch import given_model
from autopar.capture.model.changes import Readings
from autopar.capture.model.meta import release
from autopar.capture.model.python_state import Path, roots_of
from autopar.capture.model.source import UserModel
from autopar.capture.model.state import deep_copy, preserve_modes
from autopar.errors import AutoparError, FileError, TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.runtime.job import Job
from autopar.runtime.stage.layers import AGAIN, check_shares, rewritable
from autopar.runtime.start.agreement import Agreement, digest_of
from autopar.runtime.start.workspace import fit_to_plan

MOST_KEPT = 16
"""Graphs."""
_MANY = 4
"""Times that a model is captured before it is said how it need not be."""


class Capturing:
    """Captures a script's model as it is, for a plan."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batch: object,
        functions: Mapping[str, Callable[..., object] | None],
        *,
        checks_loss: bool,
    ) -> None:
        """Take what is captured; ``checks_loss`` says whether its loss must not depend on how batches are divided."""
        self._model, self._plan, self._batch, self._functions = model, plan, batch, functions
        self._checks_loss = checks_loss

    def first(self) -> tuple[UserModel, LayerGraph, Readings]:
        """Return a description of the model, its graph as the plan has it, and what was read for it."""
        if self._batch is None:
            raise UsageError("was given no batch, and every rank needs one to begin with; or give materialize() one")
        model, plan, functions = self._model, self._plan, self._functions
        if plan.counts_labels and functions.get("loss") is None:
            functions = {**functions, "loss": counted_loss(model)}
        user = given_model(model, self._batch, **functions)
        self._user = replace(user, ignored_state=plan.ignored_state, joins=plan.model.joins)
        with preserve_modes(model.modules()):
            planned = [name for stage in plan.stages for name in stage.layers]
            captured = capture_to_keep(self._user, model, recalls=True, layers=planned, checked=self._checks_loss)
            graph = captured.graph
            self._portable = graph.portable
            if not captured.found:
                self.check(graph)
                captured.keep()
            if not graph.portable:
                # Its layers are the model's own modules, whose parameters are about to be replaced.
                graph = capture(self._user, deep_copy(model, sharing=True))
                for layer in graph.layers:
                    # Those of its stage a rank is given, and the others it need not hold.
                    release(layer)
        return self._user, fit_to_plan(graph, plan, self._user), self._readings(graph)

    def _readings(self, graph: LayerGraph) -> Readings:
        return Readings(roots_of(self._model, self._user.loss), graph.names_read, self._plan.ignored_state)

    def again(self) -> tuple[Readings, LayerGraph]:
        """Return what is read now, and the graph of the model as it is."""
        with preserve_modes(self._model.modules()):
            model = self._model if self._portable else deep_copy(self._model, sharing=True)
            graph = capture(self._user, model)
        return self._readings(graph), fit_to_plan(graph, self._plan, self._user)

    def check(self, graph: LayerGraph) -> None:
        """Check that the loss does not depend on how a mini-batch is divided, where that is to be checked.

        Raises:
            ModelError: it does.
        """
        self._portable = graph.portable
        if self._checks_loss and not graph.on_meta:
            with preserve_modes(self._model.modules()):
                check_loss(self._user, self._model, graph, accept_loss=False)


class Captured(NamedTuple):
    """A graph, and what was read when it was captured."""

    readings: Readings
    graph: LayerGraph
    identity: str


_TENSORS = ("_parameters", "_buffers")


class _Place(NamedTuple):
    """Where a module of the script's model holds a tensor."""

    table: dict[str, Any]
    key: str
    name: str
    """In the model."""


def _places(model: nn.Module, table: str) -> list[_Place]:
    """Return the places of one of ``_TENSORS``."""
    return [
        _Place(vars(module)[table], key, f"{path}.{key}".lstrip("."))
        for path, module in model.named_modules()
        for key in vars(module)[table]
    ]


class Follower:
    """One rank's; every rank asks the same at the same time, but for :meth:`has_changed`."""

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        agreement: Agreement,
        first: tuple[Readings, LayerGraph],
        capturing: Capturing,
    ) -> None:
        """Begin where the job was built.

        Args:
            model: the script's.
            job: this rank's.
            agreement: of all ranks.
            first: what the job was built of.
            capturing: captures the model as it is now.
        """
        self._job, self._agreement, self._capturing = job, agreement, capturing
        self._captures = 0
        self.notes: list[str] = []
        """What a reader should know."""
        readings, graph = first
        # The job's layers are those of the graph, and are about to compute what others do.
        apart = replace(graph, layers=tuple(rewritable(layer) for layer in graph.layers))
        self._now = self._captured(readings, apart)
        self._kept, self._forms = [self._now], {_form(graph)}
        self._model = model
        self._parameters = _places(model, "_parameters")
        self._flags = self._built_flags = self._read_flags()
        buffers, written = _places(model, "_buffers"), _written_buffers(model, self._now.graph)
        self._buffers = [place for place in buffers if place.name not in written and place.table[place.key] is not None]
        self._tables = {place.name: place.table for place in (*self._parameters, *buffers)}
        self._digests = [_digest_of(each) for each in self._values()]
        self._held = list(map(self._read_parameter, range(len(self._parameters))))
        self._given_digests: set[tuple[str, float]] = set()
        self._looked_at = -1
        """Which parameter's values are looked at."""
        self.refresh()

    @property
    def graph(self) -> LayerGraph:
        """What the job computes."""
        return self._now.graph

    def refresh(self) -> None:
        """Take the model's tensors as they are for those that are known."""
        for index, before in enumerate(self._held):
            now = self._read_parameter(index)
            if now[0] is not before[0] or now[1] != before[1]:
                self._held[index], self._digests[index] = now, _digest_of(now[0])
        self._buffer_state = self._read_buffers()

    def has_changed(self) -> bool:
        """Tell whether the script has changed something since it was last asked."""
        return (
            self._now.readings.have_changed()
            or self._flags != self._read_flags()
            or self._buffer_state != self._read_buffers()
        )

    def refusal(self) -> AutoparError | None:
        """Return what is wrong with the model's parameters now, if anything; they may hold what :meth:`give` was of."""
        # What is written by way of .data shows in its values only: those of one parameter are looked at in every step.
        self._looked_at = (self._looked_at + 1) % max(1, len(self._parameters))
        for index, (_, _, name) in enumerate(self._parameters):
            (before, version), (now, newer) = self._held[index], self._read_parameter(index)
            if before is not now:
                return UsageError(f"the script has put another parameter in the place of {name}; {AGAIN}")
            if now is None or (version == newer and index != self._looked_at):
                continue
            digest = _digest_of(now)
            has_been_written = version[0] != newer[0] or digest != self._digests[index]
            if has_been_written and (name, digest) not in self._given_digests:
                return UsageError(
                    f"the script has written parameter {name} of its model, and the job trains parameters of its own; "
                    "write it in the step() of an optimizer of yours, or close() the job, give the model "
                    "its state_dict(), write, and materialize() it again"
                )
            self._held[index], self._digests[index] = (now, newer), digest
        return None

    def give(self, state: Mapping[str, torch.Tensor]) -> None:
        """Note what the script is given on rank 0, by the keys of the model: it may load that into the model."""
        names = [name for _, _, name in self._parameters]
        own = [_digest_of(state.get(name)) for name in names]
        self._given_digests.update(zip(names, self._agreement.sum(own), strict=True))

    def forget_given(self) -> None:
        """Forget what the script was given: from now on, that is an earlier step's, which no load may bring back."""
        self._given_digests.clear()

    def follow(self) -> bool:
        """Have the job compute what the model does now; tell whether that is something else.

        Raises:
            UsageError: it cannot, or ranks have changed differently; on all ranks, nothing having been changed.
            AutoparError: the model cannot be captured any more.
        """
        found = self._agreement.perform(self._find)
        flags = self._agreement.perform(self._new_flags)
        said = self._agreement.texts(f"{found.identity} {sorted(flags.items())}")
        for rank, other in enumerate(said):
            if other != said[0]:
                raise UsageError(
                    f"the scripts of ranks 0 and {rank} have changed their models differently; change the same on "
                    "every rank"
                )
        changed = found.identity != self._now.identity
        if changed:
            self._job.exchange(found.graph)
        self._now = found
        for name in flags.keys() & self._job.parameters.keys():
            self._job.parameters[name].requires_grad_(flags[name])
        self._flags = self._read_flags()
        self._copy_buffers()
        self.refresh()
        return changed

    def _find(self) -> Captured:
        """Return the graph of the model as it is now, captured again if it has not been like this before."""
        self._check_modules()
        known = next((each for each in self._kept if each.graph.portable and not each.readings.have_changed()), None)
        if known is None:
            changed = self._now.readings.changed()
            if self._captures == _MANY:
                self.notes.append(
                    f"the model is captured again whenever {', '.join(changed[:3]) or 'it'} changes; a number in a "
                    "tensor, which is written in place (weight.fill_(0.1)), costs nothing"
                )
            try:
                with self._first_flags():
                    readings, graph = self._capturing.again()
                known = self._captured(readings, graph)
            except FileError as error:
                said = str(error).partition(";")[0]
                raise UsageError(f"after what the script has changed, {said}; {AGAIN}") from error
            self._job.check_exchange(graph)
            check_shares(graph.layers, self._job.plan)
            if (form := _form(graph)) not in self._forms:
                # A term that was 0 hides that it depends on how a mini-batch is divided.
                self._capturing.check(graph)
                self._forms.add(form)
        self._kept = [*[each for each in self._kept if each is not known][1 - MOST_KEPT :], known]
        return known

    def _check_modules(self) -> None:
        """Check that modules which hold tensors are those that the job was built of.

        Raises:
            UsageError: the script has put another one in the place of one; names a tensor of both.
        """
        now = {place.name: place.table for kind in _TENSORS for place in _places(self._model, kind)}
        for name, table in self._tables.items():
            if now.get(name, table) is not table:
                raise UsageError(f"the script has put another module in the place of that with {name}; {AGAIN}")
        gone = next((place.name for place in self._buffers if place.table.get(place.key) is None), None)
        if gone is not None:
            raise UsageError(f"the script has taken the buffer {gone} away; {AGAIN}")

    def _captured(self, readings: Readings, graph: LayerGraph) -> Captured:
        self._captures += 1
        return Captured(readings, graph, _identity(graph, self._captures))

    def _read_flags(self) -> list[bool]:
        return [parameter is not None and parameter.requires_grad for parameter in self._values()]

    def _values(self) -> Iterable[nn.Parameter | None]:
        return (table.get(key) for table, key, _ in self._parameters)

    @contextmanager
    def _first_flags(self) -> Iterator[None]:
        """Have parameters require gradients inside the block as they did when the job was built: layers go by that."""
        now = self._read_flags()
        try:
            self._set_flags(self._built_flags)
            yield
        finally:
            self._set_flags(now)

    def _set_flags(self, flags: Sequence[bool]) -> None:
        for parameter, flag in zip(self._values(), flags, strict=True):
            if parameter is not None and parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def _read_parameter(self, index: int) -> tuple[nn.Parameter | None, tuple[int, int]]:
        """Return a parameter, what counts its writes, and where its values are: ``.data = ...`` puts others there."""
        table, key, _ = self._parameters[index]
        parameter = table.get(key)
        return parameter, (0, 0) if parameter is None else (parameter._version, _address(parameter))

    def _read_buffers(self) -> list[tuple[int, int]]:
        tensors = [table.get(key) for table, key, _ in self._buffers]
        return [(id(each), 0 if each is None or each.is_inference() else each._version) for each in tensors]

    def _new_flags(self) -> dict[str, bool]:
        """Return the parameters of the model that are trained or frozen from now on, by the name that layers have.

        Raises:
            UsageError: the job cannot; says what to do.
        """
        every = zip(self._parameters, self._flags, self._read_flags(), strict=True)
        found = {name: now for (_, _, name), before, now in every if now != before}
        if found:
            self._job.check_trained(found)
        return found

    def _copy_buffers(self) -> None:
        """Give the job the buffers that the script has written."""
        states = zip(self._buffers, self._buffer_state, self._read_buffers(), strict=True)
        for table, key, name in (place for place, before, now in states if before != now):
            value = table.get(key)
            if value is not None and name in self._job.buffers:
                with torch.no_grad():
                    self._job.buffers[name].copy_(value)


class FileWatch:
    """What forward and loss of a model file read in a rank of a run, which goes on as captured."""

    def __init__(self, user: UserModel, names: frozenset[str], ignored_state: tuple[str, ...]) -> None:
        """Read it; ``names`` are those in the code of forward and loss."""
        roots = {Path("model"): user.factory, Path("loss"): user.loss}
        self._readings = Readings(roots, names, ignored_state)

    def check(self, step: int) -> None:
        """Check that it is as it was.

        Raises:
            TrainingError: it is not; says what to do.
        """
        if self._readings.have_changed():
            raise TrainingError(
                f"{self._readings.changed()[0]} has changed before step {step}, which forward or loss reads, and a run "
                "goes on as captured; train from a script, whose job follows it (autopar.materialize); or name it in "
                "`ignored_state`, if it is only logged"
            )


def _digest_of(tensor: torch.Tensor | None) -> float:
    """Return a number that tells a tensor's values; 0 of one without."""
    return 0.0 if tensor is None or tensor.is_meta else digest_of({"": tensor})


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if type(tensor) is nn.Parameter and not tensor.is_meta else 0


def _written_buffers(model: nn.Module, graph: LayerGraph) -> set[str]:
    written = {name for layer in graph.layers if layer.writes is not None for name in layer.writes.buffers}
    return written | set(running_statistics(model))


def _identity(graph: LayerGraph, number: int) -> str:
    """Return a text that is equal for graphs that compute the same; listed modules always may compute another thing."""
    if not graph.portable:
        return f"listed {number}"
    digest = hashlib.sha256()
    for layer in graph.layers:
        known = {*layer.parameters, *layer.buffers}
        constants = {name: value for name, value in layer.module.named_buffers() if name not in known}
        flow = layer.name, layer.inputs, layer.outputs, sorted(layer.parameters.items()), sorted(layer.buffers.items())
        digest.update(f"{flow} {layer.fingerprint} {digest_of(constants)}".encode())
    return digest.hexdigest()


def _form(graph: LayerGraph) -> str:
    """Return a text that is equal for graphs that differ in their numbers only, and not in which of them are 0."""
    digest = hashlib.sha256()
    for module in (each for layer in graph.layers for each in layer.module.modules()):
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            arguments = fx.node.map_aggregate(
                (node.args, node.kwargs),
                lambda value: "number" if isinstance(value, float) and value else value,
            )
            digest.update(f"{node.op} {node.target} {arguments}".encode())
    return digest.hexdigest()
