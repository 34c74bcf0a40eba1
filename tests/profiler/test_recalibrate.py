"""Profiles and clusters corrected by what a run measured: planning with them predicts what the run would take."""

import random

import pytest

from autopar.formats.cluster import Cluster, Curve, Device, Link, Overlap
from autopar.formats.plan import Plan
from autopar.formats.profile import DeviceCosts, Layer, Line, Profile, Tensor
from autopar.formats.program import Action
from autopar.formats.timeline import own_times
from autopar.ownership import Shard
from autopar.planner import PlanOptions, plan, simulate
from autopar.profiler import recalibrate
from autopar.profiler.recalibrate import correct_gathering, correct_links, correct_profile, without_gathering
from random_problems import cost, profile_of

LAYERS = 8
BATCH = 12
SIZES = (1, 2, 4)
CUTS = ("0-2:1,3-7:1", "0-1:1,2-4:1,5-7:1", "0-4:2,5-7:1")


def profile(draw: random.Random, repeated: bool = False) -> Profile:
    """Return a chain of layers that take time in proportion to their rows; if repeated, all measured as the first."""
    names = [f"layer.{index}" for index in range(LAYERS)]
    layers, first = [], draw.uniform(1e-3, 5e-3)
    for index, name in enumerate(names):
        forward = first if repeated else draw.uniform(1e-3, 5e-3)
        back = first * 2 if repeated else draw.uniform(1e-3, 1e-2)
        costs = tuple(cost(rows, forward * rows, back * rows, {}, 100, 100) for rows in SIZES)
        sizes = dict.fromkeys(("parameters_bytes", "trainable_bytes", "gradient_bytes"), 4000) | {"optimizer_bytes": 0}
        made = Layer(name=name, modules=(name,), costs=costs, **sizes, update_s=draw.uniform(1e-4, 1e-3))
        layers.append(made.model_copy(update={"measured_as": names[0] if repeated and index else None}))
    tensors = [Tensor(name="x", producer=None, consumers=(names[0],), bytes_per_sample=8, dtype="f32", gradient=False)]
    for index in range(LAYERS - 1):
        tensor = {"producer": names[index], "consumers": (names[index + 1],), "bytes_per_sample": 1000 * (index + 1)}
        tensors.append(Tensor(name=f"t{index}", dtype="f32", gradient=True, **tensor))
    return profile_of(layers, tensors, BATCH, overhead_s=draw.uniform(0, 1e-2))


def like(truth: Profile, draw: random.Random) -> Profile:
    """Return a profile of the same layers whose times are wrong, differently for every layer that was measured.

    Updates are wrong alike: what a layer has of its stage's is not measured.
    """
    by = {layer.name: (draw.uniform(0.2, 4), draw.uniform(0.2, 4)) for layer in truth.layers}
    layers = []
    for layer in truth.layers:
        forward, backward = by[layer.measured_as or layer.name]
        costs = []
        for each in layer.costs:
            times = {"forward_s": each.forward_s * forward, "backward_s": each.backward_s * backward}
            costs.append(each.model_copy(update={**times, "provenance": "estimated"}))
        layers.append(layer.model_copy(update={"costs": tuple(costs), "update_s": layer.update_s * 3}))
    return truth.model_copy(update={"layers": tuple(layers), "step_overhead_s": 0.0})


def cluster(latency_s: float, bytes_per_s: float, curve: bool = False) -> Cluster:
    sizes = (1000, 100_000)
    seconds = tuple(latency_s + size / bytes_per_s for size in sizes)
    return Cluster(
        devices=(Device(type="cpu", memory_bytes=2**34),) * 3,
        links=(Link(level="node", latency_s=latency_s, bytes_per_s=bytes_per_s),),
        curves=(Curve(kind="p2p", ranks=2, level="node", sizes=sizes, seconds=seconds),) if curve else (),
    )


