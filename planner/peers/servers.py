"""Servers: data parallelism whose parameters one device holds, or every device a part of; priced, and not run.

torch.nn.DataParallel is one process on the devices of a node, the first of which holds everything. For n devices and
every micro-batch of a step (torch/nn/parallel: ``data_parallel``, ``replicate``, ``scatter_gather``, ``comm``):

    scatter      the share of every input to each of n - 1
    broadcast    parameters and buffers to each of n - 1, in buffers of 10 MiB
    forward      on all; then outputs of each of n - 1 are gathered, in their order
    backward     the outputs' gradients to each of n - 1; then on all
    reduce       gradients of each of n - 1, in buffers of 10 MiB, each added

All pass the first device's link, one after the other, and it alone updates. Where torch has NCCL, it broadcasts and
reduces in chains of devices; here it copies, as it does without. The loss is part of the last layer, as in profiles,
and outputs are as large as the largest storage that this layer keeps: of logits, a loss keeps their probabilities. That
one interpreter launches what all devices compute is not priced.

A parameter server is that of Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014:
its distributed subgradient descent (algorithm 1), in which all wait for each other. With S bytes of gradients:

    compute      the step's micro-batches, each shared among n devices
    push         central: S from each of n - 1 to the holder, each added; sharded: S / n from each device to each other
    update       by the holder; or by every device, of its part
    pull         the parameters, the same way back; with the push, no less than an all-reduce, which does the same

Servers are on devices that work, too: a central one on that which makes the step shortest, and works on what it holds;
a part of a sharded one is beside the device's own parameters, as where replicas divide the optimizer's state.

Messages are priced as a plan's are. A device sends, and receives, one after the other; of a link whose price is for
several devices that send at once, one alone uses as many parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from autopar.formats.cluster import LEVELS, Level
from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas
from autopar.planner.candidate import CandidateStage, families
from autopar.planner.constraints import crossed_limit
from autopar.planner.costs.activations import rows_bytes
from autopar.planner.costs.memory import Parts, PeakTerms, moments_of
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import size
from autopar.planner.order import as_listed
from autopar.planner.shares import by_share

BUFFER_BYTES = 10 * 2**20
"""Of torch's ``broadcast_coalesced`` and ``reduce_add_coalesced``."""
Shares = Mapping[int, float]
"""Rows of a micro-batch, by the device that takes them."""
Value = TypeVar("Value")


class ServedStep(NamedTuple):
    """A step of devices that share parameters through servers."""

    micro_batches: int
    step_s: float
    link_s: float
    """Of the step, what is spent on the busiest link."""
    link: str
    """Whose that is."""
    peak_bytes: Mapping[int, int]
    """By device that takes part."""

    @property
    def text(self) -> str:
        """How much of the step is spent on which link."""
        return f"{100 * self.link_s / self.step_s if self.step_s else 0.0:.0f} % on {self.link}"


class Served(NamedTuple):
    """The quickest step of a way to serve parameters that fits, or the one that comes closest and why it does not."""

    name: str
    step: ServedStep | None
    reason: str | None = None


def ways_to_serve(costs: CostModel, options: PlanOptions) -> list[Served]:
    """Return every way to serve parameters, each in the micro-batch count of the options' that suits it best."""
    nodes, counts = costs.links.topology.nodes, [family.micro_batches for family in families(costs.batch, options)]
    unlike = {(costs.kind_of[at], costs.limits_bytes[at], nodes.count(nodes[at])): at for at in as_listed(costs)[::-1]}
    ways: dict[str, list[Callable[[int], ServedStep | str]]] = {
        "torch.nn.DataParallel": [partial(data_parallel, costs)],
        "parameter server, central": [partial(central, costs, holder) for holder in unlike.values()],
        "parameter server, sharded": [partial(sharded, costs)],
    }
    alone = "there is one device, and nothing to share" if len(nodes) == 1 else None
    refusal = alone or next((each.reason for each in costs.single.values()), None)
    if refusal is not None:
        return [Served(name, None, refusal) for name in ways]
    return [_best(costs, name, [way(count) for way in own for count in counts]) for name, own in ways.items()]


