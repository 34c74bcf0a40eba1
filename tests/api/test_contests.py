"""Plans compared by running them: with a flush all learn alike, who is stopped goes on, and trouble is in front."""

import json
import signal
import sys
import time
from math import inf
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest

import autopar
from autopar.api.contests import compare_by_running
from autopar.capture.cache.recall import build_and_capture
from autopar.capture.model.source import UserModel, load
from autopar.capture.plain.loop import float64_model, train_plainly
from autopar.errors import FileError, TrainingError, UsageError
from autopar.formats.contest import Contestant, ContestResult, ContestRow
from autopar.formats.plan import Plan
from autopar.hardware.clusters import cluster_named
from autopar.options.contest import ContestOptions
from autopar.options.plan import PlanOptions
from autopar.planner.contestants import contestants
from autopar.progress import no_progress
from autopar.runtime.stage.parameters import first_stages
from autopar.runtime.start import contest as room
from autopar.signals import ends_by_itself, stopping
from calls import Run, refused, well
from profiled import write_profiled
from suite import warm

TOLD = """

def optimizer(parameters, *, delay, replicas):
    if delay:
        raise ValueError("no such delay")
    return torch.optim.SGD(parameters, lr=0.05)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_profiled(tmp_path, "narrow_gpt")
    return tmp_path


def _rows(found: autopar.RunComparison) -> dict[str, ContestRow]:
    return {name: row for row in found.rows for name in row.contestant.name.split(" = ")}


@pytest.mark.core
@pytest.mark.slow
def test_a_plan_a_policy_and_the_plain_loop_are_compared(folder: Path) -> None:
    two: dict[str, Any] = {"gpus": 2, "min_stages": 2}
    plans = {"1f1b": two, "2bw": {**two, "policy": "2bw"}, "plain loop": {"gpus": 1}}
    made = {name: autopar.plan("profile.json", micro_batches=2, **more) for name, more in plans.items()}
    profile, asked, told = (
        autopar.Profile.load("profile.json"),
        ContestOptions(3, 1, results=Path("kept")),
        list[float](),
    )
    every = [Contestant(name, plan, is_plain=name == "plain loop") for name, plan in made.items()]
    every.append(Contestant("nobody", refusal="it fits no memory"))
    found = compare_by_running(every, profile, 0, asked, lambda what, share: told.append(share))
    rows = {row.contestant.name: row for row in found.rows}
    assert found.rows[0].contestant.name == "nobody"
    assert rows["1f1b"].results[0].loss == pytest.approx(rows["plain loop"].results[0].loss, rel=1e-5)
    assert all(row.measured_s and row.measured_bytes for name, row in rows.items() if name != "nobody")
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)
    assert len([*Path("kept").iterdir()]) == 3


@pytest.mark.slow
def test_what_has_a_flush_learns_what_the_plain_loop_learns_and_the_rest_what_its_policy_says(folder: Path) -> None:
    asked: dict[str, Any] = {"gpus": 2, "steps": 5, "seeds": 1, "double": True, "seed": 3}
    found = autopar.compare_runs("profile.json", "cluster.json", **asked, micro_batches=2)
    rows, user, compared = _rows(found), float64_model(load("narrow_gpt.py")), 0
    for name, row in rows.items():
        if row.contestant.plan is None:
            continue
        plan, (result,) = row.contestant.plan, row.results
        if plan.weight_policy in ("sync", "2bw"):
            # Of others, no single process follows the rule where stages share a parameter.
            assert result.loss == pytest.approx(_truth(user, plan.model_copy(update={"seed": 3})), rel=1e-10)
        if plan.weight_policy == "sync" and plan.micro_batches == 2 and {each.shares for each in plan.stages} == {(4,)}:
            assert result.loss == pytest.approx(rows["plain loop"].results[0].loss, rel=1e-10), name
            compared += 1
    assert compared >= 7, compared


_TRUTHS: dict[object, list[float]] = {}


def _truth(user: UserModel, plan: Plan) -> list[float]:
    divided = [
        (layer, at, stage.shares, stage.warmup) for at, stage in enumerate(plan.stages) for layer in stage.layers
    ]
    key = plan.seed, plan.weight_policy, plan.micro_batches, str(divided)
    if key not in _TRUTHS:
        stage_of = first_stages(plan, build_and_capture(user, plan.seed)[1])
        _TRUTHS[key] = train_plainly(user, plan, 5, stage_of=stage_of).losses
    return _TRUTHS[key]


@pytest.mark.slow
def test_more_ranks_than_processors_are_emulated_and_teams_and_what_cannot_be_is_said_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"on": "6xH100", "times_of": "cpu", "steps": 2, "seeds": 1, "loss": 0.1, "shard": "none"}
    there = room.available_bytes()
    most = room.RANK_BYTES * 6
    monkeypatch.setattr(room, "available_bytes", lambda: min(there, most))
    found = autopar.compare_runs("profile.json", **asked)
    rows = _rows(found)
    refused_here = {name for name, row in rows.items() if "emulating 6 ranks takes about" in str(row.trouble)}
    trained = {name: row for name, row in rows.items() if row.trouble is None}
    # Whoever has all six beside their layers is beyond what this host is said to have.
    assert refused_here
    assert "plain loop" in trained
    assert all(row.measured_s is None and row.seconds_to(0.1) is None for row in trained.values())
    monkeypatch.setattr(room, "available_bytes", lambda: there)
    profile = autopar.profile("narrow_gpt.py", 8, device="cpu", budget_s=0.1, tensor=2)
    name, options = "tensor parallelism of 2", PlanOptions(gpus=2, times_of="cpu", micro_batches=2)
    (able,) = (each for each in contestants(profile, cluster_named("2xH100"), options, 2) if name in each.name)
    wide = compare_by_running([able], profile, 0, ContestOptions(2, 1, on="2xH100"), no_progress)
    (team,) = wide.rows
    assert team.trouble is None, team.trouble
    assert team.contestant.plan is not None
    assert team.contestant.plan.stages[0].tensor_parallel == 2
    period_s = team.contestant.plan.predicted.step_s
    assert team.seconds_to(100.0) == period_s


@pytest.mark.slow
def test_who_fails_is_in_front_with_the_reason_and_runs_again_and_others_do_not(folder: Path) -> None:
    write_profiled(folder, "mlp-16")
    text = Path("mlp.py").read_text()
    text = f"import torch\n{text.replace('def optimizer(', 'def untold(')}{TOLD}"
    profile = autopar.profile(_written(text), 16, device="cpu", budget_s=0.1)
    asked: dict[str, Any] = {"gpus": 2, "steps": 2, "seeds": 1, "results": "kept", "micro_batches": 2, "shard": "none"}
    found = autopar.compare_runs(profile, **asked)
    rows = _rows(found)
    failed = {name for name, row in rows.items() if row.trouble and row.contestant.plan is not None}
    assert failed == {"stash", "vertical-sync", "2bw", "predict", "pipemare", "wsp"}
    assert all("no such delay" in str(rows[name].trouble) for name in failed - {"wsp"})
    assert "asks for delay, which is another in every pipeline" in str(rows["wsp"].trouble)
    troubled = [row.trouble is not None for row in found.rows]
    assert troubled == sorted(troubled, reverse=True)
    kept = len([*Path("kept").iterdir()])
    assert kept == sum(row.trouble is None for row in found.rows)
    again = autopar.compare_runs(profile, **asked)
    assert any(f"{kept} of {kept + len(failed)} runs were found in kept" in note for note in again.notes)
    assert {name: row.results for name, row in _rows(again).items()} == {
        name: row.results for name, row in rows.items()
    }
    file = next(iter(Path("kept").iterdir()))
    file.write_text("{")
    with pytest.raises(FileError, match="remove it, and it is measured again"):
        autopar.compare_runs(profile, **asked)
    with pytest.raises(UsageError, match="has no option 'stepz'"):
        autopar.compare_runs(profile, stepz=1)


def _written(text: str) -> str:
    Path("told.py").write_text(text)
    return "told.py"


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_stopped_goes_on_behind_the_last_run_that_ended(run: Run, number: signal.Signals) -> None:
    write_profiled(Path(), "mlp-16")
    words = ["compare", "--run", "--gpus", "2", "--steps", "5", "--seeds", "1", "--micro-batches", "2", "--json"]
    with warm.Popen([sys.executable, "-m", "autopar", *words], stdout=DEVNULL, stderr=DEVNULL) as process:
        while not Path("contests").exists() or len([*Path("contests").glob("*.json")]) < 3:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        code = process.wait(200)
    assert code == (130 if number == signal.SIGINT else -9)
    before = {path: path.read_bytes() for path in Path("contests").glob("*.json")}
    assert len(before) >= 3
    out, err = well(run, *words)
    assert f"{len(before)} of " in err
    assert {path: path.read_bytes() for path in before} == before
    rows = json.loads(out)["rows"]
    assert all(row["trouble"] or [len(each) for each in row["losses"]] == [5] for row in rows)


def test_a_run_that_was_asked_to_end_is_no_result_and_one_that_goes_on_without_a_loss_diverged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "run", lambda *_: _Ended())
    plan = autopar.plan("profile.json", "cluster.json", gpus=2)
    with pytest.raises(TrainingError, match="was asked to end"):
        room.contest(plan, "narrow_gpt.py", None, ContestOptions(4))
    found = room.contest(plan, "narrow_gpt.py", None, ContestOptions(3))
    assert (found.loss, found.diverged) == ((2.0,), "the loss is not finite")
    began = []

    def last_of_its_steps(*_: object, **__: object) -> ContestResult:
        began.append(0)
        with stopping(lambda: True):
            assert ends_by_itself()
        return ContestResult(loss=(1.0,), step_s=1.0, peak_bytes=1)

    monkeypatch.setattr(room, "contest", last_of_its_steps)
    profile = autopar.Profile.load("profile.json")
    with pytest.raises(TrainingError, match="was asked to end; the same call goes on behind the last run"):
        compare_by_running([Contestant(name, plan) for name in "ab"], profile, 0, ContestOptions(1, 1), no_progress)
    assert len(began) == 1


class _Ended:
    class report:  # noqa: N801
        loss = (2.0, inf, 1.0)
        peak_bytes = (1,)

        class step_s:  # noqa: N801
            median = 1.0


@pytest.mark.slow
def test_a_command_shows_writes_and_draws_what_contests_give_and_fails_where_all_do(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profiled(Path(), "mlp-16")
    words, trained = ("compare", "--run", "--gpus", "2", "--steps", "3", "--seeds", "2", "--json"), list[int]()

    def learned(plan: Plan, *_: object, is_plain: bool) -> ContestResult:
        trained.append(plan.seed)
        if plan.weight_policy == "2bw":
            return ContestResult(loss=(5.0,), failure="`micro_batches=1`: too few; pass `policy='stash'`")
        start = 3.0 if is_plain else 4.0
        return ContestResult(loss=(start, 2.0, 1.0), step_s=0.5 if is_plain else 0.25, peak_bytes=100)

    monkeypatch.setattr(room, "contest", learned)
    out, err = well(run, *words, "--loss", "2.6", "--png", "losses.png")
    rows, seeds = json.loads(out)["rows"], sorted(trained)
    assert seeds == sorted([0, 1] * (len(seeds) // 2))
    front = {row["name"]: row for row in rows if row["trouble"]}
    assert list(front) == [row["name"] for row in rows[: len(front)]]
    assert front["2bw"]["losses"] == [[5.0], [5.0]]
    assert "--micro-batches 1: too few; pass --policy stash" in err
    assert rows[-1]["name"] == "plain loop"
    assert [row["seconds_to_loss"] for row in rows[len(front) :]] == [0.75] * (len(rows) - len(front) - 1) + [1.0]
    assert Path("losses.png").read_bytes()[:4] == b"\x89PNG"
    kept = len([*Path("contests").iterdir()])
    assert kept == 2 * (len(rows) - len(front))
    never, _ = well(run, *words, "--loss", "0.5")
    assert {row["seconds_to_loss"] for row in json.loads(never)["rows"]} == {None}
    monkeypatch.setattr(room, "contest", lambda *_, **__: ContestResult(loss=(), failure="no such loss"))
    code, out, err = run(*words, "--results", "others")
    assert code == 5
    assert json.loads(out)["rows"]
    assert "nobody came to a good end" in err.splitlines()[-1]
    assert not Path("others").exists()


def test_what_is_of_plans_that_run_or_are_priced_is_refused_elsewhere(run: Run) -> None:
    write_profiled(Path(), "mlp-16")
    refused(run, 2, "--steps is of plans that are run; pass --run, too", "compare", "--gpus", "2", "--steps", "9")
    refused(run, 2, "--png is of plans that are run; pass --run, too", "compare", "--gpus", "2", "--png", "a.png")
    words = ("compare", "--run", "--gpus", "2")
    refused(run, 2, "--tokens is of plans that are priced", *words, "--tokens", "1T")
    refused(run, 2, "leave out --cluster", *words, "--on", "2xH100", "--cluster", "2xH100")
    Path("a.png").write_text("a picture")
    refused(run, 2, "a.png exists", *words, "--png", "a.png")