def told(run: Plan, known: Profile, links: Cluster) -> dict[tuple[int, Action], float]:
    """Return what actions take by themselves in a run."""
    return own_times(simulate(run, known, links))


def planned(known: Profile, links: Cluster, stages: str) -> Plan:
    return plan(known, links, PlanOptions(stages=stages, micro_batches=3, schedule="1f1b"))


def layers_of(truth: Profile, run: Plan) -> list[dict[str, tuple[float, float]]]:
    """Return what layers truly take on every rank, for its rows."""
    costs = {layer.name: layer.costs[0] for layer in truth.layers}
    return [
        {name: (costs[name].forward_s * rows, costs[name].backward_s * rows) for name in stage.layers}
        for stage in run.stages
        for rows in stage.rows
    ]


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("stages", CUTS)
def test_a_run_with_timed_layers_corrects_the_prediction_of_every_other_cut(seed: int, stages: str) -> None:
    draw = random.Random(seed)
    truth, true_links = profile(draw), cluster(1e-4, 1e8)
    wrong, wrong_links = like(truth, draw), cluster(3e-4, 2e7)
    run = planned(wrong, wrong_links, stages)
    measured, predicted = told(run, truth, true_links), told(run, wrong, wrong_links)
    update = correct_profile(wrong, run, measured, predicted, layers_of(truth, run), truth.step_overhead_s)
    links = correct_links(wrong_links, run, measured, predicted)
    if stages == CUTS[1]:
        # Messages of two sizes tell latency from bandwidth.
        (link,) = links.links
        assert (link.latency_s, link.bytes_per_s) == (pytest.approx(1e-4), pytest.approx(1e8))
        assert link.provenance == "measured"
    for other in CUTS:
        right = planned(truth, true_links, other)
        before, after = planned(wrong, links, other), planned(update, links, other)
        step_s = right.predicted.step_s
        # An all-reduce is not corrected but by its link; all else is.
        close = 1e-9 if stages == CUTS[1] else 0.02
        assert after.predicted.step_s == pytest.approx(step_s, rel=close)
        assert abs(after.predicted.step_s - step_s) < abs(before.predicted.step_s - step_s)


def test_without_timed_layers_the_plan_that_was_run_is_predicted_as_it_ran() -> None:
    draw = random.Random(7)
    truth, links = profile(draw), cluster(1e-4, 1e8)
    wrong = like(truth, draw)
    run = planned(wrong, links, CUTS[1])
    measured, predicted = told(run, truth, links), told(run, wrong, links)
    update = correct_profile(wrong, run, measured, predicted, [], truth.step_overhead_s)
    assert simulate(run, update, links).end_s == pytest.approx(simulate(run, truth, links).end_s)
    for stage in run.stages:
        pairs = zip(wrong.layers, update.layers, strict=True)
        own = [(one.costs[0], other.costs[0]) for one, other in pairs if one.name in stage.layers]
        assert len({round(after.forward_s / before.forward_s, 9) for before, after in own}) == 1


def test_layers_measured_as_one_stay_alike_and_sizes_that_ran_are_measured() -> None:
    draw = random.Random(3)
    truth, links = profile(draw, repeated=True), cluster(1e-4, 1e8)
    wrong = like(truth, draw)
    run = planned(wrong, links, CUTS[0])
    measured = {key: seconds * draw.uniform(0.9, 1.1) for key, seconds in told(run, truth, links).items()}
    update = correct_profile(wrong, run, measured, told(run, wrong, links), layers_of(truth, run), 0.0)
    assert len({layer.costs for layer in update.layers}) == 1
    known = {each.micro_batch: each.provenance for each in update.layers[0].costs}
    assert known == {1: "estimated", 2: "estimated", 4: "measured"}
    assert Profile.model_validate_json(update.dumps()) == update
    assert correct_profile(update, run, measured, measured, [], 0.0).notes == update.notes


