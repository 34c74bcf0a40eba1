"""Steps in virtual time against the simulator: the executor's own run has the same seconds, to the last digits.

What faults cost there is held against the simulated timeline.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from unittest.mock import patch

import pytest

from autopar.errors import TrainingError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile, Tensor
from autopar.formats.program import REDUCTIONS, SLOWER_S, Action, Program, RankProgram, parse_faults
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import find_cluster
from autopar.planner import PlanOptions, action_prices, plan, simulate
from autopar.planner.assemble import assemble, candidate_of
from autopar.planner.candidate import Candidate
from autopar.planner.costs.model import CostModel, durations
from autopar.planner.simulator.contention import ContentionSimulation
from autopar.planner.simulator.simulate import trace
from autopar.ranks.pool import RankPool
from autopar.runtime.rehearsal.steps import Rehearsal, rehearse_steps
from autopar.schedules.check import ProgramError, check, check_bounds
from autopar.schedules.expand import expand
from chunked import OTHERS, random_chunked, random_costs
from drawn import random_candidate
from pooled import process_ids
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile

MOST_RANKS = 8
SEEDS = 200


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(MOST_RANKS, timeout_s=60.0, imports=["autopar.runtime.rehearsal.steps"]) as ranks:
        yield ranks


def _drawn(seed: int) -> tuple[Plan, CostModel] | None:
    """Return a plan of any schedule, cuts, widths, shares, turns, shards and recomputation; some seeds have none."""
    rng = random.Random(seed)
    candidate: Candidate | None
    if seed % 2:
        costs = random_costs(seed)
        candidate = random_chunked(rng, costs, rng.choice(OTHERS))
    else:
        devices = rng.randint(1, MOST_RANKS)
        profile = random_profile(seed, most_layers=10, batches=(2, 4, 6, 12))
        costs = CostModel(profile, random_cluster(seed, devices), PlanOptions(gpus=devices))
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


def _check_seed(seed: int, *, threads: bool = False, pool: RankPool | None = None) -> Rehearsal:
    """Perform two steps of a seed's plan, and hold them against the simulation."""
    drawn = _drawn(seed)
    if drawn is None:
        pytest.skip("no such plan")
    planned, costs = drawn
    inputs = planned, costs.profile, costs.cluster
    rehearsal = rehearse_steps(planned, costs.profile, action_prices(*inputs), 2, threads=threads, pool=pool)
    _check(rehearsal, simulate(*inputs), planned)
    return rehearsal


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_plans_take_in_threads_as_long_as_simulated(seed: int) -> None:
    _check_seed(seed, threads=True)


@pytest.mark.parametrize("seed", range(1000, 1024))
def test_random_plans_take_in_processes_as_long_as_simulated(seed: int, pool: RankPool) -> None:
    assert not _check_seed(seed, pool=pool).notes


def _edited(rng: random.Random, planned: Plan) -> Program:
    """Return a plan's program with neighbours swapped wherever it is sound all the same."""
    program = expand(planned)
    for _ in range(30):
        rank = rng.randrange(len(program.ranks))
        actions = list(program.ranks[rank])
        at = rng.randrange(max(1, len(actions) - 1))
        if any(action.kind in REDUCTIONS for action in actions[at : at + 2]):
            # Nobody simulates reductions elsewhere: `simulate` and `rehearse` refuse them.
            continue
        actions[at : at + 2] = reversed(actions[at : at + 2])
        other = Program((*program.ranks[:rank], RankProgram.of(actions), *program.ranks[rank + 1 :]))
        with suppress(ProgramError):
            check(other, planned)
            check_bounds(other, planned)
            program = other
    return program


@pytest.mark.parametrize("seed", range(2000, 2060))
def test_programs_edited_at_random_take_as_long_as_simulated(seed: int) -> None:
    drawn = _drawn(seed)
    if drawn is None:
        pytest.skip("no such plan")
    planned, costs = drawn
    inputs, program = (planned, costs.profile, costs.cluster), _edited(random.Random(seed), planned)
    prices = action_prices(*inputs, program)
    rehearsal = rehearse_steps(planned, costs.profile, prices, 2, program=program, threads=True, timeout_s=30.0)
    _check(rehearsal, simulate(*inputs, program), planned)


