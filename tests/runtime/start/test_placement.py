"""Ranks by the nodes and kinds of their devices, against every permutation; what is said where there is none."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import pytest

from autopar.errors import UsageError
from autopar.formats.plan import FileReference, NodeDevices, Plan
from autopar.hardware.clusters import cluster_named
from autopar.ranks.device import FoundDevice
from autopar.ranks.meeting import Arrival
from autopar.runtime.start.placement import Placement, check_launched, match, place, place_here
from played import small_plan

KINDS = ("V100", "H100", "A100")


def fits(ranks: Sequence[int], planned: Sequence[tuple[int, str]], found: Sequence[tuple[int, str]]) -> bool:
    """Whether every device is of its rank's kind, and ranks are of one node where they are of one host."""
    kinds = all(found[process][1] == planned[rank][1] for process, rank in enumerate(ranks))
    pairs = {(host, planned[rank][0]) for (host, _), rank in zip(found, ranks, strict=True)}
    return kinds and len(pairs) == len({host for host, _ in pairs}) == len({node for _, node in pairs})


@pytest.mark.parametrize("seed", range(200))
def test_ranks_are_placed_wherever_some_permutation_places_them_and_stay_where_they_may(seed: int) -> None:
    draw = random.Random(seed)
    count, nodes = draw.randint(1, 6), draw.randint(1, 4)
    planned = [(draw.randrange(nodes), draw.choice(KINDS[: 1 + seed % 3])) for _ in range(count)]
    if draw.random() < 0.5:
        planned.sort()
    found = [(10 + node, kind) for node, kind in planned]
    change = draw.choice(("order", "names", "kind", "host", "nothing", "node"))
    if change == "order":
        draw.shuffle(found)
    elif change == "names":
        hosts = draw.sample(range(20), 4)
        found = draw.sample([(hosts[host - 10], kind) for host, kind in found], count)
    elif change == "kind":
        found[draw.randrange(count)] = (10, draw.choice(KINDS))
    elif change == "host":
        found[draw.randrange(count)] = (10 + draw.randrange(nodes), planned[0][1])
    elif change == "node":
        found = [(10 + draw.randrange(2), kind) for _, kind in draw.sample(found, count)]
    some = [each for each in permutations(range(count)) if fits(each, planned, found)]
    ranks = match(planned, found)
    assert (ranks is not None) == bool(some), (planned, found)
    if ranks is not None:
        assert ranks in some
        assert (ranks == tuple(range(count))) == (tuple(range(count)) in some)


def planned(*nodes: str, device_type: str = "cuda", **changes: object) -> Plan:
    """A plan of a rank for each word of each node."""
    kinds = [(at, kind) for at, node in enumerate(nodes) for kind in node.split()]
    own = tuple(NodeDevices(node=at, type=kind, memory_bytes=2**35, count=1) for at, kind in kinds)
    made = small_plan((len(kinds),), 2)
    return Plan.model_validate({**dict(made), "nodes": own, "device_type": device_type, **changes})


NAMES = {
    "V100": FoundDevice("cuda", "Tesla V100-SXM2-32GB", 32 << 30),
    "H100": FoundDevice("cuda", "NVIDIA H100 80GB HBM3", 80 << 30),
    "strange": FoundDevice("cuda", "NVIDIA Strange", 8 << 30),
    "cpu": FoundDevice("cpu", "AMD EPYC", 1 << 30),
    "xeon": FoundDevice("cpu", "Intel Xeon", 1 << 30),
}


def arrivals(**hosts: str) -> list[Arrival]:
    """Those of hosts, each with the devices of its ranks."""
    every = ((host, devices.split()) for host, devices in hosts.items())
    return [Arrival(host, at, len(own), {}, {}, NAMES[kind]) for host, own in every for at, kind in enumerate(own)]


def test_hosts_are_taken_in_any_order_and_who_moves_is_said() -> None:
    plan = planned("V100-SXM2-32G V100-SXM2-32G", "H100 H100")
    assert place(plan, arrivals(a="V100 V100", b="H100 H100")) == Placement((0, 1, 2, 3))
    moved = place(plan, arrivals(b="H100 H100", a="V100 V100"))
    said = "ranks are placed by the plan's nodes and kinds of devices, in the launcher's order: b has 2, 3; a has 0, 1"
    assert moved == Placement((2, 3, 0, 1), (said,))
    # In plans of an earlier autopar nothing is said of devices.
    assert place(planned("H100", nodes=()), arrivals(a="V100")) == Placement((0,))
    unsaid = place(planned("H100 H100", nodes=()), arrivals(a="V100", b="V100"))
    assert unsaid.is_as_launched
    assert "does not say where its devices are" in unsaid.notes[0]
    mixed = place_here(planned("V100 V100 H100 H100"), [NAMES[kind] for kind in ("H100", "V100", "V100", "H100")])
    assert mixed.ranks == (2, 0, 1, 3)
    assert place_here(planned("H100 H100 H100"), [NAMES["H100"]]).is_as_launched


