"""Memory: the most bytes that a stage holds at once, and those that a rank does.

Of a stage of its own rank whose backwards are whole a closed form says what is in flight. Of ranks whose stages run one
after the other, and of backwards in two halves, it is read off the rank's order, moment by moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.profile import Layer
from autopar.formats.program import LayerBytes
from autopar.ownership import SHARDS, Shard
from autopar.planner.candidate import Lead
from autopar.planner.costs import memoize
from autopar.planner.costs.activations import (
    WHOLE,
    ActivationBytes,
    Activations,
    Area,
    Areas,
    Counts,
    Sharded,
    rows_bytes,
    running,
)
from autopar.planner.costs.communication import Flows, FlowTensor, TiedLayers
from autopar.planner.costs.layers import LayerCosts

MOST_KEPT = 100_000
"""Peaks of single stages that are remembered."""
MOST_SWEPT, LEAST_LONGEST = 20_000_000, 16
"""Numbers of all stages that are remembered; and up to how many layers these have, or twice as many, or four times."""

POSTED_AHEAD = 2
"""How many computations ahead a receive is posted."""

Bytes = int | Counts


class PeakTerms(NamedTuple):
    """What a stage's peak depends on besides its layers."""

    rows: float
    """Of the replica's share."""
    warmup: int
    """Most micro-batches in flight."""
    micro_batches: int
    """How many of a step's the replica takes part in."""
    replicas: int = 1
    lead: int = 0
    """How many more micro-batches the stage before has in flight; 0 where there is none."""
    recompute: frozenset[int] = frozenset()
    """Layers of the stage that are run forward again."""
    shard: Shard = "none"
    patience: int | None = None
    """Micro-batches behind which a send is waited for that nothing answers; None: those of a step, with a flush."""
    lanes: int = 1
    """Among how many ranks of a team the rows of a message are divided, before each has all of them."""

    @property
    def sharded(self) -> Sharded:
        """What the replicas divide that comes and goes as they compute."""
        return WHOLE if self.shard in ("none", "optimizer") else Sharded(self.shard, self.replicas)

    @property
    def has_buckets(self) -> bool:
        """Whether gradients lie in buffers, which are there throughout."""
        return self.replicas > 1 and self.shard == "none"

    @property
    def returned(self) -> int:
        """Most micro-batches whose gradients are there or to come: one is computed, and receives are posted ahead.

        Of two computations ahead both are backwards only where so many more are in flight.
        """
        return min(1 + POSTED_AHEAD, max(POSTED_AHEAD, self.warmup), self.micro_batches)

    def answers(self, lead: int) -> int:
        """Return how many gradients are on their way to a stage that leads by so many: of a step, or without end."""
        return min(lead, self.micro_batches) if self.patience is None else lead


class Parts(NamedTuple):
    """What a stage's peak is made of: one stage's numbers, or arrays over stages."""

    parameters: Bytes
    """With buffers."""
    optimizer: Bytes
    gradients: Bytes
    several: Bytes
    """Parameters that several of the stage's layers share, and no other stage."""
    lasting: Bytes
    """Gradients of parameters that other stages share."""
    update: Bytes
    """What the optimizer's step holds for a while."""
    inputs: Bytes
    """Model inputs per sample."""
    received_activations: Bytes
    """Activations received per sample."""
    sent_gradients: Bytes
    """Gradients sent back per sample."""
    received_gradients: Bytes
    """Gradients received per sample, each tensor counted as if one stage read it."""
    unanswered_sends: Bytes
    """Activations sent per sample, of a stage that no gradient comes back to: nothing proves that they have arrived."""
    activations: Bytes
    """What one micro-batch in flight keeps."""
    peak: Bytes
    """The most that one micro-batch's forward and backward hold."""
    first_peak: Bytes
    """The same with the gradients that the micro-batch's backward makes, if it is a step's first."""


def peak_of(parts: Parts, terms: PeakTerms) -> Bytes:
    """Return the most bytes that a stage holds, every tensor that it sends read by one stage only."""
    most: Bytes = np.maximum(*moments_of(parts, terms))
    return most


