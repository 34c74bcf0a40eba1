"""The schedule file: loaded by torch, and the same as torch's own lowering of what is computed."""

import csv
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _PipelineScheduleRuntime,
)

from autopar.formats.plan import Plan
from autopar.interop.torch_pipelining import computations, orders_of, with_messages
from autopar.schedules import SCHEDULES
from equal_plans import equal_plan, exported, llama_profile, planned, random_equal
from exported_stages import largest_differences
from paths import EXAMPLES

SHARDING = ("UNSHARD", "RESHARD")
"""What torch puts beside computations for FSDP alone."""


def runtime(plan: Plan, micro_batches: int) -> _PipelineScheduleRuntime:
    """Return torch's runtime of a plan's stages, without ranks and modules."""
    count = len(plan.stages)
    same = {"num_stages": count, "group_size": len(plan.groups), "group_rank": 0}
    stages = [SimpleNamespace(**same, stage_index=at, is_last=at == count - 1) for at in plan.groups[0]]
    return _PipelineScheduleRuntime(stages, micro_batches)  # type: ignore[arg-type]


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(text.splitlines()))


def loaded(plan: Plan, micro_batches: int, text: str, how: str, folder: Path) -> list[list[str]]:
    """Return what torch makes of a file."""
    file = folder / "schedule.csv"
    file.write_text(text)
    made = runtime(plan, micro_batches)
    made._load_csv(str(file), format=how)
    order = made.pipeline_order_with_comms
    return [[str(each) for each in order[rank]] for rank in sorted(order)]


@pytest.mark.pairs
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_loads_every_schedule_and_would_have_put_messages_where_they_are(
    schedule: str, groups: int, micro_batches: int, tmp_path: Path
) -> None:
    plan, _ = equal_plan(llama_profile(batch=24), schedule, groups, 1, micro_batches)
    orders = orders_of(plan)
    text = with_messages(orders)
    assert loaded(plan, micro_batches, text, "compute_comms", tmp_path) == rows(text)
    own = loaded(plan, micro_batches, computations(orders), "compute_only", tmp_path)
    own = [[each for each in rank if not each.endswith(SHARDING)] for rank in own]
    assert [sorted(rank) for rank in rows(text)] == [sorted(rank) for rank in own]
    assert stands_still(rows(text)) is None


def stands_still(ranks: list[list[str]]) -> str | None:
    """Return where ranks stand still whose sends and receives wait for each other; None where all reach their ends."""
    left = [list(reversed(rank)) for rank in ranks]
    while any(left):
        ready = {actions[-1]: rank for rank, actions in enumerate(left) if actions}
        moved = [(rank,) for each, rank in ready.items() if "SEND" not in each and "RECV" not in each]
        moved += [(rank, ready[other]) for each, rank in ready.items() if (other := _received(each)) in ready]
        if not moved:
            return ", ".join(ready)
        for rank in {rank for pair in moved for rank in pair}:
            left[rank].pop()
    return None


def _received(send: str) -> str | None:
    match = re.fullmatch("([0-9]+)SEND_([FB])([0-9]+)", send)
    return match and f"{int(match[1]) + (1 if match[2] == 'F' else -1)}RECV_{match[2]}{match[3]}"


def test_random_plans_load_with_replicas_and_turns(tmp_path: Path) -> None:
    for seed in range(25):
        plan, _, _ = random_equal(seed)
        orders = orders_of(plan)
        count = 1 + max(each for own in orders for _, _, each in own)
        assert loaded(plan, count, with_messages(orders), "compute_comms", tmp_path) == rows(with_messages(orders))


@pytest.mark.parametrize(
    ("schedule", "theirs"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B), ("interleaved", ScheduleInterleaved1F1B)]
)
def test_schedules_that_torch_has_compute_in_torchs_order(schedule: str, theirs: type) -> None:
    plan, _ = equal_plan(llama_profile(batch=24), schedule, 4, 1, 8)
    stages = runtime(plan, 8)._stages
    made = theirs(stages if schedule == "interleaved" else stages[0], 8)
    order = made.pipeline_order if schedule == "interleaved" else made._get_pipeline_order()
    shown = [[str(each) for each in rank if each is not None and "REDUCE" not in str(each)] for rank in order.values()]
    # As it is shown, the last rank of torch's 1F1B begins with micro-batch 1, and ends with one that is not there.
    own = rows(computations(orders_of(plan)))
    assert shown[:3] == own[:3]
    assert schedule == "1f1b" or shown == own


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_script_is_told_to_step_under_the_plans_precision(precision: str, dtype: str, tmp_path: Path) -> None:
    files = exported("torch", tmp_path, planned(llama_profile(), "1f1b", 2), precision=precision)
    call = f"planned for {precision}: step under torch.autocast('cpu', torch.{dtype})"
    assert any(call in text.replace("\n# ", "") for text in files)


@pytest.mark.slow
def test_exported_stages_train_as_the_plain_loop_on_four_ranks(tmp_path: Path) -> None:
    before, usual, after = (EXAMPLES / "gpt.py").read_text().partition("192, 4, 128")
    assert usual
    (tmp_path / "gpt.py").write_text(f"{before}16, 2, 8{after}")
    (tmp_path / "exported").mkdir()
    assert max(largest_differences(tmp_path / "gpt.py", tmp_path / "exported", ("zb-v",)).values()) < 1e-9