def test_a_curve_of_messages_and_its_link_are_slowed_alike() -> None:
    draw = random.Random(5)
    known = profile(draw)
    before, after = cluster(1e-4, 1e8, curve=True), cluster(3e-4, 1e8 / 3, curve=True)
    run = planned(known, before, CUTS[0])
    measured, predicted = told(run, known, after), told(run, known, before)
    found = correct_links(before, run, measured, predicted)
    assert found.curves[0].seconds == pytest.approx(after.curves[0].seconds)
    assert found.links[0].latency_s == pytest.approx(3e-4)
    assert found.links[0].bytes_per_s == pytest.approx(1e8 / 3)


def test_a_run_that_measured_no_message_leaves_the_cluster_as_it_is() -> None:
    known, links = profile(random.Random(1)), cluster(1e-4, 1e8)
    run = planned(known, links, "0-7:2")
    times = told(run, known, links)
    assert correct_links(links, run, times, times) == links


def gathering(factor: float, overlap: float | None = None) -> Cluster:
    """Return a cluster whose gathers take so many times as long; computing beside them takes ``overlap`` times."""
    sizes, seconds = (1000, 100_000), (1e-3 * factor, 5e-3 * factor)
    kinds = ("all_gather", "reduce_scatter")
    curves = tuple(Curve(kind=kind, ranks=2, level="node", sizes=sizes, seconds=seconds) for kind in kinds)
    overlaps = () if overlap is None else (Overlap(level="node", compute=overlap, communication=1.0),)
    return cluster(1e-4, 1e8).model_copy(update={"curves": curves, "overlaps": overlaps})


def sharding(known: Profile, links: Cluster) -> Plan:
    return plan(known, links, PlanOptions(stages="0-4:2,5-7:1", micro_batches=3, schedule="1f1b", shard="parameters"))


def test_what_a_stage_that_gathers_takes_beyond_computing_is_taken_for_its_gathers() -> None:
    draw = random.Random(2)
    truth = profile(draw)
    # Only what computes alone tells of its layers: those of the other stage are known well.
    other = like(truth, draw)
    wrong = truth.model_copy(update={"layers": (*truth.layers[:5], *other.layers[5:])})
    run = sharding(wrong, gathering(1.0))
    assert [stage.shard for stage in run.stages] == ["parameters", "none"]
    measured = told(run, truth, gathering(2.5))
    predicted = told(run, wrong, gathering(1.0))
    made = correct_profile(wrong, run, measured, predicted, layers_of(truth, run), truth.step_overhead_s)
    assert made.layers[:5] == wrong.layers[:5]
    assert [layer.costs[0].forward_s for layer in made.layers[5:]] == pytest.approx(
        [layer.costs[0].forward_s for layer in truth.layers[5:]]
    )
    both = (told(run, made, each) for each in (gathering(1.0), without_gathering(gathering(1.0))))
    links = correct_gathering(gathering(1.0), run, measured, *both)
    for found, right in zip(links.curves, gathering(2.5).curves, strict=True):
        assert found.seconds == pytest.approx(right.seconds)
        assert found.provenance == "measured"
    assert simulate(run, made, links).end_s == pytest.approx(simulate(run, truth, gathering(2.5)).end_s, rel=0.01)


def test_devices_beyond_those_that_a_cluster_lists_are_corrected_like_them() -> None:
    known, links = profile(random.Random(5)), gathering(1.0)
    one = links.model_copy(update={"devices": links.devices[:1]})
    options = PlanOptions(gpus=3, stages="0-4:2,5-7:1", micro_batches=3, schedule="1f1b", shard="parameters")
    run = plan(known, one, options)
    predicted, alone = (told(run, known, each) for each in (one, without_gathering(one)))
    measured = {key: 2 * seconds for key, seconds in predicted.items()}
    few = correct_gathering(correct_links(one, run, measured, predicted), run, measured, predicted, alone)
    assert few.links[0].latency_s == pytest.approx(2 * links.links[0].latency_s)
    all_listed = correct_gathering(correct_links(links, run, measured, predicted), run, measured, predicted, alone)
    assert (few.links, few.curves) == (all_listed.links, all_listed.curves)