def _best(costs: CostModel, name: str, steps: list[ServedStep | str]) -> Served:
    found = []
    for step in steps:
        if not isinstance(step, str):
            shorts = {at: peak - costs.limits_bytes[at] for at, peak in step.peak_bytes.items()}
            device = max(shorts, key=lambda at: (shorts[at], -costs.listed[at]))
            found.append((max(0, shorts[device]), step.step_s, device, step))
    if not found:
        return Served(name, None, str(steps[0]))
    short, _, device, step = min(found, key=lambda each: each[:2])
    lacks = f"device {costs.listed[device]} needs {size(short)} more than {size(costs.limits_bytes[device])}"
    return Served(name, step, f"{lacks} ({short} bytes)" if short else None)


def data_parallel(costs: CostModel, micro_batches: int) -> ServedStep | str:
    """Return a step of torch.nn.DataParallel, or why there is none."""
    if (nodes := len(set(costs.links.topology.nodes))) > 1:
        return f"it is of one node, and these are on {nodes}"
    if costs.profile.device.type == "cpu":
        return "it is of GPUs, and these are CPUs"
    rows, order, priced = costs.batch // micro_batches, as_listed(costs), costs.links.message_s
    shares: Shares = dict(zip(order, _chunks(costs, rows, len(order)), strict=False))
    if (reason := _refusal(costs, rows, shares)) is not None:
        return reason
    first, *others = shares
    forward_s = _by_device(costs, shares, lambda at, share: costs.forward_s(_alone(costs, at, share), 0))
    backward_s = _by_device(costs, shares, lambda at, share: costs.backward_s(_alone(costs, at, share), 0, 1))
    # Replicas are made anew, so that only the first device adds to gradients of earlier micro-batches.
    backward_s[first] = costs.backward_s(_alone(costs, first, shares[first]), 0, micro_batches)
    outputs = _by_device(costs, shares, lambda at, share: _output_bytes(costs, at, share))

    def scattered_s(at: int, level: Level) -> float:
        return sum(priced(shares[at] * each.bytes_per_sample, level) for each in costs.flows.inputs)

    def output_s(at: int, level: Level) -> float:
        return priced(outputs[at], level)

    def buffers_s(total: int, _: int, level: Level) -> float:
        full, rest = divmod(total, BUFFER_BYTES)
        return full * priced(BUFFER_BYTES, level) + (priced(rest, level) if rest else 0.0)

    held, sent = _parts(costs, first, 1).parameters, partial(_done_s, costs, first, others)
    link_s = sent(scattered_s) + sent(partial(buffers_s, int(held)))
    link_s += sent(output_s, forward_s) - max(forward_s.values()) + sent(output_s)
    link_s += sent(partial(buffers_s, _gradient_bytes(costs)), added_s=_added_s(costs, first))
    each_s = max(forward_s.values()) + link_s + max(backward_s.values())
    step_s = costs.profile.step_overhead_s + micro_batches * each_s + costs.update_s(_alone(costs, first, rows))
    peaks = _by_device(costs, shares, lambda at, share: _peak(costs, at, PeakTerms(share, 1, 1), holds=False))
    peaks[first] = _first_bytes(costs, first, shares[first], micro_batches, sum(outputs.values()))
    return ServedStep(micro_batches, step_s, micro_batches * link_s, f"device {costs.listed[first]}'s link", peaks)


def _first_bytes(costs: CostModel, device: int, rows: float, micro_batches: int, outputs: int) -> int:
    """Return what the first device holds: its gradients, their sum, and that of earlier micro-batches among it."""
    parts = _parts(costs, device, rows)
    gradients = int(parts.gradients)
    earlier = gradients if micro_batches > 1 else 0
    computing, updating = map(int, moments_of(parts, PeakTerms(rows, 1, 1)))
    reducing = updating - int(parts.update) + gradients + earlier + min(gradients, BUFFER_BYTES)
    further = costs.batch * int(parts.inputs) - int(rows_bytes(rows, parts.inputs))
    return further + max(computing + earlier + 2 * outputs, reducing, updating)


