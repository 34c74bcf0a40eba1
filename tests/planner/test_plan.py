"""Whole plans and comparisons: what they record, and that the same question has the same answer."""

import os
import re
import subprocess
import sys
from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Noise, Profile
from autopar.options.plan import check_flags
from autopar.ownership import Replicas, Shard
from autopar.planner import PlanOptions, plan
from autopar.planner.assemble import schedule_of
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.comparison import compare
from autopar.planner.costs.model import CostModel
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from oracles.exhaustive import everything
from paths import HARNESS
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile
from searched import exhausted

MIB = 2**20


def test_a_plan_is_sound_and_never_slower_than_its_alternatives() -> None:
    """Those that are found exactly are also as fast as the oracle's."""
    for seed in range(9):
        devices = seed % 6 + 1
        schedule = "auto" if seed % 2 else "1f1b"
        options = PlanOptions(gpus=devices, schedule=schedule, exact=True)
        profile, cluster = random_profile(seed), random_cluster(seed, devices)
        if len(profile.layers) < 5 and devices < 4 and schedule == "1f1b":
            made = plan(profile, cluster, replace(options, gap=0.0, exact=False))
            assert made.predicted.step_s == pytest.approx(exhausted(profile, cluster, options)[0].step_s, rel=1e-9), (
                seed
            )
        made = plan(profile, cluster, options)
        assert Plan.parse(made.dumps(), Path("plan.json")) == made
        check(expand(made), made)
        bounds, shares = made.predicted.bounds, made.predicted.shares
        ascending = [*(seconds for _, seconds in bounds), made.predicted.lower_bound_s, made.predicted.step_s]
        assert ascending == sorted(ascending)
        assert shares.computing == pytest.approx(1 - made.predicted.bubble, rel=1e-9)
        assert {"pure data parallelism", "equal split"} <= {each.name for each in made.alternatives}
        for each in made.alternatives:
            assert each.excluded or each.step_s is None or each.step_s >= made.predicted.step_s
            assert each.step_s is None or each.step_s >= bounds.work_s
        fits = zip(made.predicted.peak_bytes, made.predicted.limit_bytes, strict=True)
        assert all(peak <= limit for peak, limit in fits)


@pytest.mark.reliability(50)
def test_what_does_not_fit_or_stays_idle_is_told() -> None:
    checked = 0
    for seed in range(8):
        profile, cluster = random_profile(seed, most_layers=4, batches=(1, 2, 3)), random_cluster(seed, 3)
        options = PlanOptions(gpus=3, memory_bytes=1 + seed * 500, shard="none")
        costs = CostModel(profile, cluster, options)
        least = min(max(costs.shortfalls(candidate)) for candidate in everything(costs, options))
        if least <= 0:
            continue
        checked += 1
        with pytest.raises(InfeasibleError) as caught:
            plan(profile, cluster, options)
        assert re.search(rf"stage .*\({least} bytes\).*a plan fits with `", str(caught.value))
    assert checked >= 5
    profile, cluster = gpt_profile(), local_cluster(2)
    slow = plan(profile, cluster, PlanOptions(gpus=2, bytes_per_s=1e4))
    assert len(slow.devices) == 1
    assert slow.notes[0].startswith("1 of 2 devices stay idle")
    assert len(plan(profile, cluster, PlanOptions(gpus=2, bytes_per_s=1e4, use_all=True)).devices) == 2
    with pytest.raises(InfeasibleError, match=r"no plan uses all 20 devices"):
        plan(gpt_profile(blocks=1), local_cluster(2), PlanOptions(gpus=20, use_all=True, batch=1))
    options = PlanOptions(gpus=2, memory_bytes=60 * MIB, shard="none", schedule="1f1b")
    made = plan(gpt_profile(), local_cluster(2), options)
    assert "stage 0 (layers wte..head) needs 24.66 MiB more than 60.00 MiB" in str(made.alternatives[0].infeasible)
    assert len(made.stages) == 2
    made = plan(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, batch=3))
    assert made.alternatives[0].infeasible == "no micro-batch of a batch of 3 has a sample for each of 4"