@pytest.mark.parametrize(
    ("plan", "hosts", "said"),
    [
        (
            planned("H100 H100", "H100 H100"),
            {"a": "H100 H100 H100 H100"},
            "the plan is for 2 nodes (2 x H100 each), and its ranks are on a (4 x NVIDIA H100 80GB HBM3 of 80 GiB); "
            "start it where those are, or plan for these: `autopar plan profile.json --cluster 4xH100-SXM`",
        ),
        (
            planned("V100 V100", "H100 H100", cluster_name="2xV100+2xH100:400Gbps"),
            {"a": "V100 H100", "b": "V100 H100"},
            "1 node (2 x V100) and 1 node (2 x H100), and its ranks are on a, b (1 x Tesla V100-SXM2-32GB of 32 GiB, "
            "1 x NVIDIA H100 80GB HBM3 of 80 GiB each); start it where those are, or measure these: `autopar cluster "
            "probe`, started as these ranks are, and `autopar plan profile.json --cluster cluster.json`",
        ),
        (
            planned("V100", "H100", cluster_name="1x1xV100+1x1xH100:400Gbps:100Gbps"),
            {"a": "H100", "b": "H100"},
            "plan for these: `autopar plan profile.json --cluster 2x1xH100-SXM:400Gbps`",
        ),
        (
            planned("H100 H100", profile=FileReference(path="../big.json", sha256="0" * 64)),
            {"a": "strange strange"},
            "on a (2 x NVIDIA Strange of 8 GiB); start it where those are, or measure these: `autopar cluster probe "
            "--device cuda --ranks 2` and `autopar plan ../big.json --cluster cluster.json`",
        ),
        (planned("H100"), {"a": "strange"}, "or profile here: `autopar profile model.py --batch 16`"),
        (
            planned("cpu", "cpu", "cpu", "cpu", "cpu", device_type="cpu"),
            {"a": "cpu cpu", "b": "cpu", "c": "cpu", "d": "xeon"},
            "5 nodes (1 x cpu each), and its ranks are on a (2 x AMD EPYC) and b, c (1 x AMD EPYC each) and d (1 x",
        ),
        (planned("H100", "H100", device_type="cpu"), {"a": "cpu", "b": "cpu"}, "b (1 x AMD EPYC each)"),
    ],
)
@pytest.mark.reliability(55)
def test_devices_that_are_not_there_are_refused_with_the_line_that_plans_for_those_that_are(
    plan: Plan, hosts: dict[str, str], said: str
) -> None:
    for turn in range(len(hosts)):
        names = list(hosts)[turn:] + list(hosts)[:turn]
        found = arrivals(**{name: hosts[name] for name in names})
        with pytest.raises(UsageError) as caught:
            place(plan, found)
        assert "\n" not in str(caught.value)
        if not turn:
            assert said in str(caught.value)
        typed = str(caught.value).rpartition("--cluster ")[2].strip("`")
        if "--cluster" in str(caught.value) and typed != "cluster.json":
            named = Counter((device.node, device.type) for device in cluster_named(typed).devices)
            assert sorted(named.values()) == sorted(len(own.split()) for own in hosts.values())


def test_cpus_are_matched_by_name_where_that_is_possible_and_others_are_a_note() -> None:
    plan = planned("Intel-Xeon", "AMD-EPYC", device_type="cpu")
    nodes = tuple(each.model_copy(update={"type": each.type.replace("-", " ")}) for each in plan.nodes)
    plan = plan.model_copy(update={"nodes": nodes})
    assert place(plan, arrivals(a="cpu", b="xeon")).ranks == (1, 0)
    others = place(plan, arrivals(a="cpu", b="cpu"))
    assert others == Placement(
        (0, 1), ("the plan is for Intel Xeon, and ran on AMD EPYC: its times are of another CPU",)
    )
    assert place(planned("cpu cpu", device_type="cpu"), arrivals(a="cpu xeon")) == Placement((0, 1))


def test_a_scripts_ranks_stay_and_how_to_start_its_hosts_is_said() -> None:
    two = planned("V100 V100", "H100 H100")
    assert check_launched(two, arrivals(a="V100 V100", b="H100 H100")).is_as_launched
    with pytest.raises(UsageError, match=r"a script's ranks stay .* other devices: start hosts in the order a, b$"):
        check_launched(two, arrivals(b="H100 H100", a="V100 V100"))
    one = planned("V100 H100 H100")
    with pytest.raises(UsageError, match=r"on other devices: set CUDA_VISIBLE_DEVICES=1,0,2 on a$"):
        check_launched(one, arrivals(a="H100 V100 H100"))
    with pytest.raises(UsageError, match=r"start hosts in the order a, b; set CUDA_VISIBLE_DEVICES=1,0 on a$"):
        check_launched(planned("V100 H100", "H100"), arrivals(b="H100", a="H100 V100"))
    turns = (0, 1, 0, 1)
    nodes = tuple(NodeDevices(node=node, type="H100", memory_bytes=1, count=1) for node in turns)
    with pytest.raises(UsageError, match="take turns, as no launcher numbers them; `autopar worker` places ranks"):
        check_launched(two.model_copy(update={"nodes": nodes}), arrivals(a="H100 H100", b="H100 H100"))
