"""Contention against a simulator that looks at everything after every event, and against the plain simulation."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest

from autopar.formats.cluster import Cluster, Device, Link, Overlap
from autopar.planner import PlanOptions
from autopar.planner.assemble import assemble
from autopar.planner.candidate import Candidate
from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.model import CostModel, Durations, durations
from autopar.planner.simulator.contention import ContentionSimulation
from autopar.planner.simulator.rows import Rows
from autopar.planner.simulator.simulate import Simulator, compile_rows, run, trace
from autopar.schedules.expand import expand
from drawn import random_candidate
from fluid import Fluid
from hierarchies import hierarchy
from random_problems import random_cluster, random_profile


def _shared(rng: random.Random, cluster: Cluster) -> Cluster:
    """Give a cluster ports that few or many devices share, and slow-downs, or neither."""
    duplex: list[Literal["full", "half"]] = ["full", "half"]
    links = tuple(
        link.model_copy(update={"shared_by": rng.choice([1, 1, 2, 3, 8]), "duplex": rng.choice(duplex)})
        for link in cluster.links
    )
    overlaps = tuple(
        Overlap(level=level, compute=rng.choice([1.0, 1.25]), communication=rng.choice([1.0, 1.5]))
        for level in dict.fromkeys(link.level for link in cluster.links)
        if rng.random() < 0.4
    )
    return cluster.model_copy(update={"links": links, "overlaps": overlaps})


class _Case:
    """A random candidate priced on a random cluster, whose sharing is drawn apart from its prices."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        devices = rng.randint(1, 6)
        cluster = random_cluster(seed, devices)
        if seed % 4 == 0:
            sizes = [1 + rng.randrange(2) for _ in range(devices)]
            cluster = hierarchy(seed, sizes, racks=rng.choice([1, 2, 3]), more_links=True)
        options = PlanOptions(gpus=devices)
        self.costs = CostModel(random_profile(seed, batches=(2, 4, 6, 12)), cluster, options)
        self.candidate: Candidate = random_candidate(rng, self.costs)
        times = durations(self.costs, self.candidate)
        louder = rng.choice([1.0, 1.0, 10.0])
        self.times = replace(times, message_s={pair: s * louder for pair, s in times.message_s.items()})
        self.rows = Simulator(self.costs).rows_of(self.candidate)
        self.cluster = _shared(rng, cluster)
        self.sharing = Sharing.of(self.cluster, self.costs.devices)
        self.devices = tuple(device for stage in self.candidate.stages for device in stage.devices)

    def contended_s(self) -> float:
        return run(self.rows, self.times, self.sharing.among(self.devices))


@pytest.mark.slow
def test_contention_and_overlap_never_shorten_a_step() -> None:
    longer = 0
    for seed in range(1500):
        case = _Case(seed)
        plain_s, contended_s = run(case.rows, case.times), case.contended_s()
        assert contended_s >= plain_s * (1 - 1e-12)
        longer += contended_s > plain_s * (1 + 1e-9)
    assert longer > 200


def test_where_nothing_is_shared_the_step_is_the_plain_one() -> None:
    for seed in range(300):
        case = _Case(seed)
        alone = case.cluster.model_copy(
            update={
                "links": tuple(
                    link.model_copy(update={"shared_by": 1, "duplex": "full"}) for link in case.cluster.links
                ),
                "overlaps": tuple(
                    Overlap(level=level, compute=1.0, communication=1.0)
                    for level in {each.level for each in case.cluster.links}
                ),
            }
        )
        nothing = Sharing.of(alone, case.costs.devices)
        assert not nothing
        step_s = ContentionSimulation(case.rows, case.times, nothing.among(case.devices)).go()
        assert step_s == pytest.approx(run(case.rows, case.times), rel=1e-12)


def test_ports_wide_enough_for_all_transfers_leave_the_plain_step() -> None:
    for seed in range(300):
        case = _Case(seed)
        links = tuple(link.model_copy(update={"shared_by": 100}) for link in case.cluster.links)
        wide = Sharing.of(case.cluster.model_copy(update={"links": links, "overlaps": ()}), case.costs.devices)
        assert wide
        step_s = run(case.rows, case.times, wide.among(case.devices))
        assert step_s == pytest.approx(run(case.rows, case.times), rel=1e-12)


def test_the_step_is_that_of_looking_at_everything_after_every_event() -> None:
    slowed = 0
    for seed in range(500):
        case = _Case(seed)
        fluid = Fluid(case.rows, case.times, case.cluster, case.costs.devices, case.devices)
        step_s = case.contended_s()
        assert step_s == pytest.approx(fluid.step_s(), rel=1e-9)
        slowed += step_s > run(case.rows, case.times) * (1 + 1e-9)
    assert slowed > 60


def test_a_timeline_ends_with_the_step_and_begins_nothing_before_what_it_needs() -> None:
    for seed in range(60):
        case = _Case(seed)
        made = assemble(case.costs, case.candidate, PlanOptions(), 0.0, (), ())
        sharing = case.sharing.among(case.devices)
        program = expand(made)
        timeline = trace(program, case.times, sharing)
        assert timeline.end_s == pytest.approx(run(compile_rows(program, case.times), case.times, sharing), rel=1e-12)
        sent = {(e.rank, e.action.peer, e.action.kind, e.action.micro_batch): e.end_s for e in timeline}
        for event in timeline:
            assert event.start_s <= event.end_s
            if event.action.kind in ("R", "RG"):
                kind = "S" if event.action.kind == "R" else "SG"
                arrived = sent[event.action.peer, event.rank, kind, event.action.micro_batch]
                assert event.end_s >= arrived - 1e-12