def test_dictated_stages_and_rows_are_priced_and_kept() -> None:
    options = PlanOptions(stages="wte-h.2:2,4-13:1", schedule="gpipe", micro_batches=4)
    made = plan(gpt_profile(), local_cluster(2), options)
    assert [(stage.layers[0], stage.layers[-1], stage.devices) for stage in made.stages] == [
        ("wte", "h.2", (0, 1)),
        ("h.3", "head", (2,)),
    ]
    assert (made.schedule, made.micro_batches) == ("gpipe", 4)
    assert next(each for each in made.alternatives if each.name == "best").step_s <= made.predicted.step_s
    cluster = random_cluster(0, 4)
    for asked in ({"gap": 0}, {"equal_widths": True}, {"effort": 2}, {"exact": True}, {"min_stages": 2}):
        options = PlanOptions(gpus=4, **asked)  # type: ignore[arg-type]
        for name, value in re.findall(r"`(\w+)=([\w.]+)`", str(plan(gpt_profile(blocks=4), cluster, options).notes)):
            check_flags(replace(options, **{name: literal_eval(value)}))
    options = PlanOptions(gpus=4, bytes_per_s=3e8, memory_bytes=45 * MIB)
    found = compare(gpt_profile(blocks=6), local_cluster(4), options)
    assert found.plan == plan(gpt_profile(blocks=6), local_cluster(4), options)
    assert {row.name for row in found.rows} >= {"autopar", "pure data parallelism", "equal split", "GPipe", "DAPPLE"}
    run = [row for row in found.rows if row.step_s is not None and row.priced is None]
    steps = [row.step_s for row in run if row.waves is None]
    assert steps == sorted(steps)
    # What trains other weights is behind, however quick.
    assert [row.waves is None for row in run] == [True] * len(steps) + [False] * (len(run) - len(steps))
    assert [row.step_s is None for row in found.rows] == sorted(row.step_s is None for row in found.rows)
    assert all((row.step_s is None) == (row.infeasible is not None) for row in found.rows)
    first, predicted = found.rows[0], found.plan.predicted
    assert (first.name, first.step_s, first.peak_bytes) == ("autopar", predicted.step_s, max(predicted.peak_bytes))
    profile, cluster = gpt_profile(blocks=6), local_cluster(4)
    rows = compare(profile, cluster, PlanOptions(gpus=4, bytes_per_s=3e8)).rows
    for row in (each for each in rows if each.stages is not None):
        shard: Shard = "parameters" if row.name == "sharded data parallelism" else "none"
        asked = {"stages": row.stages, "micro_batches": row.micro_batches, "schedule": row.schedule or "auto"}
        asked["division"] = row.division or "split"
        if row.waves is not None:
            # Pipelines that are not flushed; a step has the samples of one.
            wave, staleness = map(int, re.findall(r"of (\d+), staleness (\d+)", row.waves)[0])
            asked = {"stages": row.stages, "policy": "wsp", "wave": wave, "staleness": staleness, "micro_batches": 1}
        options = PlanOptions(bytes_per_s=3e8, shard=shard, **asked)  # type: ignore[arg-type]
        own = plan(profile, cluster, options)
        assert own.predicted.step_s / max(1, len(own.pipelines)) == pytest.approx(row.step_s, rel=1e-12)


