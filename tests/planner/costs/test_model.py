"""Costs against hand-made and step-by-step ones; steps of several stages a rank, or halves, against naive solutions."""

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from autopar.errors import FileError
from autopar.formats.cluster import Cluster, Curve, Device, Link, Overlap
from autopar.formats.plan import Plan
from autopar.formats.profile import Layer, Line, Profile, Tensor, TiedParameter
from autopar.hardware.topology import Place
from autopar.planner import PlanOptions, plan
from autopar.planner.assemble import assemble
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.communication import LinkModel, Sharing
from autopar.planner.costs.durations import durations, rank_bytes
from autopar.planner.costs.layers import LayerCosts
from autopar.planner.costs.memory import POSTED_AHEAD, PeakTerms
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.rank_memory import peak_terms_of
from autopar.planner.costs.reductions import Reduction
from autopar.planner.simulator.simulate import Simulator, compile_rows, run, trace
from autopar.schedules.expand import expand, messages
from chunked import OTHERS, random_chunked, random_costs
from drawn import random_candidate
from random_problems import cost, gpt_profile, local_cluster, profile_of, random_cluster, random_profile

MIB = 2**20


def _cluster(*curves: Curve) -> Cluster:
    link = Link(level="node", latency_s=1e-3, bytes_per_s=1e6)
    return Cluster(devices=(Device(type="cpu", memory_bytes=1),) * 2, links=(link,), curves=curves)


def test_reductions_are_measured_or_rings_and_exposed_beyond_the_backward() -> None:
    cluster = _cluster(Curve(kind="all_reduce", ranks=2, level="node", sizes=(1000, 2000), seconds=(0.010, 0.012)))
    links = LinkModel(cluster, cluster.devices)
    assert links.collective_s("all_reduce", 1500, Place(2)) == pytest.approx(0.011)
    assert links.collective_s("all_reduce", 3000, Place(2)) == pytest.approx(0.014)
    assert links.collective_s("all_reduce", 2000, Place(4)) == pytest.approx(0.010 * 3 + 0.002 * 1.5)
    assert links.collective_note("all_reduce", Place(2)) is None
    assert links.collective_note("all_reduce", Place(4)) == "all-reduce among 4 ranks is estimated from 2"
    bare = LinkModel(_cluster(), cluster.devices)
    assert bare.collective_s("all_reduce", 2000, Place(4)) == pytest.approx(2 * 3 / 4 * 2000 / 1e6 + 6e-3)
    assert bare.message_s(2000, "node") == pytest.approx(3e-3)
    assert bare.collective_s("all_reduce", 0, Place(4)) == bare.collective_s("all_reduce", 2000, Place(1)) == 0.0
    links = LinkModel(cluster, cluster.devices, bytes_per_s=1e9)
    assert links.message_s(10**9, "node") == pytest.approx(1.001)
    assert links.collective_s("all_reduce", 10**9, Place(2)) == pytest.approx(1.002)
    curve = Curve(kind="p2p", ranks=2, level="node", sizes=(10, 20, 30), seconds=(3.0, 2.0, 4.0))
    links = LinkModel(_cluster(curve), _cluster().devices)
    times = [links.message_s(size, "node") for size in range(60)]
    assert times == sorted(times)
    assert links.message_s(40, "node") == pytest.approx(4.0 + 10 * 0.1)
    layers = [_layer("a", 5.0, 20 * MIB), _layer("b", 7.0, 20 * MIB), _layer("c", 1.0, 20 * MIB)]
    slow = Curve(kind="all_reduce", ranks=2, level="node", sizes=(1, 20 * MIB), seconds=(0.0, 6.0))
    costs = CostModel(profile_of(layers, [], 1), _cluster(slow), PlanOptions())
    # c is ready at 1 and reduced at 7; b at 8 and 14; a at 13, reduced from 14 to 20: 7 after the backward's 13.
    assert costs.reductions.exposed_s(Reduction(0, 3, Place(2))) == pytest.approx(7.0, rel=1e-5)
    whole = CandidateStage(0, 3, (0, 1), (1, 1), 1)
    assert costs.reduce_s(whole) == pytest.approx(18.0, rel=1e-5)
    assert costs.replica_exposed_s(whole, 0) == costs.reductions.exposed_s(Reduction(0, 3, Place(2)))
    assert costs.reductions.exposed_s(Reduction(0, 3, Place(1))) == 0.0
    # Where the last backward adds to gradients: c at 2 and 8, b at 10 and 16, a at 16, and 6 more.
    adding = [each.model_copy(update={"accumulate_s": 1.0}) for each in layers]
    costs = CostModel(profile_of(adding, [], 1), _cluster(slow), PlanOptions())
    assert costs.reductions.exposed_s(Reduction(0, 3, Place(2))) == pytest.approx(6.0, rel=1e-5)