@pytest.mark.parametrize("links", [gathering(0.01, overlap=1.0), cluster(1e-4, 1e8, curve=True)])
def test_gathers_that_computing_hides_and_those_without_curves_stay_as_they_are(links: Cluster) -> None:
    known = profile(random.Random(4))
    run = sharding(known, links)
    predicted = told(run, known, links)
    measured = {key: 1.2 * seconds for key, seconds in predicted.items()}
    assert correct_gathering(links, run, measured, predicted, told(run, known, without_gathering(links))) == links


@pytest.mark.parametrize("shard", ["gradients", "optimizer"])
def test_a_run_that_was_all_sharded_corrects_no_layer_and_one_of_divided_optimizers_no_update(shard: Shard) -> None:
    known, links = profile(random.Random(6)), gathering(1.0)
    run = plan(known, links, PlanOptions(stages="0-7:2", micro_batches=3, schedule="gpipe", shard=shard))
    # The gather that is predicted behind an update is in the next step's first forward.
    measured = {
        key: seconds / 9 if (key[1].kind, shard) == ("U", "optimizer") else 2 * seconds
        for key, seconds in told(run, known, links).items()
    }
    if shard == "gradients":
        made = correct_profile(known, run, measured, told(run, known, links), [], 0.0)
        assert made == known.model_copy(update={"step_overhead_s": 0.0})
        return
    made = correct_profile(known, run, measured, told(run, known, links), layers_of(known, run), 0.0)
    assert [layer.update_s for layer in made.layers] == [layer.update_s for layer in known.layers]
    assert made.layers[0].costs[0].forward_s == pytest.approx(2 * known.layers[0].costs[0].forward_s)


def test_every_time_of_a_layer_is_multiplied_by_what_it_is_of_and_the_median_of_its_stages() -> None:
    line = Line(fixed_s=1.0, per_sample_s=10.0, residual=0.5)
    layer, halves = profile(random.Random(1)).layers[0], {"backward_input_s": 1.0, "backward_weight_s": 1.0}
    costs = tuple(each.model_copy(update={**halves, "recompute_s": 1.0}) for each in layer.costs)
    more = {"accumulate_s": 1.0, "input_s": 1.0, "forward_fit": line, "backward_fit": line}
    layer = layer.model_copy(update={"costs": costs, **more})
    factors = recalibrate._Factors(2.0, 3.0, 5.0, 7.0, 11.0)
    others = [recalibrate._Factors(*[value] * 5) for value in (1.0, 100.0)]
    found = recalibrate._scale_layer(layer, [others[0], factors, others[1]], frozenset({2}))
    for before, after in zip(layer.costs, found.costs, strict=True):
        assert (after.forward_s, after.backward_s) == pytest.approx((2 * before.forward_s, 3 * before.backward_s))
        assert (after.backward_input_s, after.backward_weight_s, after.recompute_s) == (5.0, 7.0, 3.0)
    assert (found.update_s, found.accumulate_s, found.input_s) == (pytest.approx(11 * layer.update_s), 3.0, 2.0)
    assert [
        each and (each.fixed_s, each.per_sample_s, each.residual) for each in (found.forward_fit, found.backward_fit)
    ] == [(2.0, 20.0, 0.5), (3.0, 30.0, 0.5)]