def moments_of(parts: Parts, terms: PeakTerms) -> tuple[Bytes, Bytes]:
    """Return :func:`peak_of` while a stage computes, and in the update, which has nothing in flight."""
    kept, gradients, update = state_of(parts, terms)
    full = terms.warmup - 1
    messages, unanswered = messages_of(parts, terms), waiting_bytes(parts.unanswered_sends, terms)
    begun: Bytes = 0
    sent: Bytes = 0
    if terms.warmup == terms.micro_batches and not terms.has_buckets:
        begun = full * parts.activations + parts.first_peak + parts.lasting
        # With gradients there, a micro-batch's backward is done, and the gradient that it sent is on its way.
        full, sent = full - 1, rows_bytes(terms.rows, parts.sent_gradients)
    steady = gradients + full * parts.activations + parts.peak + sent if full >= 0 else 0
    kept = kept + terms.micro_batches * rows_bytes(terms.rows, parts.inputs)
    computing: Bytes = np.maximum(begun, steady)
    return kept + computing + messages + unanswered, kept + gradients + update + unanswered


class Halves(NamedTuple):
    """What a micro-batch holds whose backward comes in halves."""

    pending: int
    """Between the two."""
    input: int
    """In the first, with what it makes."""
    weight: int
    """In the second, where gradients are there."""
    first_weight: int
    """The same with the gradients that it makes, if it is a step's first."""


class StateBytes(NamedTuple):
    """What a replica holds beside micro-batches; the last for a while."""

    parameters: Bytes
    optimizer: Bytes
    gradients: Bytes
    update: Bytes


def state_of(parts: Parts, terms: PeakTerms) -> tuple[Bytes, Bytes, Bytes]:
    """Return a replica's parameters and optimizer state, its gradients, and what an update holds for a while."""
    parameters, optimizer, gradients, update = state_by_cause(parts, terms)
    return parameters + optimizer, gradients, update