def _line() -> tuple[Plan, Profile, Cluster]:
    profile, cluster = gpt_profile(blocks=6), local_cluster(4)
    options = PlanOptions(stages="0-1:1,2-3:1,4-5:1,6-7:1", micro_batches=8, recompute="none", schedule="1f1b")
    planned = plan(profile, cluster, options)
    depths = zip(planned.stages, (4, 3, 2, 1), strict=True)
    stages = tuple(stage.model_copy(update={"warmup": depth}) for stage, depth in depths)
    return planned.model_copy(update={"stages": stages, "schedule": "1f1b"}), profile, cluster


def _rehearsed(program: Program | None = None) -> Rehearsal:
    inputs = _line()
    prices = action_prices(*inputs, program)
    return rehearse_steps(inputs[0], inputs[1], prices, program=program, threads=True, timeout_s=30.0)


def _swapped(planned: Plan) -> Program:
    """Return a program whose second rank takes its third forward before its second one."""
    program = expand(planned)
    actions = [str(action) for action in program.ranks[1]]
    second, third = actions.index("F1@1"), actions.index("F2@1")
    receive = actions.index("R2@1<0@0")
    assert second < receive < third
    actions[third], actions[second] = "F1@1", "F2@1"
    actions.insert(second, actions.pop(receive))
    # What was sent before the third one is sent behind the second one.
    sent = actions.index("S1@1>2@2")
    actions.insert(actions.index("F1@1"), actions.pop(sent))
    ranks = [program.ranks[0], RankProgram.of(map(Action.parse, actions)), *program.ranks[2:]]
    return Program(tuple(ranks))


def test_another_order_changes_what_is_rehearsed_as_it_changes_what_is_simulated() -> None:
    inputs = _line()
    edited = _swapped(inputs[0])
    assert edited != expand(inputs[0])
    rehearsal, simulated = _rehearsed(edited), simulate(*inputs, edited)
    _check(rehearsal, simulated, inputs[0])
    swapped = Action.parse("F1@1")
    before, after = (
        next(event.end_s for event in each if event.action == swapped)
        for each in (simulate(*inputs), rehearsal.timeline)
    )
    assert after > 1.1 * before


def test_a_simulator_that_forgets_what_messages_take_is_found_out() -> None:
    inputs = _line()
    deliver = ContentionSimulation._deliver

    def at_once(self: ContentionSimulation, queue: object, at: int, begun_s: float, end_s: float) -> None:
        deliver(self, queue, at, begun_s, begun_s)  # type: ignore[arg-type]

    with patch.object(ContentionSimulation, "_deliver", at_once):
        wrong = simulate(*inputs)
    assert _rehearsed().steps_s[0] > 1.0001 * wrong.end_s


