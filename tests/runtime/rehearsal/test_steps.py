"""Steps in virtual time against the simulator: the executor's own run has the same seconds, to the last digits.

What faults cost there is held against the simulated timeline.
"""

import random
from collections import defaultdict
from typing import Any

import pytest

from autopar.errors import AutoparError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile, Tensor
from autopar.formats.program import REDUCTIONS, SLOWER_S, Fault, Program
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import find_cluster
from autopar.planner import PlanOptions, action_prices, plan, simulate
from autopar.planner.assemble import assemble, candidate_of
from autopar.planner.candidate import Candidate
from autopar.planner.costs.durations import durations
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.simulate import CYCLE, mini_batches, pipeline_times, trace
from autopar.ranks.pool import RankPool
from autopar.runtime.rehearsal.steps import Rehearsal, rehearse_steps
from autopar.schedules.expand import expand
from chunked import OTHERS, random_chunked, random_costs
from drawn import random_candidate
from edits import edited
from in_parts import dictated_teams
from pooled import eight_ranks
from priced_teams import single_ranks, team_prices, teams_of
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds

__all__ = ["eight_ranks"]

MOST_RANKS = 8
LINE = "0-1:1,2-3:1,4-5:1,6-7:1"


def _drawn(seed: int) -> tuple[Plan, CostModel] | None:
    """Return a plan of any schedule, cuts, widths, shares, turns, shards and recomputation; some seeds have none."""
    rng = random.Random(seed)
    candidate: Candidate | None
    if seed % 2:
        costs = random_costs(seed)
        candidate = random_chunked(rng, costs, rng.choice(OTHERS))
    else:
        devices = rng.randint(1, MOST_RANKS)
        profile, cluster = random_profile(seed, most_layers=10, batches=(2, 4, 6, 12)), random_cluster(seed, devices)
        if seed % 3 == 0:
            # Of two kinds, in any stage.
            profile, cluster = two_kinds(profile, cluster, seed)
        costs = CostModel(profile, cluster, PlanOptions(gpus=devices))
        candidate = random_candidate(rng, costs)
    if candidate is None:
        return None
    try:
        return assemble(costs, candidate, PlanOptions(), 0.0, (), ()), costs
    except ValueError:
        # More in flight than the stage before has.
        return None


def _check(rehearsal: Rehearsal, simulated: Timeline, planned: Plan) -> None:
    """Every step takes as long, and every computation and receive ends, as simulated."""
    within = 1e-9 if all(stage.replicas == 1 for stage in planned.stages) else 1e-6
    assert rehearsal.steps_s == pytest.approx([simulated.end_s] * len(rehearsal.steps_s), rel=within)
    ends_s = {(event.rank, event.action): event.end_s for event in simulated}
    assert len(rehearsal.timeline) == len(simulated)
    for event in rehearsal.timeline:
        # Sends occupy no rank; a reduction may end, as simulated, while its rank still does something else.
        if event.action.kind not in ("S", "SG", "A"):
            assert event.end_s == pytest.approx(ends_s[event.rank, event.action], abs=within * simulated.end_s)


Inputs = tuple[Plan, Profile, Cluster]


def _rehearsed(inputs: Inputs, steps: int = 1, program: Program | None = None, **how: Any) -> Rehearsal:  # noqa: ANN401
    """Perform steps, with a thread for each rank unless there is a pool."""
    planned, profile, _ = inputs
    how = {"threads": "pool" not in how, "timeout_s": 30.0, **how}
    return rehearse_steps(planned, profile, action_prices(*inputs, program), steps, program=program, **how)


def _inputs(seed: int) -> Inputs:
    drawn = _drawn(seed)
    if drawn is None:
        pytest.skip("no such plan")
    planned, costs = drawn
    return planned, costs.profile, costs.cluster