def central(costs: CostModel, holder: int, micro_batches: int) -> ServedStep | str:
    """Return a step of a parameter server on one device, or why there is none."""
    if isinstance(shares := _even_shares(costs, micro_batches), str):
        return shares
    done_s = _by_device(costs, shares, partial(_passes_s, costs, micro_batches))
    others, total = sorted((at for at in shares if at != holder), key=done_s.__getitem__), _gradient_bytes(costs)

    def whole_s(_: int, level: Level) -> float:
        return costs.links.message_s(total, level)

    pushed_s = _done_s(costs, holder, others, whole_s, done_s, _added_s(costs, holder))
    pulled_s, last_s = _done_s(costs, holder, others, whole_s), max(done_s.values())
    link_s = max(pushed_s - last_s + pulled_s, _all_reduce_s(costs))
    step_s = costs.profile.step_overhead_s + last_s + link_s + costs.update_s(_alone(costs, holder, costs.batch))

    def peak(at: int, share: float, *, holds: bool = False) -> int:
        return _peak(costs, at, PeakTerms(share, 1, micro_batches), holds=holds)

    peaks = _by_device(costs, shares, peak) | {holder: peak(holder, shares[holder], holds=True)}
    return ServedStep(micro_batches, step_s, link_s, f"device {costs.listed[holder]}'s link", peaks)


def sharded(costs: CostModel, micro_batches: int) -> ServedStep | str:
    """Return a step of a parameter server of which every device is a part, or why there is none."""
    if costs.profile.indivisible is not None:
        return f"the optimizer cannot step parts of parameters: {costs.profile.indivisible}"
    if isinstance(shares := _even_shares(costs, micro_batches), str):
        return shares
    count, topology, total = len(shares), costs.links.topology, _gradient_bytes(costs)
    nodes, first = Counter(topology.nodes), {node: at for at, node in enumerate(topology.nodes)}

    def to_s(here: int, there: int) -> float:
        level = topology.pair(first[here], first[there])
        return (nodes[there] - (here == there)) * costs.links.message_s(total / count, level)

    # All send at once, each at what its link is priced at then.
    link_s = max(2 * max(sum(to_s(here, there) for there in nodes) for here in nodes), _all_reduce_s(costs))

    def updated_s(at: int, _: float) -> float:
        return (costs.update_s(_alone(costs, at, costs.batch)) + (count - 1) * _added_s(costs, at)) / count

    def peak(at: int, share: float) -> int:
        return _peak(costs, at, PeakTerms(share, 1, micro_batches, count, shard="optimizer"), holds=True)

    done_s, update_s = (
        max(_by_device(costs, shares, each).values()) for each in (partial(_passes_s, costs, micro_batches), updated_s)
    )
    step_s = costs.profile.step_overhead_s + done_s + link_s + update_s
    return ServedStep(micro_batches, step_s, link_s, "each link", _by_device(costs, shares, peak))


def _even_shares(costs: CostModel, micro_batches: int) -> Shares | str:
    """Return what every device takes of a micro-batch, the faster ones more; or why it cannot."""
    rows, count = costs.batch // micro_batches, len(costs.devices)
    every = costs.shares(rows, Replicas(count))
    stage = by_share(costs, CandidateStage(0, costs.layer_count, tuple(range(count)), every, 1))
    shares = dict(zip(stage.devices, stage.shares, strict=True))
    return _refusal(costs, rows, shares) or shares