def _layer(name: str, backward_s: float, trainable: int) -> Layer:
    sizes = dict.fromkeys(("parameters_bytes", "trainable_bytes", "gradient_bytes"), trainable)
    costs = (cost(1, 1.0, backward_s, {f"{name}/s": 100, "x": 8}, 150, 30),)
    return Layer(name=name, modules=(name,), costs=costs, **sizes, optimizer_bytes=2 * trainable, buffers_bytes=10)


LAYERS = [_layer("a", 1.0, 1000), _layer("b", 1.0, 500), _layer("c", 1.0, 0)]


def test_a_parameter_tied_within_a_stage_is_reduced_once_and_between_stages_apart() -> None:
    layers = [_layer("a", 1.0, 1000), _layer("b", 1.0, 500), _layer("c", 1.0, 1000)]
    tied = (TiedParameter(parameter="w", layers=("a", "c"), bytes=1000),)
    costs = CostModel(profile_of(layers, [], 1, tied), _cluster(), PlanOptions())
    ring = 2e-3
    assert costs.reduce_s(CandidateStage(0, 3, (0, 1), (1, 1), 1)) == pytest.approx(ring + 1500 / 1e6)
    assert costs.reduce_s(CandidateStage(0, 2, (0, 1), (1, 1), 1)) == pytest.approx(ring + 500 / 1e6)
    assert costs.reductions.buckets(0, 3) == [(0, 1500)]
    stages = (CandidateStage(0, 2, (0,), (1,), 1), CandidateStage(2, 3, (1,), (1,), 1))
    assert costs.tied_between(stages) == [(0, (0, 1))]
    assert costs.tied_between((CandidateStage(0, 3, (0,), (1,), 1),)) == []
    apart = Cluster(
        devices=tuple(Device(type="cpu", memory_bytes=1, node=node) for node in (0, 0, 1)),
        links=tuple(Link(level=at, latency_s=1e-3, bytes_per_s=rate) for at, rate in (("node", 1e6), ("network", 1e3))),
    )
    between = CostModel(profile_of(layers, [], 1, tied), apart, PlanOptions())
    holders = CandidateStage(0, 2, (0, 1), (1, 1), 1), CandidateStage(2, 3, (2,), (1,), 1)
    assert between.tied_s(0, holders) == pytest.approx(2 * ring + 2 * 2 / 3 * 1000 / 1e3)
    whole = costs.memory[0].parts(0, 3, 1)
    assert whole.parameters + whole.optimizer + whole.gradients == 1500 * 4 + 3 * 10
    assert whole.gradients == 1500
    assert (whole.lasting, costs.memory[0].parts(0, 2, 1).lasting) == (0, 1000)


