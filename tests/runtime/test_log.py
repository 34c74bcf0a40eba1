"""Logs: a line of JSON a step, events for TensorBoard where it is, and the same numbers as in metrics and reports."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autopar
from autopar.errors import FileError, UsageError
from autopar.options.train import RunOptions
from autopar.ranks.pool import RankPool
from autopar.runtime.log import LINES, FileLog, scalars
from autopar.runtime.start.launch import run
from labelled import loss, sgd
from script_jobs import batches, make_model, script_plan
from words_plans import copy_model, save_plan

EVENTS: list[tuple[Any, ...]] = []


class Writer:
    """Stands for TensorBoard's."""

    def __init__(self, folder: str) -> None:
        EVENTS.append(("open", folder))

    def add_summary(self, summary: "Summary", step: int) -> None:
        EVENTS.extend((step, each.tag, each.simple_value) for each in summary.value)

    def close(self) -> None:
        EVENTS.append(("close",))


class Summary(SimpleNamespace):
    Value = SimpleNamespace


@pytest.fixture(params=[False, True], ids=["alone", "with TensorBoard"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is TensorBoard."""
    EVENTS.clear()
    modules: dict[str, Any] = {
        "tensorboard.compat.proto.summary_pb2": SimpleNamespace(Summary=Summary),
        "torch.utils.tensorboard": SimpleNamespace(FileWriter=Writer),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module if request.param else None)
    return bool(request.param)


def entries(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / LINES).read_text().splitlines()]


def test_files_have_every_entry_and_a_second_run_writes_behind_the_first(installed: bool, tmp_path: Path) -> None:
    first = {"step": 0, "loss": math.inf, "losses": {"words": 1.5, "pairs": math.nan}, "learning_rates": [0.1, 0.2]}
    second = {"step": 1, "evaluation": {"loss": 0.5}}
    for entry in (first, second):
        log = FileLog(tmp_path / "logs")
        log(entry)
        log.close()
        assert log.notes == (
            []
            if installed
            else [
                f"{tmp_path}/logs/{LINES}: tensorboard is not installed; "
                "`pip install tensorboard` to have its files, too"
            ]
        )
    nulls = {**first, "loss": None, "losses": {"words": 1.5, "pairs": None}}
    assert entries(tmp_path / "logs") == [nulls, second]
    assert not installed or [each for each in EVENTS if len(each) == 3][-2:] == [
        (0, "learning_rates/1", 0.2),
        (1, "evaluation/loss", 0.5),
    ]
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot write logs into .*file"):
        FileLog(tmp_path / "file")


def test_a_script_is_told_of_steps_evaluations_and_checkpoints_and_logs_them(installed: bool, tmp_path: Path) -> None:
    told, logged, steps = list[tuple[str, Any]](), list[dict[str, Any]](), batches(3)
    with autopar.materialize(make_model(), script_plan([1]), loss=loss, optimizer=sgd) as job:
        job.on("step", lambda metrics: told.append(("step", metrics)))
        # Between steps, a function may call the job.
        job.on("step", lambda metrics: job.evaluate(steps[0]) if metrics.step == 1 else None)
        job.on("evaluation", lambda *what: told.append(("evaluation", what)))
        job.on("checkpoint", lambda *what: told.append(("checkpoint", what)))
        job.log_with(logged.append)
        with pytest.raises(UsageError, match="there is no event 'epoch'; events are step, evaluation, checkpoint"):
            job.on("epoch", print)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"`log_with\('wandb'\)`: give 'tensorboard' or a function"):
            job.log_with("wandb")  # type: ignore[arg-type]
        if installed:
            job.log_with("tensorboard", tmp_path / "logs")
        else:
            with pytest.raises(UsageError, match="tensorboard is not installed; `pip install tensorboard`"):
                job.log_with("tensorboard", tmp_path / "logs")
        metrics = [job.step(batch) for batch in steps]
        job.save(tmp_path / "saved")
    assert [event for event, _ in told] == ["step", "step", "evaluation", "step", "checkpoint"]
    assert [what for event, what in told if event == "step"] == metrics
    ((evaluated_after, evaluated),) = [what for event, what in told if event == "evaluation"]
    assert (evaluated_after, told[-1]) == (2, ("checkpoint", (3, None)))
    assert [entry["step"] for entry in logged] == [0, 1, 2, 2, 3]
    assert [entry["loss"] for entry in logged if "loss" in entry] == [each.loss for each in metrics if each is not None]
    assert logged[0]["seconds"] == {cause: each for cause, each in told[0][1].seconds.items() if each}
    assert [entry["evaluation"] for entry in logged if "evaluation" in entry] == [{"loss": evaluated}]
    if installed:
        assert entries(tmp_path / "logs") == logged
        assert [each for each in EVENTS if len(each) == 3] == [
            (entry["step"], *scalar) for entry in logged for scalar in scalars(entry)
        ]
        assert EVENTS[-1] == ("close",)


@pytest.mark.parametrize(
    ("widths", "how"), [([1, 2], {}), ([2], {"clip_norm": 1.0}), ([2, 1], {"policy": "stash"})], ids=str
)
@pytest.mark.some(2)
def test_a_run_logs_what_its_report_has(
    widths: list[int], how: dict[str, Any], pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    policy = how.pop("policy", "sync")
    plan = save_plan(tmp_path, widths, "words", 4, cuts=[1, 2, 3][: len(widths) - 1])
    plan = plan.model_copy(update={"weight_policy": policy})
    # Ranks work in another folder.
    options = RunOptions(steps=5, log_dir=Path("logs"), **how)
    report = run(plan, str(tmp_path / "words.py"), options, pool=pool).report
    found = entries(tmp_path / "logs")
    assert [entry["step"] for entry in found] == list(range(5))
    assert [entry["loss"] for entry in found] == pytest.approx(report.loss, rel=1e-12)
    assert [entry.get("gradient_norm") for entry in found] == list(report.gradient_norm or [None] * 5)
    assert all(entry["seconds"]["forwards"] > 0 and entry["learning_rates"] for entry in found)
    said = any("tensorboard is not installed" in note for note in report.notes)
    assert said != bool(list((tmp_path / "logs").glob("events.*")))