def test_dictated_replicas_split_micro_batches_unless_turns_are_asked_for() -> None:
    profile, cluster = gpt_profile(blocks=4), local_cluster(4)
    for seed in range(8):
        rng = Random(seed)
        asked: dict[str, Any] = {"stages": rng.choice(("0-5:2", "0-5:4", "0-2:2,3-5:2", "0-1:3,2-5:1", "0:1,1-5:2"))}
        asked |= {"micro_batches": rng.choice((1, 2, 4, 8, 16)), "policy": rng.choice(("sync", "sync", "stash", "2bw"))}
        for division in ("split", "round-robin"):
            try:
                made = plan(profile, cluster, PlanOptions(**asked, division=division))
            except UsageError as error:
                # Whoever is told another way can go it.
                if "`division='round-robin'`" in str(error):
                    plan(profile, cluster, PlanOptions(**asked, division="round-robin"))
                continue
            assert {stage.division for stage in made.stages if stage.replicas > 1} == {division}
    rows = compare(profile, cluster, PlanOptions(stages="0-5:4", micro_batches=16, division="round-robin")).rows
    assert next(row for row in rows if row.name == "dictated").stages == "0-5:4"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stages": "0-13:8", "micro_batches": 16}, "in turn: `division='round-robin'`"),
        ({"stages": "0-13:8", "micro_batches": 4, "division": "round-robin"}, "use more `micro_batches`, fewer"),
        ({"division": "round-robin"}, "`division='round-robin'` is of `stages`"),
        ({"stages": "0-13:2", "division": "round-robin", "schedule": "zb-h1"}, "replicas of zb-h1 split"),
        ({"stages": "0-13:3", "gpus": 2}, "`stages` needs 3 devices, but `gpus` is 2"),
        ({"stages": "0-13:2", "gpus": 4, "use_all": True}, "`use_all` asks for all 4"),
        ({"stages": "0-13:20"}, "use fewer replicas"),
        ({"stages": "0-13:2", "min_stages": 2}, "`min_stages` is 2"),
        ({"gpus": 20, "min_stages": 15}, "make at most 14 stages"),
        ({"gpus": 0}, "`gpus` must be at least 1, found 0"),
        ({"gpus": 2, "gap": -1.0}, "`gap` must be 0 or more"),
        ({"gpus": 8, "solver": "exhaustive"}, "`solver` must be one of dp, milp; found 'exhaustive'"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(gpt_profile(), local_cluster(2), PlanOptions(**asked))  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("said", [{"compiled": True}, {"indivisible": "its step raises AssertionError"}], ids=str)
def test_layers_or_optimizers_that_cannot_be_divided_are_compared_with_no_sharded_plan(said: dict[str, object]) -> None:
    profile, cluster = gpt_profile(blocks=2).model_copy(update=said), local_cluster(2)
    made = plan(profile, cluster, PlanOptions(gpus=2))
    assert "sharded data parallelism" not in [each.name for each in made.alternatives]
    assert [each.excluded for each in made.alternatives if each.excluded] == []
    assert plan(profile, cluster, PlanOptions(gpus=2, shard="none")) == made
    with pytest.raises(UsageError, match=r"`shard='gradients'`: .*; plan with `shard='none'`"):
        plan(profile, cluster, PlanOptions(gpus=2, shard="gradients"))
    # Nor is dividing a remedy for too little memory.
    for each, helps in ((gpt_profile(blocks=2), True), (profile, False)):
        with pytest.raises(InfeasibleError) as failed:
            plan(each, cluster, PlanOptions(gpus=2, memory_bytes=16 * MIB, max_stages=1, shard="none"))
        assert ("`shard=" in str(failed.value)) == helps
    if "indivisible" in said:
        with pytest.raises(UsageError, match=r"`stages` .* its step raises AssertionError; give each replica"):
            plan(profile, cluster, PlanOptions(gpus=2, stages=f"0-{len(profile.layers) - 1}:1x2"))


@pytest.mark.parametrize(
    ("asked", "row", "marks"),
    [
        ({"min_stages": 2, "schedule": "1f1b"}, 0, "`min_stages=2`"),
        ({"pin": ("wte,head different stages",), "schedule": "1f1b"}, 0, "`pin='wte,head different stages'`"),
        ({"shard": "none"}, 1, "`shard='none'`"),
        ({"schedule": "interleaved"}, 0, "`schedule='interleaved'`"),
    ],
    ids=str,
)
def test_a_reference_that_an_option_excludes_is_marked(asked: dict[str, Any], row: int, marks: str) -> None:
    made = plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=2, **asked))
    assert ["pure data parallelism", "sharded data parallelism"][row] == made.alternatives[row].name
    assert made.alternatives[row].excluded == marks
    assert made.alternatives[row].step_s is not None
    if "shard" not in asked:
        assert len(made.stages) > 1
    if asked.get("schedule") == "interleaved":
        assert {(each.schedule, each.excluded) for each in made.alternatives} == {("1f1b", marks)}