def test_memory_is_the_docstrings_sum_and_each_ranks_own() -> None:
    tensors = [
        Tensor(name="x", producer=None, consumers=("a",), bytes_per_sample=8, dtype="i64", gradient=False),
        Tensor(name="ab", producer="a", consumers=("b", "c"), bytes_per_sample=40, dtype="f32", gradient=True),
        Tensor(name="bc", producer="b", consumers=("c",), bytes_per_sample=24, dtype="f32", gradient=True),
    ]
    costs = CostModel(profile_of(LAYERS, tensors, 12), _cluster(), PlanOptions(gpus=3))
    stages = tuple(CandidateStage(index, index + 1, (index,), (3,), 3 - index) for index in range(3))
    peaks = costs.peak_bytes(Candidate(4, 3, "1f1b", stages))
    # Stage 0 saves 100 a row and keeps `ab` for both readers; x is an input. Of the 50 that its layer holds for a
    # while, `ab` and its gradient are all. Three gradients of `ab` are on their way from stage 1, and from stage 2.
    first = (1000 * 4 + 10) + 2 * (100 + 40) * 3 + (100 + 40) * 3 + 4 * 8 * 3 + 3 * (3 * 40 + 3 * 40)
    # Stage 1 saves 100 and the input x, which counts as a model input; it receives `ab` and sends `bc`. A gradient of
    # `ab` that it sent has not arrived; `ab` and two of `bc`, or three of `bc`, are to come.
    second = (500 * 4 + 10) + 1 * (100 + 40 + 24) * 3 + (100 + 2 + 40 + 24) * 3 + 3 * (40 + 40 + 2 * 24)
    # Stage 2 has both to come, and a gradient of each on its way: of `ab` two, since stage 0 leads by as many.
    assert peaks == [first, second, 10 + (150 + 40 + 24) * 3 + 3 * (40 + 24 + 2 * 40 + 24)]
    devices = tuple(Device(type="cpu", memory_bytes=size) for size in (300, 200))
    costs = CostModel(profile_of(LAYERS, [], 4), _cluster().model_copy(update={"devices": devices}), PlanOptions())
    held = rank_bytes(costs, Candidate(4, 1, "1f1b", (_replicas("none"),)))
    assert [each.limit for each in held] == [300, 200]
    profile = gpt_profile()
    costs = CostModel(profile, local_cluster(), PlanOptions())
    head = costs.layer_count - 1
    stage = CandidateStage(head, head + 1, (0,), (1,), 1)
    assert costs.update_s(stage) == pytest.approx(2 * profile.layers[0].update_s)
    quick = [layer.model_copy(update={"update_s": 0.0}) for layer in profile.layers]
    assert costs.with_layer_costs(LayerCosts(tuple(quick))).update_s(stage) == 0.0
    layers = list(gpt_profile().layers)
    layers[3] = layers[3].model_copy(update={"parameters_bytes": 10**17, "optimizer_bytes": 10**18})
    large = gpt_profile().model_copy(update={"layers": tuple(layers)})
    with pytest.raises(FileError, match=r"\$\.layers\[3\] \(h\.2\) holds most"):
        CostModel(large, local_cluster(1), PlanOptions(gpus=1))


@pytest.mark.parametrize(("schedule", "cuts"), [("1f1b", (3,)), ("zb-h1", (3,)), ("zb-v", (1, 3))])
def test_an_update_holds_what_its_largest_layer_does_or_all_where_they_are_updated_at_once(
    schedule: str, cuts: tuple[int, ...]
) -> None:
    layers = [each.model_copy(update={"update_bytes": 10**6 * 3**at}) for at, each in enumerate(LAYERS[:2])]
    stages = tuple(CandidateStage(first, stop, (0,), (1,), 1) for first, stop in pairwise((0, *cuts)))
    for at_once, most in ((False, 3 * 10**6), (True, 4 * 10**6)):
        profile = profile_of([*layers, LAYERS[2]], [], 4).model_copy(update={"updates_at_once": at_once})
        peaks = CostModel(profile, _cluster(), PlanOptions()).peak_bytes(Candidate(4, 1, schedule, stages))
        assert set(peaks) == {1500 * 4 + 3 * 10 + most}


def test_in_flight_micro_batches_add_activations_and_recomputation_keeps_inputs_only() -> None:
    for seed in range(20):
        costs = CostModel(random_profile(seed), random_cluster(seed, 4), PlanOptions(gpus=4))
        memory, count = costs.memory[0], costs.layer_count
        for first in range(count):
            for stop in range(first + 1, count + 1):
                peaks = [memory.peak(first, stop, PeakTerms(2, depth, 8, replicas=2)) for depth in range(1, 8)]
                parts = memory.parts(first, stop, 2)
                # What nobody answers to stays, in flight or not.
                each = parts.activations - 2 * parts.unanswered_sends
                beyond = [after - before - each for before, after in pairwise(peaks)]
                # A third gradient is there only where so many are in flight.
                assert 0 <= beyond.pop(POSTED_AHEAD - 1) <= 2 * parts.received_gradients
                assert set(beyond) == {0}
                assert parts.peak >= parts.activations
    tensors = [
        Tensor(name="ab", producer="a", consumers=("b",), bytes_per_sample=40, dtype="f32", gradient=True),
        Tensor(name="bc", producer="b", consumers=("c",), bytes_per_sample=24, dtype="f32", gradient=True),
    ]
    costs = CostModel(profile_of(LAYERS, tensors, 4), _cluster(), PlanOptions())
    plain, again = CandidateStage(0, 3, (0,), (1,), 1), CandidateStage(0, 3, (0,), (1,), 1, (0, 1, 2))
    assert costs.backward_s(again, 0, 4) == pytest.approx(costs.backward_s(plain, 0, 4) + 3 * 1.0)
    # Nothing of a layer's own is kept: 100 + x's 8 each; what they hand on is, and x is no tensor of this profile.
    assert costs.memory[0].parts(0, 3, 1).activations == 3 * 100 + 8
    assert costs.memory[0].parts(0, 3, 1, frozenset({0, 1, 2})).activations == 40 + 24
    # While one layer runs backward, it holds its 150.
    assert costs.memory[0].parts(0, 3, 1, frozenset({0, 1, 2})).peak == 40 + 24 + 150
    assert costs.recompute_levels(1)[0] == frozenset()
    assert costs.recompute_levels(1)[-1] == {0, 1, 2}


