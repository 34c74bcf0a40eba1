"""A plan's bounds in words, its stages and alternatives as tables, its memory; compared plans."""

from pathlib import Path

import pytest

from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative, BoundPart, Bounds, Price, Shares, Term
from autopar.formats.report import ComparisonRow
from autopar.report.plan import binding_text, bound_rows, render, render_comparison, render_memory, share_text
from autopar.report.table import as_text
from played import small_plan
from shown import shown


def _plan(*parts: BoundPart) -> Plan:
    plan = small_plan((1, 1), 2)
    bounds = Bounds(work_s=0.5, contiguous_s=0.7, linked_s=0.75)
    shares = Shares(computing=0.7, messages=0.1, reduction=0.05, idle=0.15)
    update = {"step_s": 1.1, "lower_bound_s": 1.0, "bounds": bounds, "binding": parts, "shares": shares}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=update)})


def test_bounds_gaps_and_stages_are_shown_as_the_plan_says() -> None:
    assert bound_rows(_plan()) == [
        ("bound of any plan: work alone", "500 ms"),
        ("one stage a device: contiguous", "700 ms"),
        ("+ links", "750 ms"),
        ("+ memory: their lower bound", "1 s"),
        ("gap to it", "10.0 %"),
    ]
    # Of a plan with two stages a device, the others' bound stands aside, and is no less than its own.
    chunked = small_plan((1, 1), 2, "interleaved", 2)
    for linked_s, said in ((0.75, "1 s"), (2.0, "2 s")):
        bounds = Bounds(work_s=0.5, contiguous_s=0.7, linked_s=linked_s)
        predicted = _plan().predicted.model_copy(update={"bounds": bounds})
        found = bound_rows(chunked.model_copy(update={"predicted": predicted}))
        assert found[-1] == ("one stage a device: at least", said)
    # The gap is to the bound that the file has, and stands there once.
    for found in (bound_rows(_plan()), bound_rows(chunked.model_copy(update={"predicted": predicted}))):
        assert [text for name, text in found if name == "gap to it"] == ["10.0 %"]
    expected = "computing 70.0 %, waiting for messages 10.0 %, for gradients to be reduced 5.0 %, idle 15.0 %"
    assert share_text(_plan()) == expected
    assert expected in as_text(render(_plan()))
    timed = [Alternative(name=name, step_s=step_s) for name, step_s in (("slow", 2.0), ("best", 1.0))]
    others = (Alternative(name="equal split", infeasible="stage 1 needs more"), *timed)
    plan = small_plan((2, 1), 4).model_copy(update={"alternatives": others})
    rows = shown(render(plan))
    assert [row.split()[0] for row in rows[rows.index("Alternatives") + 4 :][:3]] == ["equal", "slow", "best"]


def test_figures_stand_in_their_rows_and_parts_of_no_stage_are_refused() -> None:
    plan = small_plan((2, 1), 4)
    changes = ({"layers": ("a", "b"), "recompute": ("a",), "shard": "optimizer"}, {"recompute": plan.stages[1].layers})
    stages = tuple(each.model_copy(update=update) for each, update in zip(plan.stages, changes, strict=True))
    slow = Alternative(name="slow", step_s=1.5, price_per_step=3.0, micro_batches=2, schedule="gpipe", stages="0:1")
    price = Price(per_hour=7, per_step=2, per_million_samples=5, lower_bound_per_step=1.6, deadline_s=3)
    predicted = plan.predicted.model_copy(update={"price": price, "limit_bytes": (2**21, 3 * 2**20)})
    plan = plan.model_copy(update={"stages": stages, "predicted": predicted, "alternatives": (slow,)})
    rows = shown(render(plan))
    at = next(index for index, row in enumerate(rows) if row.startswith("0 a .. b 0, 1 2 x 4 "))
    assert rows[at].endswith(" 1 MiB 1 MiB")
    assert rows[at + 1 : at + 3] == ["recomputes 1 of 2", "shards optimizer"]
    assert rows[at + 3].endswith(" 1 MiB 2 MiB")
    assert rows[at + 4] == "recomputes all"
    assert {"samples per second 32", "gap to it 25.0 %", "deadline of a step 3 s"} <= set(rows)
    assert "slow 1.5 s +50.0 % 3 +50.0 % gpipe 2 0:1" in rows
    rows = shown(render_memory(plan, (2**21, 0)))
    assert {"0 1 MiB 2 MiB -50.0 % 2 MiB", "1 1 MiB 0 B 3 MiB"} <= set(rows)
    old = small_plan((1, 1), 2)
    predicted = {"predicted": {"bounds", "binding", "shares"}}
    assert Plan.model_validate_json(old.model_dump_json(exclude=predicted)) == old
    text = as_text(render(old))
    assert "lower bound" in text
    assert "what binds" not in text
    assert "ranks' time" not in text
    for term, stage in (("update", 2), ("link", 1)):
        text = _plan(BoundPart(term=term, stage=stage, seconds=1.0)).dumps()  # type: ignore[arg-type]
        with pytest.raises(FileError, match=r"\$\.predicted\.binding\[0\]\.stage: "):
            Plan.parse(text, Path("plan.json"))


@pytest.mark.parametrize(
    ("term", "text"),
    [
        ("compute", "computing on stage 0"),
        ("round trip", "round trips of stage 0 with 2 in flight, more than which its memory does not hold"),
        ("link", "messages between stages 0 and 1"),
        ("filling", "filling and draining the pipeline around stage 0"),
        ("synchronisation", "gradient synchronisation of stage 0"),
        ("update", "the update of stage 0"),
        ("overhead", "the step's overhead"),
    ],
)
def test_what_binds_is_named_with_its_part_of_the_bound(term: Term, text: str) -> None:
    update = BoundPart(term="update", stage=1, seconds=0.2)
    plan = _plan(BoundPart(term=term, stage=0, seconds=0.6, full=term == "round trip"), update)
    assert binding_text(plan) == f"{text}: 600 ms of its own bound of 800 ms; then the update of stage 1: 200 ms"
    assert f"what binds: {text}" in as_text(render(plan))


def test_pipelines_of_their_own_and_what_is_priced_and_not_run_are_told_from_plans_of_one() -> None:
    rows = [
        ComparisonRow("autopar", "0-9:6", 4, "1f1b", 0.5, 2**20),
        ComparisonRow("HetPipe", "0-4:1,5-9:1/0-9:1", 1, "1f1b", 0.6, 2**21, waves="NP, in waves of 2"),
        ComparisonRow("GPipe", infeasible="too large"),
        ComparisonRow("servers", None, 4, None, 0.7, 2**21, priced="50 % on one link"),
    ]
    lines = shown(render_comparison(rows, 0.5), 160)
    assert "HetPipe 600 ms +20.0 % 1f1b 1 2 MiB 0-4:1, 5-9:1 / 0-9:1 (NP, in waves of 2)" in lines
    assert "GPipe too large" in lines
    assert "servers 700 ms +40.0 % 4 2 MiB priced, not run (50 % on one link)" in lines
    assert "note: autopar runs no servers of parameters; their steps are priced" in " ".join(lines)
    assert (
        "note: several pipelines (policy wsp) are never flushed, see older weights, and have whole mini-b"
        in " ".join(lines)
    )
    alone = shown(render_comparison(rows[:1], 0.5), 160)
    assert not any("note:" in line for line in alone)