def state_by_cause(parts: Parts, terms: PeakTerms) -> StateBytes:
    """Return :func:`state_of`, with what is divided among replicas divided."""
    parameters, gradients, apart = parts.parameters, parts.gradients, parts.lasting
    if terms.shard == "none":
        return StateBytes(parameters, parts.optimizer, gradients, parts.update)

    def part(total: Bytes, whole: Bytes) -> Bytes:
        return whole - (-(total - whole) // terms.replicas)

    # Parameters that other stages hold, too, are whole everywhere.
    optimizer, own = part(parts.optimizer, _scale(parts.optimizer, apart, gradients)), part(parameters, apart)
    # Every step gathers the parameters from parts of them; if they are sharded themselves, only what layers share.
    kept: Bytes = own + (parts.several if terms.shard == "parameters" else parameters - apart)
    if terms.shard != "optimizer":
        gradients = part(gradients, apart + parts.several)
    return StateBytes(kept, optimizer, gradients, -(-parts.update // terms.replicas))


def _scale(size: Bytes, part: Bytes, whole: Bytes) -> Bytes:
    """Return ``size * part // whole``, exactly: the products of two sizes of large models have more than 64 bits."""
    if all(isinstance(each, int) for each in (size, part, whole)):
        return size * part // max(whole, 1)
    if int(np.max(size)) * int(np.max(part)) < 2**63:
        return np.asarray(size * part // np.maximum(whole, 1))
    return np.asarray(np.asarray(size).astype(object) * part // np.maximum(whole, 1)).astype(np.int64)


def messages_of(parts: Parts, terms: PeakTerms) -> Bytes:
    """Return the bytes of messages under way, beside what is in flight."""
    rows, most = terms.rows, terms.micro_batches
    at_work, posted = rows_bytes(rows, parts.received_gradients), _posted_bytes(terms, parts.received_gradients)
    answered = terms.answers(terms.lead) * rows_bytes(rows, parts.sent_gradients)
    if terms.warmup == most:
        return at_work + (terms.returned - 1) * posted + answered
    least = _posted_bytes(terms, parts.received_activations) + at_work + (min(2, most) - 1) * posted
    longest: Bytes = np.maximum(least, at_work + (terms.returned - 1) * posted)
    return longest + answered


def _posted_bytes(terms: PeakTerms, per_sample: Bytes) -> Bytes:
    """Return the bytes of a receive that is posted: of a rank's lane of the message."""
    return rows_bytes(terms.rows if terms.lanes == 1 else terms.rows / terms.lanes, per_sample)


def waiting_bytes(per_sample: Bytes, terms: PeakTerms) -> Bytes:
    """Return the bytes of so much sent per sample that waits for a later send, beside what is in flight."""
    until = terms.micro_batches if terms.patience is None else terms.patience
    # The new one is in flight, too.
    return max(0, until + 1 - terms.warmup) * rows_bytes(terms.rows, per_sample)


def lengths_swept(layers: int) -> Iterator[int]:
    """Yield up to how many layers stages are looked at together: ever twice as many, fewer than the model has.

    >>> list(lengths_swept(100))
    [16, 32, 64]
    """
    length = LEAST_LONGEST
    while length < layers:
        yield length
        length *= 2


class MemoryModel:
    """Peak memory of a stage (docs/design/costs.md): k of the step's M micro-batches in flight, at a replica's rows.

    It is the largest of three moments, with everywhere the state (parameters, buffers, optimizer state; a parameter
    tied within the stage counted once), the mini-batch's M shares of model inputs, and messages under way:

        a backward with gradients there:   gradients + (k - 1) activations + peak of one micro-batch
        the first backward, if k = M:      the same, with gradients of the layers only that it has left
        the update:                        gradients + what the optimizer holds for a while

    Where k = M, the first of these has one micro-batch less in flight. Replicas that shard nothing, and parameters that
    other stages share, keep their gradients throughout. What replicas shard is divided by their number, but for the
    layers that are at work (docs/design/costs.md).

    Activations are the union, by storage, of what the layers save, what the stage receives and what it sends, model
    inputs excepted; a layer that is recomputed saves its inputs only. The peak of one micro-batch is the largest, over
    the stage's layers l, of the activations of the layers up to l and what l holds beyond what it saves, plus the
    outputs the stage keeps because it sends them.

    Messages: receives are posted two computations ahead, and a sent gradient stays until the program proves that it
    has arrived, which takes as many micro-batches as the stage that made the tensor leads. What is sent to a stage that
    sends nothing back stays until the same micro-batch of the next step: a whole step's, and one more.
    """

    def __init__(self, costs: LayerCosts, flows: Flows, updates_at_once: bool) -> None:
        self._costs, self._flows, self.updates_at_once = costs, flows, updates_at_once
        self._count = len(costs.layers)
        self._own_peak = lru_cache(MOST_KEPT)(self._computed_peak)
        self._activation_bytes: dict[tuple[float, frozenset[int], Sharded], tuple[int, ActivationBytes]] = {}
        """Of all stages of up to so many layers."""
        layers = costs.layers
        state = (
            ([layer.parameters_bytes + layer.buffers_bytes for layer in layers], lambda _, ties: ties.bytes),
            ([layer.optimizer_bytes for layer in layers], lambda at, ties: int(ties.share_of(at) * at.optimizer_bytes)),
            ([layer.gradient_bytes for layer in layers], lambda at, ties: int(ties.share_of(at) * at.gradient_bytes)),
        )
        self._state = [(np.array([0, *accumulate(values)]), self._tied_areas(share)) for values, share in state]
        """Parameters, optimizer's state and gradients: running sums, and what layers of one stage share."""
        self.activations = Activations(costs, flows, self._gradients_made)
        self._updates = [layer.update_bytes for layer in layers]
        self._messages = self._message_areas()
        """Per sample: model inputs, activations received, gradients sent back, gradients received; activations sent."""
        self._several, self._lasting = self._several_areas(), self._lasting_areas()

    def parts(
        self, first: int, stop: int, rows: float, recompute: frozenset[int] = frozenset(), sharded: Sharded = WHOLE
    ) -> Parts:
        """Return what the peak of one stage is made of."""
        activations = self.activations.of(first, stop, rows, recompute, sharded)
        return Parts._make((*self._fixed_parts(first, stop), *activations))

    @memoize
    def _fixed_parts(self, first: int, stop: int) -> tuple[int, ...]:
        """What the peak of one stage is made of that no micro-batch keeps."""
        state = (int(sums[stop] - sums[first]) - shared.at(first, stop) for sums, shared in self._state)
        update = (sum if self.updates_at_once else max)(self._updates[first:stop])
        *messages, sent = (areas.at(first, stop) for areas in self._messages)
        unanswered = 0 if messages[-1] else sent
        shared = self._several.at(first, stop), self._lasting.at(first, stop)
        return *state, *shared, update, *messages, unanswered

    def arrays(self, rows: float, recompute: frozenset[int], longest: int, sharded: Sharded = WHOLE) -> Parts:
        """Return what the peaks of all stages of up to ``longest`` layers are made of, ``[first, length - 1]``.

        ``recompute`` are layers of the model: a stage recomputes those of its own among them. What stages would hold
        that end behind the last layer has no meaning.
        """
        swept = self._sweep(rows, recompute, longest, sharded)
        return Parts._make((*self._window(longest), *(np.asarray(each)[:, :longest] for each in swept)))

    @memoize
    def _window(self, longest: int) -> tuple[Counts, ...]:
        """What peaks are made of that no micro-batch keeps, ``[first, length - 1]``."""
        state = (running(np.diff(sums), longest, np.add) - shared.window(longest) for sums, shared in self._state)
        update = running(self._updates, longest, np.add if self.updates_at_once else np.maximum)
        *messages, sent = (areas.window(longest) for areas in self._messages)
        unanswered = np.where(messages[-1] == 0, sent, 0)
        shared = self._several.window(longest), self._lasting.window(longest)
        return *state, *shared, update, *messages, unanswered

    def _sweep(self, rows: float, recompute: frozenset[int], longest: int, sharded: Sharded) -> ActivationBytes:
        """What all stages of up to ``longest`` layers, or a few more, keep of a micro-batch."""
        known = self._activation_bytes.get((rows, recompute, sharded))
        if known is not None and known[0] >= longest:
            return known[1]
        reach = next((length for length in lengths_swept(self._count) if length >= longest), self._count)
        swept = self.activations.window(rows, recompute, reach, self._window(reach)[2], sharded)
        if 3 * reach * self._count * (1 + len(self._activation_bytes)) > MOST_SWEPT:
            self._activation_bytes.clear()
        self._activation_bytes[rows, recompute, sharded] = reach, swept
        return swept

    def by_stop(self, rows: float, recompute: frozenset[int] = frozenset(), sharded: Sharded = WHOLE) -> Parts:
        """Return :meth:`arrays` of all stages as ``[first, stop]``; 0 where there are none."""
        firsts, stops = np.triu_indices(self._count, 1, self._count + 1)
        found = []
        for each in self.arrays(rows, recompute, self._count, sharded):
            table = np.zeros((self._count, self._count + 1), dtype=np.int64)
            table[firsts, stops] = np.asarray(each)[firsts, stops - firsts - 1]
            found.append(table)
        return Parts._make(found)

    def most(self, rows: float, micro_batches: int) -> int:
        """Return what no stage exceeds, whatever it is and however it is run: everything there is, twice."""
        fixed, each = self._totals(rows)
        return 2 * (fixed + micro_batches * each)

    @memoize
    def _totals(self, rows: float) -> tuple[int, int]:
        """Return what all layers hold of a step, and of a micro-batch, with room for what passes."""
        layers = range(self._count)
        saved = sum(sum(self.activations.saved_bytes(layer, rows, is_recomputed=False).values()) for layer in layers)
        passing = sum(self._costs.bytes_at(layer, "peak_bytes", rows) for layer in layers)
        crossing = sum(tensor.bytes_per_sample * len(tensor.consumers) for tensor in self._flows.crossing)
        inputs = sum(tensor.bytes_per_sample for tensor in self._flows.inputs)
        # Of three layers, parameters and gradients may be whole beside what is divided, each twice.
        state = sum(int(sums[-1]) for sums, _ in self._state) + sum(self._updates)
        state += 4 * sum(layer.parameters_bytes for layer in self._costs.layers)
        return state + passing, saved + int(rows_bytes(rows, 6 * crossing + inputs))

    def layer_bytes(self, layer: int, rows: float, *, with_gradients: bool) -> LayerBytes:
        """Return what a layer holds of one micro-batch, with its gradients where these come and go."""
        record, saved = self._costs.layers[layer], self.activations.saved_bytes(layer, rows, is_recomputed=False)
        tensors = {each.name for each in self._flows.crossing}
        tied = (each.share_of(record) for each in self._flows.tied if layer in each.layers)
        gradients = record.gradient_bytes - sum(int(share * record.gradient_bytes) for share in tied)
        own = sum(size for name, size in saved.items() if name not in tensors)
        pending = self._costs.pending_at(layer, rows)
        return LayerBytes(
            saved=own,
            saved_tensors=tuple(sorted(tensors.intersection(saved))),
            pending=own if pending is None else pending,
            transient=self.activations.transient(layer, rows, is_recomputed=False),
            gradients=gradients if with_gradients else 0,
        )

    @memoize
    def state_of_layers(self, shard: Shard, replicas: int, *, gradients: bool) -> npt.NDArray[np.float64]:
        """Return bytes by layer: no replica's state is less than its layers' together, with ``gradients`` these, too.

        What layers share counts for the first of them only, and as if it were divided, too.
        """
        found = np.array([np.diff(sums) for sums, _ in self._state], dtype=np.float64)
        for tied in self._flows.tied:
            for layer in tied.layers[1:]:
                share = tied.share_of(self._costs.layers[layer])
                found[0, layer] -= tied.bytes
                found[1:, layer] *= 1 - share
        parameters, optimizer, made = np.maximum(0.0, found)
        parts = enumerate((optimizer, made * gradients, parameters))
        return np.asarray(sum(part / replicas if at < SHARDS.index(shard) else part for at, part in parts))

    @memoize
    def freed_bytes(self, layer: int, rows: float) -> int:
        """Return the bytes by which recomputing a layer shrinks what one micro-batch in flight keeps."""
        read = {tensor.name for tensor in self._flows.received_by[layer]}
        kept = (self.activations.saved_bytes(layer, rows, is_recomputed=again) for again in (False, True))
        whole, less = (sum(size for name, size in each.items() if name not in read) for each in kept)
        return whole - less

    def peak(
        self, first: int, stop: int, terms: PeakTerms, cuts: Sequence[int] = (), leads: Sequence[Lead] = ()
    ) -> int:
        """Return the peak of a stage among others, which are as of :meth:`further`."""
        return self._own_peak(first, stop, terms) + self.further(first, stop, terms, cuts, leads)

    def scattered_bytes(self, first: int, sharded: Sharded) -> int:
        """Return the bytes of gradients that a stage's last reduction was of, which stay until its next backward."""
        return int(self.activations.passing(1, sharded)[first].gradients)

    @memoize
    def halves(
        self, first: int, stop: int, rows: float, recompute: frozenset[int] = frozenset(), sharded: Sharded = WHOLE
    ) -> Halves:
        """Return what a micro-batch of a stage holds whose backward comes in halves, which go from layer to layer.

        The first half of a layer lets nothing go that the second reads, and keeps gradients for it beside.
        """
        layers, parts = range(first, stop), self.parts(first, stop, rows, recompute, sharded)
        known = [self._costs.pending_at(layer, rows) for layer in layers]
        pending = [each for each in known if each is not None]
        if len(pending) < len(known):
            most = int(parts.peak)
            return Halves(int(parts.activations), most, most, most + int(parts.gradients))
        passing, arrived = self.activations.passing(rows, sharded), int(rows_bytes(rows, parts.received_gradients))
        made = [self._gradients_made(layer, layer + 1) for layer in layers]
        gathered, left = sum(int(passing[at].parameters) for at in layers), int(passing[stop - 1].gradients)
        inputs, weights, first_weights = [int(parts.peak)], [0], [0]
        for at, layer in enumerate(layers):
            before = int(self.parts(first, layer, rows, recompute).activations) if at else 0
            # What the last layer makes is kept, and its gradients have arrived: later, they are among what it keeps.
            is_last, again = layer + 1 == stop, layer in recompute
            less = self.activations.sent_bytes(layer, rows, again) if is_last else arrived
            transient = self.activations.transient(layer, rows, is_recomputed=False)
            passes = max(0, transient - less) if again or self._has_input_half(layer) else 0
            own = passing[layer].computing(passes, passing[layer - 1].parameters if at else 0, sends=False)
            inputs.append(before + sum(pending[at:]) + int(own) + left)
            # Without a first half, the second is the whole backward.
            most = made[at] if self._has_input_half(layer) else max(made[at], transient)
            weights.append(sum(pending[: at + 1]) + most)
            first_weights.append(sum(pending[: at + 1]) + most + sum(made[at + 1 :]))
        if sharded != WHOLE:
            # All layers' gradients are whole, and then what one of them is reduced from, too.
            weights = [gathered + max(*first_weights, sum(made) + max(made))]
            first_weights = weights
        return Halves(sum(pending), max(inputs), max(weights), max(first_weights))

    def _has_input_half(self, layer: int) -> bool:
        """Tell whether a layer gives gradients back."""
        return any(each.gradient for each in self._flows.received_by[layer])

    def further(self, first: int, stop: int, terms: PeakTerms, cuts: Sequence[int], leads: Sequence[Lead] = ()) -> int:
        """Return what depends on where other stages end.

        Gradients that come back for tensors that several stages read, beyond one of each; tensors sent to stages that
        send nothing back, though others do; and gradients sent to stages that lead by more than the one before.

        Args:
            first: the stage's first layer.
            stop: that behind its last.
            terms: what else its peak depends on.
            cuts: the layers before which later stages end, ascending.
            leads: of the stages before, in their order.
        """
        flows, rows = self._flows, terms.rows
        returned = terms.returned * int(rows_bytes(rows, flows.returned_again(first, stop, cuts)))
        unanswered = int(waiting_bytes(flows.unanswered_bytes(first, stop, cuts), terms))
        late = flows.answered_late(first, stop, [lead._replace(turns=terms.answers(lead.turns)) for lead in leads])
        return returned + unanswered + int(rows_bytes(rows, late))

    def _computed_peak(self, first: int, stop: int, terms: PeakTerms) -> int:
        """The peak, but for tensors that several later stages read."""
        return int(peak_of(self.parts(first, stop, terms.rows, terms.recompute, terms.sharded), terms))

    @memoize
    def _gradients_made(self, first: int, stop: int) -> int:
        sums, shared = self._state[2]
        return int(sums[stop] - sums[first]) - shared.at(first, stop)

    def _tied_areas(self, share: Callable[[Layer, TiedLayers], int]) -> Areas:
        """What layers of one stage count twice, since they share a parameter."""
        pairs = ((tied, *pair) for tied in self._flows.tied for pair in pairwise(tied.layers))
        areas = (
            Area(0, before, layer + 1, self._count, share(self._costs.layers[layer], tied))
            for tied, before, layer in pairs
        )
        return Areas(self._count, areas)

    def _several_areas(self) -> Areas:
        """Parameters that a stage holds alone, for several of its layers."""
        every = (each for each in self._flows.tied if each.trainable)
        return Areas(
            self._count,
            (Area(0, each.layers[0], each.layers[-1] + 1, self._count, each.bytes) for each in every),
        )

    def _lasting_areas(self) -> Areas:
        """Gradients of parameters that a stage holds, and another one too."""
        found: list[Area] = []
        for tied in self._flows.tied:
            if tied.trainable:
                found += self._first_meetings(-1, tied.layers, tied.bytes)
                found.append(Area(0, tied.layers[0], tied.layers[-1] + 1, self._count, -tied.bytes))
        return Areas(self._count, found)

    def _message_areas(self) -> tuple[Areas, ...]:
        def areas_read(tensors: Iterable[FlowTensor]) -> Iterator[Area]:
            for each in tensors:
                yield from self._first_meetings(each.producer, each.consumers, each.bytes_per_sample)

        def areas_sent(tensors: Iterable[FlowTensor]) -> Iterator[Area]:
            for each in tensors:
                yield Area(0, each.producer, each.producer + 1, each.consumers[-1], each.bytes_per_sample)

        inputs, crossing = self._flows.inputs, self._flows.crossing
        gradients = [tensor for tensor in crossing if tensor.gradient]
        read = (areas_read(each) for each in (inputs, crossing, gradients))
        sent = (areas_sent(each) for each in (gradients, crossing))
        return tuple(Areas(self._count, each) for each in (*read, *sent))

    def _first_meetings(self, before: int, layers: Sequence[int], size: int) -> Iterator[Area]:
        """Yield what counts once for all stages that begin behind the layer ``before`` and hold any of ``layers``."""
        # Of stages that begin behind one layer, the next one is the first to be met.
        for start, layer in pairwise((before, *layers)):
            yield Area(start + 1, layer, layer + 1, self._count, size)
