"""What teams cost, by hand."""

from math import ceil

import pytest

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.cuts import ParameterCut, SequenceCut
from autopar.formats.profile import (
    DeviceCosts,
    DeviceKind,
    Layer,
    LayerSplit,
    PartCosts,
    PartSum,
    Profile,
    Tensor,
    TiedParameter,
)
from autopar.options.plan import PlanOptions
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.durations import durations
from autopar.planner.costs.model import CostModel
from random_problems import cost, profile_of

RATE, LATENCY = 1e6, 1e-3
OTHER = DeviceKind(type="cpu", name="other", memory_bytes=2**34)


def cluster(devices: int = 8) -> Cluster:
    links = (Link(level="node", latency_s=LATENCY, bytes_per_s=RATE),)
    return Cluster(devices=tuple(Device(type="cpu", memory_bytes=2**34) for _ in range(devices)), links=links)


def ring_s(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) * (size / ranks / RATE + LATENCY)


def part_sum(kind: str, at: str, ranks: int, size: int) -> PartSum:
    return PartSum(kind=kind, at=at, ranks=ranks, bytes=size)  # type: ignore[arg-type]


def split(name: str, count: int, sliced: tuple[str, ...] = (), summands: int = 0) -> LayerSplit:
    """Return halves, or quarters, of a layer, which sum once in every pass."""
    sums = tuple(
        part_sum("all_reduce", at, count, 1000 * count) for at in ("forward", "backward_input", "backward_weight")
    )
    own = cost(1, 0.04, 0.05, {}, 500, 100).model_copy(
        update={"backward_input_s": 0.03, "backward_weight_s": 0.04, "recompute_s": 0.06, "sums": sums}
    )
    sizes = {"parameters_bytes": 1100, "trainable_bytes": 1000, "gradient_bytes": 1000, "optimizer_bytes": 2000}
    part = PartCosts(**sizes, summand_bytes=summands, update_s=0.007, costs=(own,))
    cut = ParameterCut(parameter=f"{name}.w", dim=0, parts=tuple(((at, at + 1),) for at in range(count)))
    slices = tuple(SequenceCut(tensor=each, dim=1) for each in sliced)
    return LayerSplit(count=count, cuts=(cut,), sequence=slices, part=part, sliced=part if sliced else None)


def model(*splits: tuple[LayerSplit, ...]) -> Profile:
    """Return a chain of layers that split so; of what one hands the next there are 600 bytes per sample."""
    names = [f"l{index}" for index in range(len(splits))]
    sizes = {"parameters_bytes": 4000, "trainable_bytes": 4000, "gradient_bytes": 4000, "optimizer_bytes": 8000}
    whole = cost(1, 0.1, 0.2, {}, 1000, 100)
    layers = [
        Layer(name=name, modules=(name,), **sizes, update_s=0.02, costs=(whole,), splits=own)
        for name, own in zip(names, splits, strict=True)
    ]
    between = [
        Tensor(
            name=f"t{at}", producer=name, consumers=(names[at + 1],), bytes_per_sample=600, dtype="f32", gradient=True
        )
        for at, name in enumerate(names[:-1])
    ]
    return profile_of(layers, between, 4)


def test_a_team_computes_its_part_and_waits_for_sums() -> None:
    costs = CostModel(model((split("l0", 2, summands=300),), ()), cluster(), PlanOptions(batch=4))
    stage = CandidateStage(0, 2, (0, 1, 2, 3), (1, 1), 1, team=2)
    # The second layer does not split: each rank computes it whole.
    assert costs.forward_s(stage, 0) == pytest.approx(0.04 + ring_s(2000, 2) + 0.1)
    assert costs.backward_s(stage, 0, 2) == pytest.approx(0.05 + 2 * ring_s(2000, 2) + 0.2)
    again = stage._replace(recompute=(0,))
    assert costs.backward_s(again, 0, 2) == pytest.approx(0.05 + 2 * ring_s(2000, 2) + 0.2 + 0.06 + ring_s(2000, 2))
    assert costs.update_s(stage) == pytest.approx(0.007 + 0.02 + ring_s(300, 2))
    # Gradients meet among the ranks of a part: 0 and 2.
    assert costs.reduce_s(stage) == pytest.approx(ring_s(1000, 2) + ring_s(4000, 2), rel=0.5)
    assert costs.reduce_s(stage) < costs.reduce_s(stage._replace(team=1, shares=(1, 1, 1, 1)))
    assert costs.state_bytes(Candidate(4, 2, "1f1b", (stage,)), 0) == (1100 + 4000 + 2000 + 8000, 5000)


def test_halves_of_backwards_have_the_sums_that_they_make() -> None:
    costs = CostModel(model((split("l0", 2),)), cluster(), PlanOptions(batch=4))
    stage = CandidateStage(0, 1, (0, 1), (1,), 1, team=2)
    assert costs.halves_s(stage, 0, 4) == pytest.approx((0.03 + ring_s(2000, 2), 0.04 + ring_s(2000, 2)))


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 4), (4, 1), (1, 2), (4, 4)])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_cross_once_and_are_joined_where_several_wait_for_them(first: int, second: int, rows: int) -> None:
    splits = (split("l0", 2), split("l0", 4)), (split("l1", 2), split("l1", 4))
    costs = CostModel(model(*splits), cluster(), PlanOptions(batch=4 * rows))
    stages = (
        CandidateStage(0, 1, tuple(range(first)), (rows,), 2, team=first),
        CandidateStage(1, 2, tuple(range(first, first + second)), (rows,), 1, team=second),
    )
    times = durations(costs, Candidate(4, rows, "1f1b", stages))
    lane_s = LATENCY + 600 * ceil(rows / max(first, second)) / RATE
    assert times.message_s == {(0, 1): pytest.approx(lane_s), (1, 0): pytest.approx(lane_s)}
    joins = [ring_s(600 * rows, team) if team > 1 else 0.0 for team in (first, second)]
    alone = [costs.backward_s(stages[0], 0, 4), costs.forward_s(stages[1], 0)]
    assert times.backward_s[0] == pytest.approx(alone[0] + joins[0])
    assert times.forward_s[1] == pytest.approx(alone[1] + joins[1])
    assert times.forward_s[0] == pytest.approx(costs.forward_s(stages[0], 0))
    ranks = iter(range(first + second))
    assert times.teams == [tuple(next(ranks) for _ in range(size)) for size in (first, second)][: len(times.teams)]


