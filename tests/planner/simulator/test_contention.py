"""Contention against a simulator that looks at everything after every event, and against the plain simulation."""

import random
from dataclasses import replace
from typing import Literal

import pytest

from autopar.formats.cluster import Cluster, Overlap
from autopar.planner import PlanOptions
from autopar.planner.assemble import assemble
from autopar.planner.candidate import Candidate
from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.model import CostModel, durations
from autopar.planner.simulator.contention import ContentionSimulation
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


def _all(cluster: Cluster, compute: float | None, **ports: object) -> Cluster:
    """The cluster, with the same ports for all its links, and the same slow-down of computing at all levels, if any."""
    links = tuple(link.model_copy(update=ports) for link in cluster.links)
    levels = dict.fromkeys(link.level for link in links) if compute else ()
    overlaps = tuple(Overlap(level=level, compute=compute or 1.0, communication=1.0) for level in levels)
    return cluster.model_copy(update={"links": links, "overlaps": overlaps})


def test_where_nothing_is_shared_the_step_is_the_plain_one() -> None:
    """Nor where ports are wide enough for all transfers."""
    for seed in range(120):
        case = _Case(seed)
        plain_s = pytest.approx(run(case.rows, case.times), rel=1e-12)
        nothing = Sharing.of(_all(case.cluster, 1.0, shared_by=1, duplex="full"), case.costs.devices)
        assert not nothing
        assert ContentionSimulation(case.rows, case.times, nothing.among(case.devices)).go() == plain_s
        wide = Sharing.of(_all(case.cluster, None, shared_by=100), case.costs.devices)
        assert wide
        assert run(case.rows, case.times, wide.among(case.devices)) == plain_s


def test_the_step_is_that_of_looking_at_everything_after_every_event() -> None:
    slowed = 0
    for seed in range(240):
        case = _Case(seed)
        fluid = Fluid(case.rows, case.times, case.cluster, case.costs.devices, case.devices)
        step_s = case.contended_s()
        assert step_s == pytest.approx(fluid.step_s(), rel=1e-9)
        plain_s = run(case.rows, case.times)
        assert step_s >= plain_s * (1 - 1e-12)
        slowed += step_s > plain_s * (1 + 1e-9)
    assert slowed > 28


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


def test_a_bandwidth_that_is_assumed_of_every_link_is_nobodys_to_share() -> None:
    case = _Case(3)
    cluster = _all(case.cluster, None, shared_by=2)
    assert Sharing.of(cluster, case.costs.devices)
    assert not Sharing.of(cluster, case.costs.devices, bytes_per_s=1e9)


def test_a_step_that_is_not_below_a_limit_may_be_a_lower_bound_that_is_not_either() -> None:
    spared = 0
    for seed in range(60):
        case = _Case(seed)
        simulator = Simulator(case.costs, case.sharing)
        contended = simulator.step_s(case.candidate)
        times = durations(case.costs, case.candidate)
        assert contended == pytest.approx(run(case.rows, times, case.sharing.among(case.devices)), rel=1e-12)
        for factor in (0.5, 0.9, 1.1):
            limit_s = factor * contended
            found = simulator.step_s(case.candidate, limit_s)
            if factor > 1:
                assert found == contended
            else:
                assert limit_s <= found <= contended * (1 + 1e-12)
            spared += found < contended * (1 - 1e-9)
    assert spared > 10