def _pairs(count: int, message_s: float) -> tuple[Rows, Durations]:
    """Ranks 0 to count - 1 each compute a second and send one message to the rank ``count`` further on."""
    times = Durations(0.0, stage=[0] * count + [1] * count)
    for column in (times.forward_s, times.backward_s, times.exposed_s, times.reduce_s, times.update_s):
        column.extend([0.0] * 2 * count)
    times.forward_s[:count] = [1.0] * count
    times.message_s.update({(rank, rank + count): message_s for rank in range(count)})
    sending = [[(0, 0, -1, rank), (2, 0, rank + count, rank)] for rank in range(count)]
    return sending + [[(3, 0, rank, rank + count), (0, 0, -1, rank + count)] for rank in range(count)], times


def _two_nodes(count: int, shared_by: int, overlaps: tuple[Overlap, ...] = ()) -> Sharing:
    devices = tuple(Device(type="cpu", memory_bytes=1, node=node) for node in (0, 1) for _ in range(count))
    links = (
        Link(level="node", latency_s=0.0, bytes_per_s=1e9),
        Link(level="network", latency_s=0.0, bytes_per_s=1e9, shared_by=shared_by),
    )
    return Sharing.of(Cluster(devices=devices, links=links, overlaps=overlaps), devices)


@pytest.mark.parametrize(("count", "shared_by"), [(1, 4), (4, 4), (3, 2), (8, 2), (6, 5)])
@pytest.mark.parametrize("duplex", ["full", "half"])
def test_more_messages_than_a_port_is_shared_by_slow_each_other(
    count: int, shared_by: int, duplex: Literal["full", "half"]
) -> None:
    rows, times = _pairs(count, 0.5)
    sharing = _two_nodes(count, shared_by)
    # Devices are dealt to ports by as many as share one, and so none is crowded.
    assert run(rows, times, sharing) == pytest.approx(1.5)
    (link,) = sharing.links["network"] if shared_by > 1 else (Link(level="network", latency_s=0.0, bytes_per_s=1e9),)
    one_port = replace(
        sharing,
        links={"network": (link.model_copy(update={"duplex": duplex}),)},
        places={"network": (0,) * 2 * count},
    )
    crowded = max(1.0, count / (shared_by * (2 if duplex == "half" else 1)))
    assert run(rows, times, one_port) == pytest.approx(1 + 0.5 * crowded)


def test_computing_takes_longer_while_its_device_receives_and_no_longer() -> None:
    """Rank 1 computes 1 s from the start; its message of 0.4 s comes from rank 0 at 0.5 s."""
    times = Durations(0.0, stage=[0, 1])
    for column in (times.forward_s, times.backward_s, times.exposed_s, times.reduce_s, times.update_s):
        column.extend([0.0, 0.0])
    times.forward_s[:] = [0.5, 1.0]
    times.message_s[0, 1] = 0.4
    rows: Rows = [[(0, 0, -1, 0), (2, 0, 1, 0)], [(0, 0, -1, 1), (3, 0, 0, 1), (1, 0, -1, 1)]]
    sharing = _two_nodes(1, 1, (Overlap(level="network", compute=2.0, communication=1.0),))
    assert run(rows, times, sharing) == pytest.approx(1.2)
    sharing = _two_nodes(1, 1, (Overlap(level="network", compute=1.0, communication=2.0),))
    # 0.25 s of the message pass while rank 1 computes, the other 0.15 s after it.
    assert run(rows, times, sharing) == pytest.approx(1.15)


def test_a_bandwidth_that_is_assumed_of_every_link_is_nobodys_to_share() -> None:
    case = _Case(3)
    links = tuple(link.model_copy(update={"shared_by": 2}) for link in case.cluster.links)
    cluster = case.cluster.model_copy(update={"links": links, "overlaps": ()})
    assert Sharing.of(cluster, case.costs.devices)
    assert not Sharing.of(cluster, case.costs.devices, bytes_per_s=1e9)


def test_the_searchs_simulator_heeds_sharing_only_where_something_can_slow() -> None:
    for seed in range(40):
        case = _Case(seed)
        contended = Simulator(case.costs, case.sharing).step_s(case.candidate)
        times = durations(case.costs, case.candidate)
        assert contended == pytest.approx(run(case.rows, times, case.sharing.among(case.devices)), rel=1e-12)


def test_a_step_that_is_not_below_a_limit_may_be_a_lower_bound_that_is_not_either() -> None:
    spared = 0
    for seed in range(60):
        case = _Case(seed)
        simulator = Simulator(case.costs, case.sharing)
        contended = simulator.step_s(case.candidate)
        for factor in (0.5, 0.9, 1.1):
            limit_s = factor * contended
            found = simulator.step_s(case.candidate, limit_s)
            if factor > 1:
                assert found == contended
            else:
                assert limit_s <= found <= contended * (1 + 1e-12)
            spared += found < contended * (1 - 1e-9)
    assert spared > 10