def test_slices_go_from_part_to_part_and_are_not_joined() -> None:
    splits = (split("l0", 2, ("t0",)), split("l0", 4, ("t0",))), (split("l1", 2, ("t0",)),)
    costs = CostModel(model(*splits), cluster(), PlanOptions(batch=8))
    stages = (
        CandidateStage(0, 1, (0, 1), (2,), 2, team=2, sliced=True),
        CandidateStage(1, 2, (2, 3), (2,), 1, team=2, sliced=True),
    )
    times = durations(costs, Candidate(4, 2, "1f1b", stages))
    assert times.message_s[0, 1] == pytest.approx(LATENCY + 300 * 2 / RATE)
    assert times.forward_s[1] == pytest.approx(costs.forward_s(stages[1], 0))
    # Where the other has another number of ranks, or whole tensors, rows cross.
    for other in (stages[0]._replace(devices=(0, 1, 4, 5), team=4), stages[0]._replace(sliced=False)):
        times = durations(costs, Candidate(4, 2, "1f1b", (other, stages[1])))
        assert times.message_s[0, 1] == pytest.approx(LATENCY + 600 * ceil(2 / other.team) / RATE)
        assert times.forward_s[1] > costs.forward_s(stages[1], 0)


def test_a_parameter_that_stages_share_is_reduced_by_part_or_whole() -> None:
    tied = TiedParameter(parameter="w", layers=("l0", "l1"), bytes=800)
    shared = ParameterCut(parameter="w", dim=0, parts=(((0, 5),), ((5, 8),)))
    splits = [split(name, 2) for name in ("l0", "l1")]
    splits = [each.model_copy(update={"cuts": (*each.cuts, shared)}) for each in splits]
    profile = model((splits[0],), (splits[1],)).model_copy(update={"tied": (tied,)})
    costs = CostModel(profile, cluster(), PlanOptions(batch=4))
    stages = CandidateStage(0, 1, (0, 1), (1,), 2, team=2), CandidateStage(1, 2, (2, 3), (1,), 1, team=2)
    assert durations(costs, Candidate(4, 1, "1f1b", stages)).tied_s == [pytest.approx(ring_s(500, 2))]
    alone = stages[1]._replace(devices=(2,), team=1)
    assert durations(costs, Candidate(4, 1, "1f1b", (stages[0], alone))).tied_s == [pytest.approx(ring_s(800, 3))]


def test_what_nobody_measured_is_refused() -> None:
    unknown = split("l0", 2).model_copy(update={"part": None})
    costs = CostModel(model((unknown,)), cluster(), PlanOptions(batch=4))
    stage = CandidateStage(0, 1, (0, 1), (1,), 1, team=2)
    with pytest.raises(UsageError, match=r"what a part of layer l0 costs on one of 2 devices; profile again.*tensor=2"):
        costs.forward_s(stage, 0)


def test_links_ten_times_slower_lengthen_sums_alone() -> None:
    profile, stage = model((split("l0", 2),), ()), CandidateStage(0, 2, (0, 1), (1,), 1, team=2)
    near, far = (CostModel(profile, cluster(), PlanOptions(batch=4, bytes_per_s=rate)) for rate in (1e6, 1e5))
    more = far.forward_s(stage, 0) - near.forward_s(stage, 0)
    assert more == pytest.approx(2 * (2000 / 2) * (1 / 1e5 - 1 / 1e6))
    alone = stage._replace(devices=(0,), team=1)
    assert far.forward_s(alone, 0) == near.forward_s(alone, 0) == pytest.approx(0.2)


def test_eight_devices_take_four_rows_as_four_teams_of_two_or_two_of_four() -> None:
    profile = model((split("l0", 2), split("l0", 4)))
    costs = CostModel(profile, cluster(), PlanOptions(batch=4))
    four = CandidateStage(0, 1, tuple(range(8)), (1, 1, 1, 1), 1, team=2)
    two = CandidateStage(0, 1, tuple(range(8)), (2, 2), 1, team=4)
    assert costs.forward_s(four, 0) == pytest.approx(0.04 + ring_s(2000, 2))
    assert costs.forward_s(two, 0) == pytest.approx(2 * 0.04 + ring_s(2 * 4000, 4))
    # Two and four ranks have the same part.
    assert costs.reduce_s(four) == pytest.approx(ring_s(1000, 4))
    assert costs.reduce_s(two) == pytest.approx(ring_s(1000, 2))


def test_a_team_of_several_kinds_is_refused() -> None:
    profile = model((split("l0", 2),))
    mixed = profile.model_copy(update={"others": (DeviceCosts(device=OTHER, layers=profile.layers),)})
    devices = tuple(Device(type=name, memory_bytes=2**34) for name in ("test", "other"))
    costs = CostModel(mixed, cluster().model_copy(update={"devices": devices}), PlanOptions(batch=4))
    with pytest.raises(UsageError, match="devices of several kinds"):
        costs.forward_s(CandidateStage(0, 1, (0, 1), (4,), 1, team=2), 0)