def test_a_stages_halves_are_told_apart_and_what_it_recomputes_is_of_its_backwards() -> None:
    known, links = profile(random.Random(2)), cluster(1e-4, 1e8)
    run = planned(known, links, CUTS[1])
    ratios = {(0, Action(kind, 0, 0)): factor for kind, factor in (("F", 2.0), ("I", 5.0), ("W", 7.0), ("U", 11.0))}
    assert recalibrate._stage_factors(run, 0, 0, ratios) == (2.0, 6.0, 5.0, 7.0, 11.0)
    assert recalibrate._stage_factors(run, 1, 1, ratios) == (1.0,) * 5
    (layer, *_), stage = known.layers, run.stages[0]
    (first, *_) = layer.costs
    recomputing = stage.model_copy(update={"recompute": (layer.name,)})
    plainly_s, again_s = (
        recalibrate._seconds(layer, each, 1, 1, recalibrate._QUEUES[0]) for each in (stage, recomputing)
    )
    assert (plainly_s, again_s) == pytest.approx((first.backward_s, first.backward_s + first.forward_s))


def test_each_kind_of_device_is_corrected_by_its_own_stages() -> None:
    known, links = profile(random.Random(3)), cluster(1e-4, 1e8)
    run, other = planned(known, links, CUTS[1]), known.device.model_copy(update={"name": "other"})
    kinds = [known.device.name, "other", "other"]
    stages = [stage.model_copy(update={"types": (kind,)}) for stage, kind in zip(run.stages, kinds, strict=True)]
    both = known.model_copy(update={"others": (DeviceCosts(device=other, layers=known.layers),)})
    predicted = told(run, known, links)
    measured = {key: seconds * (2, 3, 5)[key[1].stage] for key, seconds in predicted.items()}
    found = correct_profile(both, run.model_copy(update={"stages": tuple(stages)}), measured, predicted, [], 0.0)
    for layers, factors in ((found.layers, (2, 1, 1)), (found.others[0].layers, (1, 3, 5))):
        expected = [factors[next(at for at, s in enumerate(stages) if each.name in s.layers)] for each in layers]
        ratios = [
            new.costs[0].forward_s / old.costs[0].forward_s for new, old in zip(layers, known.layers, strict=True)
        ]
        assert ratios == pytest.approx(expected)


def test_a_links_bandwidth_is_of_all_that_share_it_both_ways_and_one_beside_others_is_scaled() -> None:
    samples = [recalibrate._Sample(size, 1e-3 + size / 1e6, 2e-3 + size / 2e6) for size in (1000, 4000, 9000)]
    for duplex, ways in (("full", 1), ("half", 2)):
        link = Link(level="node", latency_s=1.0, bytes_per_s=1e9, shared_by=3, duplex=duplex)  # type: ignore[arg-type]
        found = recalibrate._correct_link(link, samples, is_only_price=True)
        assert (found.latency_s, found.bytes_per_s) == (pytest.approx(1e-3), pytest.approx(3 * ways * 1e6))
        scaled = recalibrate._correct_link(link, samples, is_only_price=False)
        factor = 5e-3 / 4e-3
        assert (scaled.latency_s, scaled.bytes_per_s) == (pytest.approx(factor), pytest.approx(1e9 / factor))
    for links, is_only in ((cluster(1e-4, 1e8), True), (cluster(1e-4, 1e8, curve=True), False)):
        assert recalibrate._is_only_price(links, links.links[0]) == is_only
        two = links.model_copy(update={"links": (*links.links, links.links[0])})
        assert not recalibrate._is_only_price(two, links.links[0])


def test_what_has_no_gradient_makes_messages_forth_larger_and_none_back() -> None:
    known, links = profile(random.Random(5)), cluster(1e-4, 1e8)
    run = planned(known, links, CUTS[0])
    mask = run.tensors[0].model_copy(update={"name": "mask", "bytes_per_sample": 1000, "gradient": False})
    times = {key: 1.0 if key[1].kind == "S" else 2.0 for key in told(run, known, links)}
    plain, masked = (
        {each[:2] for own in recalibrate._samples(links, each, times, times).values() for each in own}
        for each in (run, run.model_copy(update={"tensors": (*run.tensors, mask)}))
    )
    assert {seconds for _, seconds in masked - plain} == {1.0}