def test_times_say_where_they_come_from_and_processes_what_they_take() -> None:
    profile, cluster = gpt_profile(), local_cluster(2)
    costs = CostModel(profile, cluster, PlanOptions(gpus=2))
    kinds = ["measured", "interpolated", "estimated"]
    assert [costs.layers[0].provenance(0, 3, rows) for rows in (4, 3, 32)] == kinds
    assert [costs.links.message_provenance(size, "node") for size in (1024, 1025, 2**40)] == kinds
    assert [costs.links.collective_provenance("all_reduce", 2048, Place(ranks)) for ranks in (2, 3)] == kinds[1:]
    assumed = CostModel(profile, cluster, PlanOptions(gpus=2, bytes_per_s=1e9))
    assert assumed.links.message_provenance(1024, "node") == "estimated"
    made = plan(profile, cluster, PlanOptions(gpus=2, stages="0-6:1,7-13:1", micro_batches=4, batch=12))
    assert made.predicted.compute == ("interpolated", "interpolated")
    assert made.predicted.communication == "interpolated"
    alone = plan(gpt_profile(), local_cluster(1), PlanOptions(gpus=1, micro_batches=4, batch=16))
    assert alone.predicted.compute == ("measured",)
    assert alone.predicted.communication is None
    sharded = plan(profile, cluster, PlanOptions(gpus=2, stages="0-13:2", shard="optimizer", micro_batches=4))
    for kind in ("reduce-scatter", "all-gather"):
        assert any(note.startswith(f"{kind} among 2 ranks is computed from") for note in sharded.notes)
    profile = gpt_profile()
    fit = Line(fixed_s=1.0, per_sample_s=0.5, residual=0.0)
    layers = tuple(layer.model_copy(update={"forward_fit": fit}) for layer in profile.layers)
    costs = CostModel(profile.model_copy(update={"layers": layers}), local_cluster(1), PlanOptions(gpus=1))
    assert costs.forward_s(CandidateStage(0, 1, (0,), (32,), 1), 0) == pytest.approx(17.0)
    measured_s = profile.layers[0].costs[3].forward_s
    assert costs.forward_s(CandidateStage(0, 1, (0,), (8,), 1), 0) == pytest.approx(measured_s)
    device = profile.device.model_copy(update={"reserved_bytes": 2**30})
    costs = CostModel(profile.model_copy(update={"device": device}), local_cluster(1), PlanOptions(gpus=1))
    assert costs.limits_bytes == [7 * 2**30]


def _replicas(shard: str, recompute: tuple[int, ...] = ()) -> CandidateStage:
    return CandidateStage(0, 3, (0, 1), (1, 1), 1, recompute, shard)  # type: ignore[arg-type]


