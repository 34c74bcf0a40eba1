"""What faults cost in virtual time, against the simulated timeline."""

from __future__ import annotations

import pytest

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import SLOWER_S, parse_faults
from autopar.planner import PlanOptions, action_prices, plan, simulate
from autopar.runtime.rehearsal.steps import Rehearsal, rehearse_steps
from random_problems import gpt_profile, local_cluster

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
