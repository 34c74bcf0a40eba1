"""Commands that a page shows: typed, they make the same plan again."""

import itertools
import shlex
from pathlib import Path

import pytest

import autopar
from autopar.formats.plan import Plan
from autopar.report.commands import plan_commands, stages_text, trace_command
from calls import Run, well
from equal_plans import random_equal
from played import play, small_plan
from random_problems import gpt_profile


def _typed(run: Run, line: str) -> None:
    assert shlex.split(line)[0] == "autopar"
    well(run, *shlex.split(line)[1:])


@pytest.mark.parametrize(
    "asked",
    [
        ("--gpus", "2"),
        ("--stages", "0-1:2,2-3:1", "--micro-batches", "4"),
        ("--stages", "0-1:2,2-3:2", "--division", "round-robin", "--micro-batches", "4", "--schedule", "1f1b"),
        ("--stages", "0:1,1:1,2:1,3:1", "--schedule", "interleaved", "--gpus", "2"),
        ("--gpus", "2", "--objective", "throughput", "--seed", "3"),
        ("--gpus", "2", "--ema-decay", "0.99", "--bandwidth", "3GB/s"),
    ],
    ids=" ".join,
)
def test_the_line_of_a_plan_makes_it_again(run: Run, asked: tuple[str, ...]) -> None:
    gpt_profile(blocks=2).save("profile.json")
    well(run, "plan", *asked, "-o", "plan 1.json")
    plan = Plan.load(Path("plan 1.json"))
    line, *others = plan_commands(plan, "again.json")
    _typed(run, line)
    again = Plan.load(Path("again.json"))
    for name in ("stages", "schedule", "micro_batches", "weight_policy", "seed", "ema_decay", "bytes_per_s"):
        assert getattr(again, name) == getattr(plan, name), name
    assert again.predicted.step_s == plan.predicted.step_s
    assert others == ["autopar simulate again.json", "autopar run again.json"]


@pytest.mark.parametrize("seed", range(20))
def test_stages_are_named_as_planning_reads_them(seed: int) -> None:
    plan, profile, _ = random_equal(seed)
    from autopar.planner.dictated import parse

    found = parse(stages_text(plan), [layer.name for layer in profile.layers])
    assert found.widths == tuple(stage.replicas for stage in plan.stages)
    edges = [0, *found.cuts]
    names = [layer.name for layer in profile.layers]
    assert [tuple(names[first:stop]) for first, stop in itertools.pairwise(edges)] == [
        stage.layers for stage in plan.stages
    ]


def test_a_file_shows_the_lines_that_made_it(run: Run) -> None:
    gpt_profile(blocks=2).save("profile.json")
    well(run, "plan", "--gpus", "2", "--min-stages", "2")
    play(small_plan((1, 1), 4), "measured").save("trace.json")
    assert [*autopar.show("trace.json").commands()] == [
        "autopar run --trace trace.json",
        "autopar show trace.json --html trace.html",
    ]
    assert trace_command("simulated", "a b.json") == "autopar simulate --trace 'a b.json'"
    profiled, planned, *_ = autopar.show("plan.json").commands()
    assert profiled.startswith("autopar profile ")
    assert planned.startswith("autopar plan profile.json ")
    Path("profile.json").unlink()
    assert next(iter(autopar.show("plan.json").commands())) == planned