def test_sharding_divides_what_it_names_and_communicates_for_it() -> None:
    costs = CostModel(profile_of(LAYERS, [], 4), _cluster(), PlanOptions())
    alone = [Candidate(4, 1, "1f1b", (_replicas(shard),)) for shard in ("none", "optimizer")]
    held = [costs.memory[0].peak(0, 3, peak_terms_of(each.stages[0], each.micro_batches, 0, 1)) for each in alone]
    # Every replica also has its half of the parameters, from which they are gathered.
    assert held[0] - held[1] == (3000 - 1530) // 2
    by_shard = {shard: _replicas(shard) for shard in ("none", "optimizer", "gradients", "parameters")}
    # What is whole for a while, as layers compute, is counted there.
    states = [costs.state_bytes(Candidate(4, 1, "1f1b", (each,)), 0) for each in by_shard.values()]
    assert states == [(4530, 1500), (3795, 1500), (3795, 750), (2265, 750)]
    ring = 1e-3
    assert costs.reduce_s(by_shard["none"]) == pytest.approx(2 * ring + 1500 / 1e6)
    # A CPU waits for one layer after the other; the third has nothing to move.
    assert costs.reduce_s(by_shard["optimizer"]) == pytest.approx(2 * ring + 750 / 1e6)
    assert costs.replica_exposed_s(by_shard["optimizer"], 0) == costs.reduce_s(by_shard["optimizer"])
    assert costs.update_s(by_shard["optimizer"]) == pytest.approx(2 * ring + 750 / 1e6)
    assert costs.update_s(by_shard["parameters"]) == 0.0
    # In every backward they are reduced, and none is left after the last one.
    assert [costs.replica_exposed_s(by_shard[shard], 0) for shard in ("gradients", "parameters")] == [0.0, 0.0]
    # Half of 1000 and of 500 bytes are gathered, at 100 bytes a second: on a CPU, in turn with a second of computing.
    slow = CostModel(profile_of(LAYERS, [], 4), _cluster(), PlanOptions(bytes_per_s=100.0))
    assert slow.forward_s(by_shard["parameters"], 0) == pytest.approx(3 + 5.001 + 2.501)
    assert slow.backward_s(by_shard["gradients"], 0, 4) == pytest.approx(3 + 5.001 + 2.501)
    assert slow.backward_s(by_shard["parameters"], 0, 4) == pytest.approx(3 + 10.002 + 5.002)
    # Whatever overlaps, fully_shard waits for gloo.
    overlap = Overlap(level="node", compute=1.25, communication=2.0)
    shared = _cluster().model_copy(update={"overlaps": (overlap,)})
    waiting = CostModel(profile_of(LAYERS, [], 4), shared, PlanOptions(bytes_per_s=100.0))
    assert waiting.forward_s(by_shard["parameters"], 0) == slow.forward_s(by_shard["parameters"], 0)


def test_sharded_gradients_are_added_up_and_gathered_beside_computing() -> None:
    known = _gpu(profile_of(LAYERS, [], 4))
    by_shard = {shard: _replicas(shard) for shard in ("optimizer", "gradients", "parameters")}
    # Where both slow each other to 0.8 and 0.5 of their speeds, a second of computing lasts 1.25 with the gathering.
    overlap = Overlap(level="node", compute=1.25, communication=2.0)
    shared = _cluster().model_copy(update={"overlaps": (overlap,)})
    both = CostModel(known, shared, PlanOptions(bytes_per_s=100.0))
    assert both.forward_s(by_shard["parameters"], 0) == pytest.approx(5.001 + 0.625 + 2.501 + 0.625 + 1.0)
    heavy = shared.model_copy(update={"overlaps": (Overlap(level="node", compute=9.0, communication=9.0),)})
    slowed = CostModel(known, heavy, PlanOptions(bytes_per_s=100.0))
    assert slowed.forward_s(by_shard["parameters"], 0) == pytest.approx(3 + 5.001 + 2.501)
    # Without overlaps, the longer one; the first layer's scatter ends after the backward; buckets go together.
    apart = CostModel(known, _cluster(), PlanOptions(bytes_per_s=100.0))
    assert apart.forward_s(by_shard["parameters"], 0) == pytest.approx(5.001 + 2.501 + 1.0)
    assert apart.replica_exposed_s(by_shard["gradients"], 0) == pytest.approx(5.001)
    assert apart.reduce_s(by_shard["optimizer"]) == pytest.approx(7.501)
    assert apart.update_s(by_shard["optimizer"]) == pytest.approx(7.501)
    halves = {"backward_input_s": 0.25, "backward_weight_s": 0.75}
    layers = [_layer("a", 1.0, 8), _layer("b", 1.0, 8)]
    update = {"accumulate_s": 0.5, "costs": (layers[0].costs[0].model_copy(update=halves),)}
    layers = [each.model_copy(update=update) for each in layers]
    for known in (profile_of(layers, [], 4), _gpu(profile_of(layers, [], 4))):
        costs = CostModel(known, _cluster(), PlanOptions()).without(links=True)
        placed = [CandidateStage(0, 2, (0, 1), (1, 1), 1, (), shard) for shard in ("none", "optimizer", "gradients")]
        assert [costs.backward_s(each, 0, 4) for each in placed] == pytest.approx([3.0, 3.0, 2.5])
        assert [costs.halves_s(each, 0, 4) for each in placed] == [(0.5, pytest.approx(own)) for own in (2.5, 2.5, 2.0)]