@pytest.mark.some(14)
@pytest.mark.parametrize("seed", range(200))
def test_random_plans_take_in_threads_as_long_as_simulated(seed: int) -> None:
    inputs = _inputs(seed)
    _check(_rehearsed(inputs, 2), simulate(*inputs), inputs[0])


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(1000, 1024))
def test_random_plans_take_in_processes_as_long_as_simulated(seed: int, eight_ranks: RankPool) -> None:
    inputs = _inputs(seed)
    rehearsal = _rehearsed(inputs, 2, pool=eight_ranks)
    _check(rehearsal, simulate(*inputs), inputs[0])
    assert not rehearsal.notes


@pytest.mark.some(12)
@pytest.mark.parametrize("seed", range(2000, 2060))
def test_programs_edited_at_random_take_as_long_as_simulated(seed: int) -> None:
    inputs = _inputs(seed)
    # Nobody simulates reductions elsewhere: `simulate` and `rehearse` refuse them.
    program = edited(inputs[0], seed, fixed=REDUCTIONS)
    _check(_rehearsed(inputs, 2, program), simulate(*inputs, program), inputs[0])


def _check_teams(inputs: Inputs, seed: int, steps: int = 2, most: int = 24, **how: Any) -> None:  # noqa: ANN401
    """Teams that take what single devices do end all that they compute when these do."""
    planned, profile, _ = inputs
    teams = teams_of(planned, seed)
    if not len(planned.devices) < len(teams.devices) <= most:
        pytest.skip("no such teams")
    simulated, prices = simulate(*inputs), team_prices(planned, teams, action_prices(*inputs), seed)
    how = {"threads": "pool" not in how, "timeout_s": 30.0, **how}
    rehearsal = rehearse_steps(teams, profile, prices, steps, **how)
    if planned.span == 1 and not planned.lead:
        assert rehearsal.steps_s == pytest.approx([simulated.end_s] * steps, rel=1e-9)
    wanted, found = _computed(simulated), _computed(rehearsal.timeline)
    for rank, single in enumerate(single_ranks(planned, teams)):
        assert found[rank] == [
            (text, pytest.approx(end_s, rel=1e-9, abs=1e-9 * simulated.end_s)) for text, end_s in wanted[single]
        ]


def _computed(timeline: Timeline) -> dict[int, list[tuple[str, float]]]:
    """Return when what a rank computes ends, by rank."""
    found = defaultdict[int, list[tuple[str, float]]](list)
    for each in timeline:
        if each.action.kind in ("F", "B", "I", "W", "U", "P", "C"):
            found[each.rank].append((str(each.action), each.end_s))
    return {rank: sorted(own) for rank, own in found.items()}


@pytest.mark.some(8)
@pytest.mark.parametrize("seed", range(3000, 3200))
def test_teams_take_as_long_as_single_devices_that_take_as_long(seed: int) -> None:
    _check_teams(_inputs(seed), seed)


@pytest.mark.some(3)
@pytest.mark.parametrize("seed", range(3200, 3224))
def test_teams_of_processes_take_as_long_as_single_devices(seed: int, eight_ranks: RankPool) -> None:
    _check_teams(_inputs(seed), seed, most=MOST_RANKS, pool=eight_ranks)


@pytest.mark.some(3)
@pytest.mark.parametrize("seed", range(100))
def test_teams_that_are_never_flushed_take_as_long_as_single_devices(seed: int) -> None:
    found = unflushed(seed)
    if found is None:
        pytest.skip("no plan obeys")
    _check_teams(found, seed, mini_batches(found[0]))


@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(0, 800, 20))
def test_dictated_teams_take_as_long_as_simulated(seed: int) -> None:
    inputs = next(filter(None, map(dictated_teams, range(seed, seed + 20))))
    rehearsal, simulated = _rehearsed(inputs, 2), simulate(*inputs)
    assert rehearsal.steps_s == pytest.approx([simulated.end_s] * 2, rel=1e-9)
    wanted = _computed(simulated)
    for rank, found in _computed(rehearsal.timeline).items():
        assert found == [
            (text, pytest.approx(end_s, rel=1e-9, abs=1e-9 * simulated.end_s)) for text, end_s in wanted[rank]
        ]


