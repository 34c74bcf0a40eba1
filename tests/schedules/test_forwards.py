"""Programs of forwards alone: the training program without its backwards, complete and free of deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.formats.plan import Crossing, Plan, Stage, group_of, layout_of
from autopar.formats.prediction import Prediction
from autopar.formats.profile import ModelSource
from autopar.formats.program import Program, RankProgram
from autopar.schedules import SCHEDULES
from autopar.schedules.check import ProgramError, check
from autopar.schedules.expand import FORWARDS, expand, expand_forwards
from autopar.schedules.route import even_shares

CHUNKS = {"line": 1, "loop": 3, "vee": 2}


def plan_of(schedule: str, widths: list[int], micro_batches: int) -> Plan:
    layout, rows = layout_of(schedule), 4  # type: ignore[arg-type]
    groups, chunks = len(widths), CHUNKS[layout]
    depths = next(iter(SCHEDULES[schedule].warmups(groups, chunks, micro_batches).values()))
    stages = []
    for index in range(groups * chunks):
        group = group_of(layout, index, groups)
        first = sum(widths[:group])
        devices = tuple(range(first, first + widths[group]))
        shares = even_shares(rows, widths[group])
        stages.append(Stage(layers=(f"l{index}",), devices=devices, shares=shares, warmup=depths[index]))
    # A chain, and a tensor that skips a stage.
    reads = [(index, (index + 1,)) for index in range(len(stages) - 1)] + [(0, (2,))] * (len(stages) > 2)
    tensors = [
        Crossing(name=f"t{at}", producer=made, consumers=readers, bytes_per_sample=4, dtype="f32", gradient=True)
        for at, (made, readers) in enumerate(reads)
    ]
    return Plan(
        model=ModelSource(source="model.py", sha256="0" * 64),
        batch=rows * micro_batches,
        precision="fp32",
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=micro_batches,
        micro_batch_size=rows,
        stages=tuple(stages),
        tensors=tuple(tensors),
        predicted=Prediction(step_s=1, lower_bound_s=1, bubble=0, peak_bytes=(0,) * len(stages)),
    )


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    micro_batches=st.integers(1, 6),
)
def test_they_are_the_forwards_of_training_in_its_order_and_end(
    schedule: str, widths: list[int], micro_batches: int
) -> None:
    plan = plan_of(schedule, widths, micro_batches)
    program = expand_forwards(plan)
    check(program, plan, FORWARDS)
    for forwards, whole in zip(program.ranks, expand(plan).ranks, strict=True):
        assert list(forwards) == [action for action in whole if str(action.kind) in ("F", "S", "R")]


def test_a_broken_one_is_refused() -> None:
    plan = plan_of("1f1b", [1, 1], 2)
    first, second = (list(rank) for rank in expand_forwards(plan).ranks)
    for broken, said in (
        ((first[:-1], second), r"rank 0 \(stage 0\): S1@0>1@1 is missing"),
        ((first, [second[1], second[0], *second[2:]]), r"F0@1 stands before R0@1<0@0"),
        (([*first, list(expand(plan).ranks[0])[-1]], second), r"U@0 is not part of the plan"),
    ):
        program = Program(tuple(RankProgram.of(actions) for actions in broken))
        with pytest.raises(ProgramError, match=said):
            check(program, plan, FORWARDS)