def test_copies_are_added_where_no_curve_was_measured_on_a_cpu() -> None:
    layers = [_layer("a", 1.0, 1000), _layer("b", 1.0, 500)]
    layers = [each.model_copy(update={"accumulate_s": 3e-3}) for each in layers]
    frozen = layers[0].model_copy(update={"parameters_bytes": 2000})
    kinds = ("all_gather", "reduce_scatter")
    curves = [Curve(kind=kind, ranks=2, level="node", sizes=(500, 2000), seconds=(0.01, 0.04)) for kind in kinds]
    known, options = profile_of([frozen, layers[1]], [], 4), PlanOptions()
    estimated, measured = (CostModel(known, _cluster(*each), options).sums for each in ([], curves))
    # Adding reads two numbers and writes one, a copy reads and writes one; half is copied into what is gathered.
    gathered, scattered = (estimated.collectives_s(kind, Place(2)) for kind in kinds)
    assert gathered == pytest.approx([1e-3 + 1000 / 1e6 + 2 * 3e-3, 1e-3 + 250 / 1e6 + 3e-3])
    assert scattered == pytest.approx([1e-3 + 500 / 1e6 + 2e-3, 1e-3 + 250 / 1e6 + 2e-3])
    gathered, scattered = (measured.collectives_s(kind, Place(2)) for kind in kinds)
    assert (gathered, scattered) == (pytest.approx([0.04, 0.01]), pytest.approx([0.02, 0.01]))
    on_gpus = CostModel(_gpu(known), _cluster(), options).sums
    assert on_gpus.collectives_s("all_gather", Place(2)) == pytest.approx([1e-3 + 1000 / 1e6, 1e-3 + 250 / 1e6])
    assert estimated.collectives_s("all_gather", Place(1)) == [0.0, 0.0]
    free = CostModel(known, _cluster(), options).without(links=True).sums
    assert [free.collectives_s(kind, Place(2)) for kind in kinds] == [[0.0, 0.0]] * 2


def _gpu(known: Profile) -> Profile:
    return known.model_copy(update={"device": known.device.model_copy(update={"type": "cuda"})})


def _naive_s(plan: Plan, costs: CostModel, candidate: Candidate) -> float:
    """Relax the ends of all actions until none moves, with prices asked of the cost model one by one."""
    stages, count = candidate.stages, candidate.micro_batches
    sizes = {tuple(pair): flow for *pair, flow in costs.flows.exchanges([stage.stop for stage in stages])}
    routes = {}
    for message in messages(plan):
        flow, rows = sizes[message.producer, message.consumer], message.samples.rows
        ends = (message.sender, message.producer), (message.receiver, message.consumer)
        devices = [stages[stage].devices[plan.ownership.ranks[rank].replica] for rank, stage in ends]
        routes["S", *ends] = costs.message_s(rows * flow.bytes_per_sample, *devices)
        routes["SG", *ends[::-1]] = costs.message_s(rows * flow.gradient_bytes_per_sample, *devices[::-1])
    overhead_s = costs.profile.step_overhead_s
    done: dict[object, float] = defaultdict(float)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(expand(plan).ranks):
            clock, replica, reduced = overhead_s, plan.ownership.ranks[rank].replica, 0.0
            queue: dict[int, float] = defaultdict(float)
            for action in actions:
                kind, stage, index, peer, peer_stage, _ = action
                placed = stages[stage]
                if kind in ("F", "B", "I", "W"):
                    halves = costs.halves_s(placed, replica, count) if kind in "IW" else (0.0, 0.0)
                    prices = {"F": costs.forward_s, "B": lambda s, r: costs.backward_s(s, r, count)}
                    clock += prices[kind](placed, replica) if kind in prices else halves[kind == "W"]
                elif kind in ("S", "SG"):
                    queue[peer] = max(queue[peer], clock) + routes[kind, (rank, stage), (peer, peer_stage)]
                    moved |= _put(done, (kind, rank, stage, peer, peer_stage, index), queue[peer])
                    continue
                elif kind in ("R", "RG"):
                    clock = max(clock, done["S" if kind == "R" else "SG", peer, peer_stage, rank, stage, index])
                elif kind == "A":
                    made = [each.kind for each in actions if each.stage == stage and each.kind in "BW"]
                    last = max(done["end", rank, each] for each in actions if each.stage == stage and each.kind in "BW")
                    exposed_s = costs.replica_exposed_s(placed, replica, split=made[-1] == "W")
                    moved |= _put(done, ("ready", stage, rank), last + exposed_s)
                    ends = [done[key] for key in list(done) if key[:2] == ("ready", stage)]  # type: ignore[index]
                    reduced = max(*ends, 0.0, reduced + costs.reduce_s(placed) if reduced else 0.0)
                    clock = max(clock, reduced)
                elif kind == "T":
                    moved |= _put(done, ("tied", index, rank), clock)
                    number, holders = costs.tied_between(stages)[index]
                    sharing = [stages[holder] for holder in holders]
                    come = max(done[key] for key in list(done) if key[:2] == ("tied", index))  # type: ignore[index]
                    clock = max(clock, come + costs.tied_s(number, sharing))
                else:
                    clock += sum(costs.update_s(stages[each]) for each in plan.ownership.ranks[rank].stages)
                moved |= _put(done, ("end", rank, action), clock)
    return max(seconds for key, seconds in done.items() if key[0] == "end")  # type: ignore[index]


