"""What is said, or refused, of a run that goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.formats.checkpoint import SavedPlan
from autopar.formats.profile import Writes
from autopar.runtime.checkpoint.resume import check_state, plan_notes

PLAN = SavedPlan(
    sha256="a" * 64, ranks=2, stages=2, schedule="1f1b", micro_batches=2, division=((4,), (4,)), sharded=False,
    precision="fp32", torch="2.13.0",
)  # fmt: skip


def test_python_state_that_a_forward_changes_is_refused_by_name() -> None:
    layers = [SimpleNamespace(name="a", writes=None), SimpleNamespace(name="b", writes=Writes(state=("b.count",)))]
    graph: Any = SimpleNamespace(layers=layers)
    with pytest.raises(UsageError, match=r"layer b changes the Python state b\.count .*register_buffer"):
        check_state(graph)
    layers.pop()
    check_state(graph)


@pytest.mark.reliability(23, 26)
def test_what_another_plan_does_otherwise_is_said() -> None:
    other = PLAN.model_copy(update={"ranks": 3, "schedule": "gpipe", "torch": "2.14.0", "sharded": True})
    said = list(plan_notes(PLAN, other, random=True, batch_norm=True))
    assert said == [
        "goes on with torch 2.14.0; the checkpoint was saved with 2.13.0",
        "goes on with ranks 3; the checkpoint was saved with 2",
        "goes on with schedule gpipe; the checkpoint was saved with 1f1b",
        "goes on with sharding, unlike the checkpoint's run",
    ]


@pytest.mark.parametrize("changed", [{"micro_batches": 4}, {"division": ((2, 2), (4,))}])
def test_layers_that_go_by_the_division_are_said_where_it_has_changed(changed: dict[str, object]) -> None:
    other = PLAN.model_copy(update=changed)
    said = list(plan_notes(PLAN, other, random=True, batch_norm=True))
    assert [each.split(" go on otherwise")[0] for each in said][-2:] == [
        "layers that draw random numbers",
        "batch normalisation",
    ]
    assert not [each for each in plan_notes(PLAN, other, random=False, batch_norm=False) if "otherwise" in each]
