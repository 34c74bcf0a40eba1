"""What is recomputed runs once more, as late as memory asks or as early as waiting allows, and is held no longer."""

import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.runtime.messages.mailbox import Mailbox
from autopar.runtime.stage.stage import Pass, Segment, WrittenTensors
from autopar.schedules.expand import expand
from dictated import dictate
from drawn_models import captured
from edits import split
from threads import train_in_threads


def recorded(plan: Plan, program: Program | None = None) -> list[tuple[object, ...]]:
    """Train one step of dropout's model; return forwards and waits of the first rank, in order."""
    model, graph, state = captured("dropout")
    calls: list[tuple[object, ...]] = []
    inner_run, inner_receive, inner_backward = Segment.run, Mailbox.receive, Pass.backward

    def run(self: Segment, *arguments: object, again: WrittenTensors | None = None) -> object:
        calls.append(("forward" if again is None else "again", self.outputs))
        return inner_run(self, *arguments, again=again)  # type: ignore[arg-type]

    def receive(self: Mailbox, position: int) -> None:
        calls.append(("wait", self._actions[position].kind))
        inner_receive(self, position)

    def backward(self: Pass, given: dict[str, torch.Tensor]) -> None:
        calls.append(("backward", self._segment.outputs))
        inner_backward(self, given)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Segment, "run", run),
        patch.object(Mailbox, "receive", receive),
        patch.object(Pass, "backward", backward),
    ):
        train_in_threads(plan, graph, model, state, Path(folder), 1, program=program)
    return calls


@pytest.mark.parametrize("halved", [False, True])
def test_a_recomputed_layer_runs_twice_whatever_its_backward_is_divided_into(halved: bool) -> None:
    model, graph, _ = captured("dropout")
    plan = dictate(graph, model, (1,), micro_batches=3, rows=2, recompute=True)
    calls = recorded(plan, split(expand(plan), 0) if halved else None)
    forwards = [outputs for kind, outputs in calls if kind == "forward"]
    again = [outputs for kind, outputs in calls if kind == "again"]
    assert sorted(forwards) == sorted(again)
    assert len(forwards) == 3 * len(graph.layers)


def test_the_last_layer_is_recomputed_before_its_rank_waits_for_the_gradient() -> None:
    model, graph, _ = captured("dropout")
    plan = dictate(graph, model, (1, 1), micro_batches=2, rows=2, recompute=True)
    own = set(plan.stages[0].layers)
    outputs = {name for layer in graph.layers if layer.name in own for name in layer.outputs}
    last = tuple(name for name in graph.layer(plan.stages[0].layers[-1]).outputs)
    calls = [
        call
        for call in recorded(plan)
        if call == ("wait", "RG") or (call[0] != "wait" and outputs.issuperset(call[1]))  # type: ignore[arg-type]
    ]
    backs = calls[calls.index(("again", last)) :]
    assert backs[:3] == [("again", last), ("wait", "RG"), ("backward", last)]
    # Its other layers wait for their turn: only one is whole at a time.
    kinds = [kind for kind, _ in backs[: 2 * len(own) + 1]]
    assert kinds == ["again", "wait", "backward", *["backward", "again"] * (len(own) - 1)]