@pytest.mark.parametrize(("sizes", "slices"), [((2,), 0.0), ((2,), 1.0), ((4,), 0.0)])
def test_ranks_of_a_team_hold_whole_messages_or_slices(sizes: tuple[int, ...], slices: float) -> None:
    """Those of a first and of a last stage, which hold a message of every micro-batch, as made and as joined."""
    asked = PlanOptions(gpus=2, stages="0-6:1,7-13:1", micro_batches=8, schedule="gpipe", recompute="none")
    planned = plan(*INPUTS, asked)
    prices, teams = action_prices(planned, *INPUTS), teams_of(planned, 0, sizes, slices)
    alone, held = (
        rehearse_steps(each, INPUTS[0], own, 2, threads=True).timeline.peaks_bytes()
        for each, own in ((planned, prices), (teams, team_prices(planned, teams, prices, 0)))
    )
    message = sum(each.bytes_per_sample for each in planned.tensors) * planned.micro_batch_size
    less = planned.micro_batches * message * slices / 2
    for rank, single in enumerate(single_ranks(planned, teams)):
        assert abs(held[rank] - alone[single] + less) <= 2 * message


def _held(profile: Profile, steps: int, devices: int = 4, **asked: Any) -> tuple[Inputs, Timeline, list[float]]:  # noqa: ANN401
    """Plan and perform steps; return what each stage's devices hold at most, too."""
    cluster = local_cluster(devices)
    planned = plan(profile, cluster, PlanOptions(**{"micro_batches": 8, "recompute": "none", **asked}))
    timeline = _rehearsed((planned, profile, cluster), steps).timeline
    peaks = timeline.peaks_bytes()
    # Of replicas, the one with the largest share, or most turns, counts.
    return (planned, profile, cluster), timeline, [max(peaks[rank] for rank in each.devices) for each in planned.stages]


@pytest.mark.pairs
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stages", [LINE, "0-3:2,4-7:2", "0-7:4", "0-4:1,5-7:3"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_ranks_hold_what_was_predicted(schedule: str, stages: str, recompute: str) -> None:
    # Some have more replicas than a micro-batch has samples.
    division = "round-robin" if stages in ("0-7:4", "0-4:1,5-7:3") else "split"
    asked = {"stages": stages, "schedule": schedule, "recompute": recompute, "division": division}
    inputs, timeline, held = _held(gpt_profile(blocks=6), 2, **asked)
    assert held == pytest.approx(inputs[0].predicted.peak_bytes, rel=0.03)
    for rank, moments in timeline.memory.items():
        # At the end of a step nothing is left of its micro-batches, whatever it was.
        assert moments == sorted(moments, key=lambda moment: moment[0])
        assert moments[-1][1] <= moments[0][1] + action_prices(*inputs).holds[rank].update