def _chunks(costs: CostModel, rows: int, count: int) -> tuple[float, ...]:
    """Return the sizes of ``torch.chunk``: of nine rows for four, three are given three."""
    if costs.divisible:
        return costs.shares(rows, Replicas(count))
    each = -(-rows // count)
    return tuple(min(each, rows - start) for start in range(0, rows, each))


def _refusal(costs: CostModel, rows: int, shares: Shares) -> str | None:
    if not costs.divisible and rows < len(costs.devices):
        return f"no micro-batch of a batch of {costs.batch} has a sample for each of {len(costs.devices)}"
    return crossed_limit(costs, [CandidateStage(0, costs.layer_count, tuple(shares), tuple(shares.values()), 1)])


def _by_device(costs: CostModel, shares: Shares, value: Callable[[int, float], Value]) -> dict[int, Value]:
    """Return a value of every device and its share, computed once of those alike."""
    like = {(costs.kind_of[device], share): (device, share) for device, share in shares.items()}
    known = {key: value(*each) for key, each in like.items()}
    return {device: known[costs.kind_of[device], share] for device, share in shares.items()}


def _alone(costs: CostModel, device: int, rows: float) -> CandidateStage:
    """Return all layers on one device."""
    return CandidateStage(0, costs.layer_count, (device,), (rows,), 1)


def _parts(costs: CostModel, device: int, rows: float) -> Parts:
    return costs.memory[costs.kind_of[device]].parts(0, costs.layer_count, rows)


def _passes_s(costs: CostModel, micro_batches: int, device: int, rows: float) -> float:
    alone = _alone(costs, device, rows)
    return micro_batches * (costs.forward_s(alone, 0) + costs.backward_s(alone, 0, micro_batches))


def _peak(costs: CostModel, device: int, terms: PeakTerms, *, holds: bool) -> int:
    """Return what a device holds that works, and that has pushes arrive, and updates, if it ``holds`` parameters."""
    parts = _parts(costs, device, terms.rows)
    if not holds:
        return max(map(int, moments_of(parts._replace(optimizer=0, update=0), terms)))
    pushed = parts._replace(update=parts.gradients)
    return max(map(int, (*moments_of(parts, terms), moments_of(pushed, terms)[1])))


def _output_bytes(costs: CostModel, device: int, rows: float) -> int:
    """Return the bytes of a model's outputs, see above."""
    layers, tensors = costs.layers[costs.kind_of[device]], {each.name for each in costs.profile.tensors}
    kept = [number for name, number in layers.saved_at(costs.layer_count - 1, rows).items() if name not in tensors]
    return max(layers.bytes_at(costs.layer_count - 1, "output_bytes", rows), *kept, 0)


def _gradient_bytes(costs: CostModel) -> int:
    """Return the bytes of all gradients, shared parameters' once."""
    return sum(number for _, number in costs.reductions.buckets(0, costs.layer_count))


def _all_reduce_s(costs: CostModel) -> float:
    """Return the seconds of the all-reduce that does what a push and a pull do."""
    return costs.links.collective_s("all_reduce", _gradient_bytes(costs), costs.links.place(range(len(costs.devices))))


def _added_s(costs: CostModel, device: int) -> float:
    """Return the seconds of adding all gradients to others."""
    return sum(layer.accumulate_s for layer in costs.layers[costs.kind_of[device]].layers)


def _done_s(
    costs: CostModel,
    own: int,
    others: Sequence[int],
    exchange_s: Callable[[int, Level], float],
    ready_s: Mapping[int, float] | None = None,
    added_s: float = 0.0,
) -> float:
    """Return when a device has exchanged messages with others, one after the other, the nearest ones first.

    Args:
        costs: have the links.
        own: the device.
        others: in order.
        exchange_s: seconds of the messages with one of them, at a level.
        ready_s: when every device begins, ``own`` among them; None: at 0.
        added_s: of adding what each of the others sent.
    """
    ready, pair = ready_s or {}, costs.links.topology.pair
    now = ready.get(own, 0.0)
    for level, group in groupby(sorted(others, key=lambda at: LEVELS.index(pair(own, at))), partial(pair, own)):
        near = list(group)
        ports = costs.sharing.ports(level, own, near[0], exchange_s(near[0], level))
        at_once = min(map(costs.sharing.capacity, ports), default=1)
        for some in (near[start : start + at_once] for start in range(0, len(near), at_once)):
            begun_s = max(now, *(ready.get(at, 0.0) for at in some))
            now = begun_s + max(exchange_s(at, level) for at in some) + len(some) * added_s
    return now
