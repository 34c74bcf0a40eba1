"""Communicators are made before the first step, all that it uses, and in an order that no ranks wait in a ring for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import SEND, SEND_GRADIENT
from autopar.runtime.messages.staging import directions, warm_up
from autopar.runtime.messages.transport import Pending, reducing_groups, team_groups
from autopar.runtime.settings import check_sharing
from autopar.schedules.expand import expand
from dictated import dictate
from drawn_models import captured, plans, team_plans

Communicator = tuple[str, tuple[int, ...]]


class Noted:
    """A transport that notes which communicators a rank uses, in order."""

    def __init__(self, rank: int) -> None:
        self.used: list[Communicator] = []
        self._rank = rank

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._use("message", (self._rank, peer))

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._use("message", (peer, self._rank))

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        return self._use("apart" if apart else "reduction", ranks)

    def _use(self, kind: str, ranks: tuple[int, ...]) -> Pending:
        self.used.append((kind, ranks))
        return Made()


class Made:
    def wait(self) -> None:
        return


def made(plan: Plan, apart: list[tuple[int, ...]]) -> set[Communicator]:
    """Return what ranks make that wait for each other where one is made, until none can go on."""
    left = []
    for rank in range(len(plan.devices)):
        noted = Noted(rank)
        warm_up(noted, plan, rank, torch.device("cpu"), apart)  # type: ignore[arg-type]
        left.append(noted.used)
    found: set[Communicator] = set()
    while any(left):
        heads = {used[0] for used in left if used}
        ready = [(kind, ranks) for kind, ranks in heads if all(left[rank][:1] == [(kind, ranks)] for rank in ranks)]
        assert ready, f"ranks wait in a ring: {heads}"
        for each in ready:
            found.add(each)
            for rank in each[1]:
                left[rank].pop(0)
    return found


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans("everything"))
def test_all_that_a_program_uses_is_made_and_nothing_else(plan: Plan) -> None:
    sent = {
        (rank, action.peer)
        for rank, actions in enumerate(expand(plan).ranks)
        for action in actions
        if action.kind in (SEND, SEND_GRADIENT)
    }
    assert set(directions(plan)) == sent
    groups = reducing_groups(plan)
    expected = {("message", pair) for pair in sent} | {("reduction", group) for group in groups}
    assert made(plan, groups[:1]) == expected | {("apart", group) for group in groups[:1]}


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(plan=team_plans("everything"))
def test_all_that_teams_use_is_made_too(plan: Plan) -> None:
    groups = {("reduction", group) for group in (*reducing_groups(plan), *team_groups(plan))}
    assert made(plan, []) == {("message", pair) for pair in directions(plan)} | groups


def test_cpus_are_not_asked_to_share_gpus() -> None:
    model, graph, _ = captured("everything")
    with pytest.raises(UsageError, match="`share_gpus`: the plan is for CPUs"):
        check_sharing(dictate(graph, model, (1, 1), 2, 4))