def _put(done: dict[object, float], key: object, seconds: float) -> bool:
    moved = key not in done or done[key] != seconds
    done[key] = seconds
    return moved


@pytest.mark.parametrize("schedule", ["1f1b", *OTHERS])
def test_a_step_is_the_least_solution_of_its_program(schedule: str) -> None:
    tried = 0
    for seed in range(24):
        rng, costs = random.Random(seed), random_costs(seed)
        drawn = random_candidate(rng, costs) if schedule == "1f1b" else random_chunked(rng, costs, schedule)
        flying = [min(stage.in_flight, drawn.micro_batches) for stage in drawn.stages] if drawn is not None else []
        # Replicas that take turns may be drawn with more in flight than the stage before.
        if drawn is not None and (schedule != "1f1b" or flying == sorted(flying, reverse=True)):
            made = assemble(costs, drawn, PlanOptions(), 0.0, (), ())
            step_s = Simulator(costs).step_s(drawn)
            assert step_s == pytest.approx(_naive_s(made, costs, drawn), rel=1e-9), seed
            program, times = expand(made), durations(costs, drawn)
            assert step_s == pytest.approx(run(compile_rows(program, times), times), rel=1e-12), seed
            assert trace(program, times).end_s == made.predicted.step_s == pytest.approx(step_s, rel=1e-12), seed
            tried += len(drawn.stages) > 2
    assert tried >= 5


@pytest.mark.parametrize("schedule", OTHERS)
def test_contention_slows_these_schedules_by_what_it_says_and_never_shortens_a_step(schedule: str) -> None:
    slowed = 0
    for seed in range(30):
        rng, costs = random.Random(seed), random_costs(seed)
        candidate = random_chunked(rng, costs, schedule)
        if candidate is None:
            continue
        times, rows = durations(costs, candidate), Simulator(costs).rows_of(candidate)
        devices, alone_s = tuple(dict.fromkeys(candidate.devices)), run(rows, times)
        levels = dict.fromkeys(link.level for link in costs.cluster.links)
        found = []
        for factor in (1 + 1e-12, 1.5):
            overlaps = tuple(Overlap(level=level, compute=factor, communication=factor) for level in levels)
            cluster = costs.cluster.model_copy(update={"overlaps": overlaps})
            found.append(run(rows, times, Sharing.of(cluster, costs.devices).among(devices)))
        # Event by event, with next to nothing slowed: the same rules.
        assert found == [pytest.approx(alone_s, rel=1e-9), max(found[1], alone_s * (1 - 1e-9))], seed
        slowed += found[1] > alone_s * 1.001
        links = tuple(link.model_copy(update={"shared_by": rng.choice([2, 8])}) for link in costs.cluster.links)
        crowded = Sharing.of(costs.cluster.model_copy(update={"links": links}), costs.devices)
        assert run(rows, times, crowded.among(devices)) >= alone_s * (1 - 1e-9), seed
    assert slowed >= 5