def _frozen(blocks: int) -> Profile:
    """Return a model whose first blocks are not trained, and what its embedding makes beside is read by all blocks."""
    profile = gpt_profile(blocks=6)
    frozen = {layer.name for layer in profile.layers[: 1 + blocks]}
    layers = []
    for layer in profile.layers:
        nothing = {"trainable_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0} if layer.name in frozen else {}
        # Nothing that a backward wants is kept where nothing is trained.
        costs = [each.model_copy(update={"saved": ()} if layer.name in frozen else {}) for each in layer.costs]
        layers.append(layer.model_copy(update={**nothing, "costs": tuple(costs)}))
    tensors = [each.model_copy(update={"gradient": each.producer not in (None, *frozen)}) for each in profile.tensors]
    readers = tuple(layer.name for layer in profile.layers[1:-1])
    angles = Tensor(
        name="angles", producer="wte", consumers=readers, bytes_per_sample=98304, dtype="f32", gradient=False
    )
    return profile.model_copy(update={"layers": tuple(layers), "tensors": (*tensors, angles), "tied": ()})


@pytest.mark.some(3)
@pytest.mark.parametrize("stages", [LINE, "0-2:2,3-7:2", "0-1:1,2-3:2,4-7:1"])
@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_nobody_answers_is_held_until_the_next_step_as_predicted(schedule: str, blocks: int, stages: str) -> None:
    profile = _frozen(blocks)
    (planned, *_), _, held = _held(profile, 3, stages=stages, schedule=schedule)
    frozen = {layer.name for layer in profile.layers if not layer.trainable_bytes}
    for found, predicted in zip(held, planned.predicted.peak_bytes, strict=True):
        # What a stage that trains nothing receives is counted as in flight, and is let go sooner.
        assert 0.8 * predicted < found < 1.03 * predicted
    if frozen.issuperset(planned.stages[0].layers):
        assert held[0] == pytest.approx(planned.predicted.peak_bytes[0], rel=1e-3)


@pytest.mark.parametrize("asked", [{"schedule": "1f1b"}, {"policy": "stash"}, {"policy": "2bw"}], ids=str)
def test_what_one_later_stage_alone_reads_is_held_until_the_next_step_as_predicted(asked: dict[str, str]) -> None:
    profile = _frozen(0)
    # No gradient comes back of it, and the stage behind answers for other tensors only.
    one = {"consumers": (profile.layers[-2].name,), "bytes_per_sample": 2**20}
    tensors = [each.model_copy(update=one) if each.name == "angles" else each for each in profile.tensors]
    # Without flushes, steps fill the pipeline first.
    (planned, *_), _, held = _held(profile.model_copy(update={"tensors": tuple(tensors)}), 6, stages=LINE, **asked)
    assert 0.9 * planned.predicted.peak_bytes[0] < held[0] < 1.03 * planned.predicted.peak_bytes[0]


@pytest.mark.parametrize(
    ("stages", "made", "asked"),
    [
        # Of a tensor that passes stages by, gradients are on their way for as long as its maker leads.
        (LINE, 0, {"schedule": "1f1b"}),
        (LINE, 0, {"policy": "2bw"}),
        ("0-2:1,3-3:2,4-5:1,6-7:1", 0, {"policy": "stash", "micro_batches": 1, "division": "round-robin"}),
        # Those who take turns lead by what all of them have in flight, which is more than a step has.
        ("0-5:3,6-7:1", 4, {"policy": "stash", "micro_batches": 1, "division": "round-robin"}),
    ],
)
def test_gradients_that_are_long_on_their_way_are_held_as_predicted(
    stages: str, made: int, asked: dict[str, object]
) -> None:
    profile = gpt_profile(blocks=6)
    ends = {"producer": profile.layers[made].name, "consumers": (profile.layers[-1].name,)}
    skip = Tensor(name="skip", bytes_per_sample=2**20, dtype="f32", gradient=True, **ends)
    profile = profile.model_copy(update={"tensors": (*profile.tensors, skip), "tied": ()})
    (planned, *_), _, held = _held(profile, 12, devices=5, stages=stages, **asked)
    assert 0.9 * planned.predicted.peak_bytes[-1] < held[-1] < 1.01 * planned.predicted.peak_bytes[-1]


@pytest.mark.slow
def test_in_real_time_steps_are_as_long(eight_ranks: RankPool) -> None:
    profile, cluster = gpt_profile(blocks=6), local_cluster(4)
    options = PlanOptions(stages=LINE, micro_batches=8, recompute="none", schedule="1f1b")
    inputs = plan(profile, cluster, options), profile, cluster
    # How much longer is a matter of the machine.
    assert min(_rehearsed(inputs, 2, real_time=True, pool=eight_ranks).steps_s) > 0.999 * simulate(*inputs).end_s


@pytest.mark.parametrize("stages", ["0-3:4,4-7:4", "0-1:3,2-4:2,5-7:3"])
def test_where_links_are_shared_steps_take_as_long_as_without_and_that_is_said(stages: str) -> None:
    profile, cluster = gpt_profile(blocks=6), find_cluster("2x4xV100:1Gbps")
    planned = plan(profile, cluster, PlanOptions(stages=stages, micro_batches=4, times_of="test", shard="none"))
    rehearsal = _rehearsed((planned, profile, cluster))
    costs = CostModel(profile, cluster, PlanOptions(gpus=8, times_of="test"))
    _check(rehearsal, trace(expand(planned), durations(costs, candidate_of(planned, profile))), planned)
    # Sharing only ever costs time: the difference to what is simulated is what it costs.
    assert rehearsal.steps_s[0] <= simulate(planned, profile, cluster).end_s
    assert "every action is priced as if it were alone" in rehearsal.notes[0]


INPUTS = gpt_profile(), local_cluster(2)
STEPS = 7


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(*INPUTS, PlanOptions(gpus=2, stages="0-6:1,7-13:1", micro_batches=4, schedule="1f1b"))


def rehearsed(planned: Plan, *faults: str, every: int | None = None) -> Rehearsal:
    return _rehearsed((planned, *INPUTS), STEPS, faults=tuple(map(Fault.parse, faults)), every=every)


@pytest.mark.parametrize("every", [None, 1, 2, 5])
@pytest.mark.parametrize(("fault", "action"), [("kill@1:5:B2", "B2@1"), ("exception@0:3:F1", "F1@0")])
def test_what_is_trained_again_is_the_time_since_the_checkpoint(
    planned: Plan, fault: str, action: str, every: int | None
) -> None:
    timeline = simulate(planned, *INPUTS)
    event = next(event for event in timeline if str(event.action) == action)
    (loss,) = rehearsed(planned, fault, every=every).losses
    whole = loss.step if every is None else loss.step % every
    assert loss.checkpoint == loss.step - whole
    # The virtual clock of a rank says when it turns to an action, which may have to wait.
    before = [each.end_s for each in timeline if each.rank == event.rank and each.end_s <= event.start_s + 1e-12]
    assert whole * timeline.end_s + max(before, default=0.0) - 1e-9 <= loss.lost_s
    assert loss.lost_s <= whole * timeline.end_s + event.start_s + 1e-9


def test_slow_ranks_make_longer_steps_than_losses_and_threads_divide_nothing(planned: Plan) -> None:
    plain, slow = rehearsed(planned).steps_s, rehearsed(planned, "slow@1:3").steps_s
    assert slow[:3] == plain[:3]
    # Every forward and backward of a busy stage takes as much more.
    assert all(after > before + 8 * SLOWER_S for before, after in zip(plain[3:], slow[3:], strict=True))
    found = rehearsed(planned, "kill@1:5:B2", "nan@0:2", "stop@1:5:F0")
    assert [loss.fault for loss in found.losses] == ["nan@0:2", "stop@1:5:F0", "kill@1:5:B2"]
    assert found.steps_s == rehearsed(planned).steps_s
    profile, cluster = gpt_profile(blocks=6), local_cluster(4)
    planned = plan(profile, cluster, PlanOptions(stages="0-3:2,4-7:2", micro_batches=4, shard="parameters"))
    rehearsal = _rehearsed((planned, profile, cluster))
    assert "divide no parameters" in rehearsal.notes[0]
    _check(rehearsal, simulate(planned, profile, cluster), planned)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("disk-full@0:1", "in virtual time no files are written"),
        ("kill@2:1", "the plan has 2 ranks, which count from 0"),
        ("kill@1:7", "`steps=7` has none of that number"),
    ],
)
def test_what_cannot_happen_is_refused(planned: Plan, fault: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        rehearsed(planned, fault)
    free = planned.model_copy(update={"divisible": True}), INPUTS[0], action_prices(planned, *INPUTS)
    with pytest.raises(UsageError, match="divides micro-batches freely"):
        rehearse_steps(*free)
    with pytest.raises(UsageError, match="`inject_fault`: what is lost is counted for `policy='sync'` alone"):
        rehearsed(planned.model_copy(update={"weight_policy": "2bw"}), fault)


POLICIES, TURNING = ("stash", "vertical-sync", "2bw", "predict", "pipemare"), 60


def ends(timeline: Timeline) -> list[tuple[int, str, float]]:
    """Return when what ranks compute and reduce ended, in their order."""
    found = [(each.rank, each.end_s, str(each.action)) for each in timeline if each.action.kind in "FBUPCATN"]
    return [(rank, text, end_s) for rank, end_s, text in sorted(found)]


def unflushed(seed: int) -> Inputs | None:
    """Return a plan of some policy with depths of its own, its profile and cluster; none where no plan obeys."""
    draw = random.Random(seed)
    # Replicas may take turns.
    turning = seed >= TURNING
    profile = random_profile(seed, batches=(1, 2, 4) if turning else (2, 4, 6))
    cluster, policy = random_cluster(seed, 5 if turning else 4), "stash" if turning else POLICIES[seed % len(POLICIES)]
    more: dict[str, object] = {"anneal_steps": 5} if policy == "pipemare" else {"micro_batches": 1} if turning else {}
    if policy == "predict":
        more = {"ahead": ("counted", "xpipe")[seed // len(POLICIES) % 2]}
    options = PlanOptions(policy=policy, min_stages=draw.choice([1, 2]), **more)  # type: ignore[arg-type]
    try:
        made = plan(profile, cluster, options)
    except AutoparError:
        return None
    extra = draw.choice([0, 1, 2]) if policy != "2bw" else 0
    stages = tuple(each.model_copy(update={"warmup": each.warmup + extra}) for each in made.stages)
    return made.model_copy(update={"stages": stages}), profile, cluster


def performs(made: Plan, profile: Profile, cluster: Cluster, program: Program | None = None) -> None:
    """Hold what the executor does against the simulation."""
    simulated, prices = simulate(made, profile, cluster, program), action_prices(made, profile, cluster, program)
    rehearsed = rehearse_steps(made, profile, prices, mini_batches(made), program=program, threads=True)
    assert len(rehearsed.steps_s) == mini_batches(made)
    assert ends(rehearsed.timeline) == [
        (rank, text, pytest.approx(end_s, rel=1e-9, abs=1e-9 * simulated.end_s))
        for rank, text, end_s in ends(simulated)
    ]
    how, busy_s = pipeline_times(simulated, made), [0.0] * simulated.rank_count()
    for each in simulated:
        busy_s[each.rank] += (each.end_s - each.start_s) * (each.action.kind in "FBU")
    assert how.period_s * mini_batches(made) >= max(busy_s) * (1 - 1e-9)
    assert how.fill_s + how.period_s * (mini_batches(made) - CYCLE) <= simulated.end_s * (1 + 1e-9)
    if made.span > 1:
        # A mini-batch ends with the last update that has it.
        assert sum(rehearsed.steps_s) == pytest.approx(simulated.end_s, rel=1e-9)


@pytest.mark.some(6)
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_pipelines_that_are_never_flushed_take_as_long_as_simulated(seed: int, edits: bool) -> None:
    found = unflushed(seed)
    if found is None:
        pytest.skip("no plan obeys")
    performs(*found, edited(found[0], seed) if edits else None)


@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(40))
def test_policies_on_stages_of_two_kinds_take_as_long_as_simulated(seed: int) -> None:
    rng, policy = random.Random(seed), POLICIES[seed % len(POLICIES)]
    profile, cluster = two_kinds(random_profile(seed, batches=(2, 4, 6)), random_cluster(seed, 4), seed)
    devices = [
        each.model_copy(update={"type": name})
        for each, name in zip(cluster.devices, ("test", "other") * 2, strict=True)
    ]
    layers = len(profile.layers)
    if layers == 1:
        pytest.skip("no stages")
    cut = rng.randint(1, layers - 1)
    every = ("1@test+1@other", "1@other+1@test"), ("2@test+1@other", "1@other"), ("1@test", "1@test+2@other")
    first, then = every[seed % 3]
    asked = f"0-{cut - 1}:{first},{cut}-{layers - 1}:{then}"
    more: dict[str, Any] = {"anneal_steps": 5} if policy == "pipemare" else {}
    options = PlanOptions(policy=policy, stages=asked, **more)
    try:
        made = plan(profile, cluster.model_copy(update={"devices": tuple(devices)}), options)
    except AutoparError:
        pytest.skip("no plan obeys")
    kinds = [sorted(devices[rank].type for rank in stage.devices) for stage in made.stages]
    assert kinds == [sorted(_types_of(text)) for text in (first, then)]
    performs(made, profile, cluster.model_copy(update={"devices": tuple(devices)}))


def _types_of(text: str) -> list[str]:
    return [name for each in text.split("+") for name in [each.split("@")[1]] * int(each.split("@")[0])]
