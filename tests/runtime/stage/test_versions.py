"""Versions of weights take the memory that is planned for them; what would see another version is refused by name."""

from pathlib import Path

import pytest

from autopar.errors import AutoparError, UsageError
from autopar.formats.plan import Plan
from autopar.policies import POLICIES
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Transport
from oracles.unflushed import SAME_BACKWARD
from paths import MODELS
from policy_cases import ROWS, differs, planned
from threads import act_in_threads
from training_cases import make_case


def _kept_bytes(versions: object) -> int:
    """Return what earlier versions, predictions and corrections take."""
    every = [*getattr(versions, "_earlier", {}).values()]
    every += (getattr(versions, name, []) for name in ("_predicted", "_corrected", "_differences"))
    return sum(each.nbytes for memories in every for each in memories)


def _taken(folder: Path, plan: Plan, steps: int) -> dict[int, tuple[float, float]]:
    """Train; return how often ranks keep the weights at most and in the end, by rank."""
    case, taken = make_case(folder / "model.py"), dict[int, tuple[float, float]]()

    def train(job: Job, transport: Transport) -> None:
        most, trained = 0, sum(each.nbytes for each in job.parameters.values())
        for step in range(-plan.lead, steps):
            job.step(step, steps)
            most = max(most, _kept_bytes(job.versions))
        job.finish()
        taken[job.rank] = most / trained, _kept_bytes(job.versions) / trained

    act_in_threads(plan, case.graph, case.model, case.state, train)
    return taken


@pytest.mark.parametrize(("policy", "kept"), [("stash", [1, 1, 0]), ("vertical-sync", [1, 1, 1]), ("2bw", [1, 1, 0])])
def test_versions_take_what_is_kept_and_no_more(tmp_path: Path, policy: str, kept: list[int]) -> None:
    # The last stage updates when all that see the version before are done.
    plan = planned(tmp_path, "sgd", policy, [5, 3, 1], 4)
    assert _taken(tmp_path, plan, 12) == {rank: (often, often) for rank, often in enumerate(kept)}


def test_predictions_take_the_planned_memory_and_parts_of_weights_are_refused(tmp_path: Path) -> None:
    plan = planned(tmp_path, "momentum", "predict", [3, 2, 1], 1, ahead="xpipe")
    # The first stages' backwards see the newest.
    for rank, (_, kept) in _taken(tmp_path, plan, 9).items():
        assert kept == POLICIES["predict"].buffers(plan.depths[rank]) == (2 if rank == 2 else 1)
    text = (MODELS / "conjugated.py").read_text()
    (tmp_path / "conjugated.py").write_text(text.replace("z @ self.weight ", "z @ self.weight.conj() "))
    case = make_case(tmp_path / "conjugated.py")
    plan = case.plan([1], 2, ROWS).model_copy(update={"weight_policy": "stash"})
    with pytest.raises(AutoparError, match=r"conjugated or negated .*; plan with `policy='sync'`"):
        case.train(plan, tmp_path, 2)
    plan = planned(tmp_path, "momentum", "stash", [3, 2, 1], 2, model="keeping", special={"PART": True})
    with pytest.raises(AutoparError, match=r"function Product keeps a part of a parameter .*save_for_backward\(\)"):
        differs(tmp_path, plan)


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
def test_an_optimizer_whose_steps_are_not_known_is_refused(tmp_path: Path, optimizer: str) -> None:
    with pytest.raises(
        UsageError, match=r"predict knows the next steps of .*, and not of this SGD; plan with `policy="
    ):
        differs(tmp_path, planned(tmp_path, optimizer, "predict", [3, 2, 1], 2))


@pytest.mark.some(3)
@pytest.mark.parametrize("policy", SAME_BACKWARD)
@pytest.mark.parametrize(("depths", "micro_batches"), [([3, 2, 1], 2), ([5, 3, 1], 4)])
def test_listed_modules_may_keep_weights_themselves_or_run_again(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int
) -> None:
    plan = planned(tmp_path, "momentum", policy, depths, micro_batches, model="keeping")
    assert differs(tmp_path, plan) < 1e-12
