"""Frames for notebooks, and the memory picture, hold what plans say."""

from __future__ import annotations

from autopar.formats.prediction import Alternative
from autopar.report import frames
from autopar.report import plan as memory
from played import small_plan


def test_stages_and_alternatives_hold_what_the_plan_says() -> None:
    plan = small_plan((2, 1), 4).model_copy(
        update={
            "alternatives": (
                Alternative(name="equal split", infeasible="stage 1 needs more"),
                Alternative(name="slow", step_s=2.0),
                Alternative(name="best", step_s=1.0),
            )
        }
    )
    assert frames.stages(plan)["devices"].tolist() == [[0, 1], [2]]
    assert frames.alternatives(plan)["name"].tolist() == ["best", "slow", "equal split"]
    assert frames.alternatives(small_plan((1,), 1)).empty


def test_the_memory_picture_compares_each_stage_with_its_smallest_device() -> None:
    figure = memory.draw_memory(small_plan((2, 1), 4), [2**22, 2**21, 2**22])
    assert [text.get_text() for text in figure.axes[0].texts] == ["1 MiB of 2 MiB (50.0%)", "1 MiB of 4 MiB (25.0%)"]