_SCRIPT = """
import sys
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile
from autopar.planner import PlanOptions, plan
for seed in range(2):
    made = plan(random_profile(seed), random_cluster(seed, 4), PlanOptions(gpus=4))
    sys.stdout.write(made.dumps())
sys.stdout.write(plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=4, bytes_per_s=1e8)).dumps())
sys.stdout.write(plan(gpt_profile(), local_cluster(4), PlanOptions(objective="throughput")).dumps())
assert not {"torch", "pandas", "matplotlib", "networkx", "pulp"} & set(sys.modules), "the planner must stay light"
options = PlanOptions(gpus=3, bytes_per_s=1e8, min_stages=2, pin=("h.1,h.2 same stage",), solver="milp")
sys.stdout.write(plan(gpt_profile(blocks=4), local_cluster(3), options).dumps())
"""


@pytest.mark.slow
def test_of_a_profile_whose_times_spread_plan_and_report_say_so() -> None:
    for spread, said in ((0.2, None), (0.21, 0.21)):
        noise = Noise(median_spread=spread, max_spread=1.0)
        made = plan(gpt_profile().model_copy(update={"noise": noise}), local_cluster(2))
        assert made.times_spread == said
        assert any("spread by 21%" in each for each in made.caveats) == ("times_spread" in made.dumps()) == bool(said)


def test_the_same_question_has_a_byte_equal_answer_under_any_hash_seed_and_no_torch() -> None:
    answers = []
    for hash_seed in ("0", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(HARNESS)}
        command = [sys.executable, "-c", _SCRIPT]
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        answers.append(done.stdout)
    assert len(answers[0]) > 10_000
    assert answers[0] == answers[1]


def test_a_plan_of_1f1b_is_called_so_where_it_is_asked_for_and_does_what_gpipe_does_with_all_in_flight() -> None:
    for seed in range(10):
        profile, cluster = random_profile(seed, most_layers=6), random_cluster(seed, 3)
        for schedule in ("1f1b", "gpipe"):
            options = PlanOptions(schedule=schedule, micro_batches=2, min_stages=2)
            try:
                made = plan(profile, cluster, options)
            except (InfeasibleError, UsageError):
                continue
            assert made.schedule == schedule, f"seed {seed}"
            if schedule == "gpipe":
                assert expand(made) == expand(made.model_copy(update={"schedule": "1f1b"})), f"seed {seed}"
    family = Family(4, 2, "gpipe")
    candidate = Candidate(*family, place(family, (2, 4), [Replicas()] * 2))
    assert (schedule_of(candidate), schedule_of(candidate, "1f1b")) == ("gpipe", "1f1b")


EXACT, USUAL = 0.001, 0.01


def _question(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    draw = Random(seed)
    devices = draw.randint(2, 7)
    rate = draw.choice((None, 1e8, 5e8))
    if seed % 2:
        memory = draw.choice((None, 2_500_000, 4_000_000))
        profile = random_profile(seed, most_layers=10, batches=(4, 6, 8))
        return profile, random_cluster(seed, 8), PlanOptions(gpus=devices, memory_bytes=memory, bytes_per_s=rate)
    memory = draw.choice((None, 40 * MIB, 60 * MIB))
    profile = gpt_profile(blocks=draw.randint(4, 10), batch=draw.choice((8, 16)))
    return profile, local_cluster(8), PlanOptions(gpus=devices, memory_bytes=memory, bytes_per_s=rate)


def _more(options: PlanOptions, what: str, draw: Random) -> tuple[PlanOptions, PlanOptions]:
    if what == "memory":
        memory = options.memory_bytes or 4_000_000
        return replace(options, memory_bytes=memory), replace(options, memory_bytes=int(memory * draw.uniform(1.05, 3)))
    if what == "bandwidth":
        rate = options.bytes_per_s or 1e8
        return replace(options, bytes_per_s=rate), replace(options, bytes_per_s=rate * draw.uniform(1.1, 8))
    return options, replace(options, gpus=options.gpus + draw.randint(1, 8 - options.gpus))


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["memory", "bandwidth", "devices"])
def test_more_never_makes_a_plan_slower(what: str) -> None:
    compared = 0
    for seed in range(3):
        profile, cluster, options = _question(seed)
        less, more = _more(options, what, Random(seed))
        for exact, most in ((True, EXACT), (False, USUAL)):
            try:
                before = plan(profile, cluster, replace(less, exact=exact))
            except InfeasibleError:
                continue
            after = plan(profile, cluster, replace(more, exact=exact))
            assert after.predicted.step_s <= before.predicted.step_s * (1 + most), f"seed {seed}"
            compared += 1
    assert compared >= 2