def test_a_simulator_whose_depths_are_off_by_one_is_found_out() -> None:
    planned, profile, cluster = _line()
    stages = tuple(stage.model_copy(update={"warmup": max(1, stage.warmup - 1)}) for stage in planned.stages)
    wrong = simulate(planned.model_copy(update={"stages": stages}), profile, cluster)
    assert wrong.end_s > 1.01 * _rehearsed().steps_s[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stages", ["0-1:1,2-3:1,4-5:1,6-7:1", "0-3:2,4-7:2", "0-7:4", "0-4:1,5-7:3"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_ranks_hold_what_was_predicted(schedule: str, stages: str, recompute: str) -> None:
    profile, cluster = gpt_profile(blocks=6), local_cluster(4)
    options = PlanOptions(stages=stages, micro_batches=8, schedule=schedule, recompute=recompute)
    planned = plan(profile, cluster, options)
    prices = action_prices(planned, profile, cluster)
    timeline = rehearse_steps(planned, profile, prices, 2, threads=True).timeline
    peaks = timeline.peaks_bytes()
    for stage, predicted in zip(planned.stages, planned.predicted.peak_bytes, strict=True):
        # Of replicas, the one with the largest share, or most turns, counts.
        assert max(peaks[device] for device in stage.devices) == pytest.approx(predicted, rel=0.03)
    for rank, moments in timeline.memory.items():
        # At the end of a step nothing is left of its micro-batches, whatever it was.
        assert moments == sorted(moments, key=lambda moment: moment[0])
        assert moments[-1][1] <= moments[0][1] + prices.holds[rank].update


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


@pytest.mark.parametrize("stages", ["0-1:1,2-3:1,4-5:1,6-7:1", "0-2:2,3-7:2", "0-1:1,2-3:2,4-7:1"])
@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_nobody_answers_is_held_until_the_next_step_as_predicted(schedule: str, blocks: int, stages: str) -> None:
    profile, cluster = _frozen(blocks), local_cluster(4)
    options = PlanOptions(stages=stages, micro_batches=8, schedule=schedule, recompute="none")
    planned = plan(profile, cluster, options)
    rehearsal = rehearse_steps(planned, profile, action_prices(planned, profile, cluster), 3, threads=True)
    peaks = rehearsal.timeline.peaks_bytes()
    frozen = {layer.name for layer in profile.layers if not layer.trainable_bytes}
    for at, (stage, predicted) in enumerate(zip(planned.stages, planned.predicted.peak_bytes, strict=True)):
        held = max(peaks[device] for device in stage.devices)
        # What a stage that trains nothing receives is counted as in flight, and is let go sooner.
        assert 0.8 * predicted < held < 1.03 * predicted
        if at == 0 and frozen.issuperset(stage.layers):
            assert held == pytest.approx(predicted, rel=1e-3)


@pytest.mark.parametrize("asked", [{"schedule": "1f1b"}, {"policy": "stash"}, {"policy": "2bw"}], ids=str)
def test_what_one_later_stage_alone_reads_is_held_until_the_next_step_as_predicted(asked: dict[str, str]) -> None:
    profile, cluster = _frozen(0), local_cluster(4)
    # No gradient comes back of it, and the stage behind answers for other tensors only.
    one = {"consumers": (profile.layers[-2].name,), "bytes_per_sample": 2**20}
    tensors = [each.model_copy(update=one) if each.name == "angles" else each for each in profile.tensors]
    profile = profile.model_copy(update={"tensors": tuple(tensors)})
    fixed = PlanOptions(stages="0-1:1,2-3:1,4-5:1,6-7:1", micro_batches=8, recompute="none")
    planned = plan(profile, cluster, replace(fixed, **asked))  # type: ignore[arg-type]
    # Without flushes, steps fill the pipeline first.
    rehearsal = rehearse_steps(planned, profile, action_prices(planned, profile, cluster), 6, threads=True)
    held, predicted = rehearsal.timeline.peaks_bytes()[planned.stages[0].devices[0]], planned.predicted.peak_bytes[0]
    assert 0.9 * predicted < held < 1.03 * predicted


@pytest.mark.parametrize(
    ("stages", "made", "asked"),
    [
        # Of a tensor that passes stages by, gradients are on their way for as long as its maker leads.
        ("0-1:1,2-3:1,4-5:1,6-7:1", 0, {"schedule": "1f1b"}),
        ("0-1:1,2-3:1,4-5:1,6-7:1", 0, {"policy": "2bw"}),
        ("0-2:1,3-3:2,4-5:1,6-7:1", 0, {"policy": "stash", "micro_batches": 1}),
        # Those who take turns lead by what all of them have in flight, which is more than a step has.
        ("0-5:3,6-7:1", 4, {"policy": "stash", "micro_batches": 1}),
    ],
)
def test_gradients_that_are_long_on_their_way_are_held_as_predicted(
    stages: str, made: int, asked: dict[str, object]
) -> None:
    profile, cluster = gpt_profile(blocks=6), local_cluster(5)
    skip = Tensor(
        name="skip",
        producer=profile.layers[made].name,
        consumers=(profile.layers[-1].name,),
        bytes_per_sample=2**20,
        dtype="f32",
        gradient=True,
    )
    profile = profile.model_copy(update={"tensors": (*profile.tensors, skip), "tied": ()})
    fixed = PlanOptions(stages=stages, micro_batches=8, recompute="none")
    planned = plan(profile, cluster, replace(fixed, **asked))  # type: ignore[arg-type]
    rehearsal = rehearse_steps(planned, profile, action_prices(planned, profile, cluster), 12, threads=True)
    held, predicted = rehearsal.timeline.peaks_bytes()[planned.stages[-1].devices[0]], planned.predicted.peak_bytes[-1]
    assert 0.9 * predicted < held < 1.01 * predicted


def test_a_depth_that_is_off_by_one_shows_in_what_is_held() -> None:
    planned, profile, cluster = _line()
    more = tuple(stage.model_copy(update={"warmup": min(8, stage.warmup + 1)}) for stage in planned.stages)
    peaks = []
    for each in (planned, planned.model_copy(update={"stages": more})):
        timeline = rehearse_steps(each, profile, action_prices(each, profile, cluster), threads=True).timeline
        peaks.append(timeline.peaks_bytes())
    assert all(peaks[1][rank] > 1.05 * peaks[0][rank] for rank in range(4))


@pytest.mark.slow
def test_in_real_time_steps_are_as_long(pool: RankPool) -> None:
    planned, profile, cluster = _line()
    slower = tuple(
        layer.model_copy(
            update={
                "costs": tuple(
                    each.model_copy(update={"forward_s": 5 * each.forward_s, "backward_s": 5 * each.backward_s})
                    for each in layer.costs
                )
            }
        )
        for layer in profile.layers
    )
    inputs = planned, profile.model_copy(update={"layers": slower}), cluster
    rehearsal = rehearse_steps(planned, inputs[1], action_prices(*inputs), 2, real_time=True, pool=pool)
    # How much longer is a matter of the machine.
    assert min(rehearsal.steps_s) > 0.999 * simulate(*inputs).end_s


@pytest.mark.parametrize("stages", ["0-3:4,4-7:4", "0-1:3,2-4:2,5-7:3"])
def test_where_links_are_shared_steps_take_as_long_as_without_and_that_is_said(stages: str) -> None:
    profile, cluster = gpt_profile(blocks=6), find_cluster("2x4xV100:1Gbps")
    planned = plan(profile, cluster, PlanOptions(stages=stages, micro_batches=4, times_of="test", shard="none"))
    inputs = planned, profile, cluster
    rehearsal, shared = rehearse_steps(planned, profile, action_prices(*inputs), threads=True), simulate(*inputs)
    costs = CostModel(profile, cluster, PlanOptions(gpus=8, times_of="test"))
    _check(rehearsal, trace(expand(planned), durations(costs, candidate_of(planned, profile))), planned)
    # Sharing only ever costs time: the difference to what is simulated is what it costs.
    assert rehearsal.steps_s[0] <= shared.end_s
    assert "every action is priced as if it were alone" in rehearsal.notes[0]


def test_threads_say_that_they_divide_nothing() -> None:
    profile, cluster = gpt_profile(blocks=6), local_cluster(4)
    planned = plan(profile, cluster, PlanOptions(stages="0-3:2,4-7:2", micro_batches=4, shard="parameters"))
    inputs = planned, profile, cluster
    rehearsal = rehearse_steps(planned, profile, action_prices(*inputs), threads=True)
    assert "divide no parameters" in rehearsal.notes[0]
    _check(rehearsal, simulate(*inputs), planned)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named() -> None:
    planned, profile, cluster = _line()
    prices = action_prices(planned, profile, cluster)
    # An hour of sleep, unless someone is killed.
    slow = replace(prices, overhead_s=3600.0)
    with RankPool(4, timeout_s=60.0) as ranks:

        def kill() -> None:
            time.sleep(3.0)
            os.kill(process_ids(ranks)[2], signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        with pytest.raises(TrainingError, match=r"rank 2 .*was killed by SIGKILL"):
            rehearse_steps(planned, profile, slow, real_time=True, pool=ranks)


def test_plans_that_no_program_follows_from_are_refused() -> None:
    planned, profile, cluster = _line()
    free, prices = planned.model_copy(update={"divisible": True}), action_prices(planned, profile, cluster)
    with pytest.raises(UsageError, match="divides micro-batches freely"):
        rehearse_steps(free, profile, prices)


INPUTS = gpt_profile(), local_cluster(2)
STEPS = 7


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(*INPUTS, PlanOptions(gpus=2, stages="0-6:1,7-13:1", micro_batches=4, schedule="1f1b"))


def rehearsed(planned: Plan, *faults: str, every: int | None = None) -> Rehearsal:
    prices = action_prices(planned, *INPUTS)
    return rehearse_steps(planned, INPUTS[0], prices, STEPS, threads=True, faults=parse_faults(faults), every=every)


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


def test_losses_are_listed_as_they_happen_and_change_no_step(planned: Plan) -> None:
    found = rehearsed(planned, "kill@1:5:B2", "nan@0:2", "stop@1:5:F0")
    assert [loss.fault for loss in found.losses] == ["nan@0:2", "stop@1:5:F0", "kill@1:5:B2"]
    assert found.steps_s == rehearsed(planned).steps_s


def test_a_slow_rank_makes_its_steps_longer(planned: Plan) -> None:
    plain, slow = rehearsed(planned).steps_s, rehearsed(planned, "slow@1:3").steps_s
    assert slow[:3] == plain[:3]
    # Every forward and backward of a busy stage takes as much more.
    assert all(after > before + 8 * SLOWER_S for before, after in zip(plain[3:], slow[3:], strict=True))


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
