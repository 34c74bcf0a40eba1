"""Eager pipelines take waves as they come, no later than their staleness admits, and a log has it all repeated."""

import json
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, PULL, PUSH, UPDATE
from autopar.formats.pulls import Fill, PullLog, Taken
from autopar.formats.report import Report
from autopar.options.train import RunOptions
from autopar.policies import most_buffered
from autopar.runtime.messages.staging import StagedTransport
from autopar.runtime.messages.transport import Exchange
from autopar.runtime.start.launch import run
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from autopar.schedules.repetition import written_out
from fake_copies import FakeCopies
from launched import ended, launch, until
from training_cases import bits, same_bits
from wave_cases import OPTIMIZERS, SPECIAL, Waves, chain, differs, drawn, planned, slowed

LAYERS = 5


def log_of(plan: Plan, steps: int, taken: dict[int, list[Taken]]) -> PullLog:
    rows = tuple(tuple(taken[rank]) for rank in range(len(plan.devices)))
    return PullLog.of(plan, [Fill(first_step=0, steps=steps, taken=rows)])


def lateness(plan: Plan, taken: dict[int, list[Taken]]) -> list[int]:
    """Return how many mini-batches of other pipelines those behind a pull miss at most, counted from 1 as HetPipe."""
    assert plan.wave is not None
    every = [(number, count) for rows in taken.values() for number, row in enumerate(rows) for count in row]
    return [(number + 3) * plan.wave - 2 - count * plan.wave for number, count in every]


@pytest.mark.some(7)
@pytest.mark.parametrize("seed", range(300))
def test_an_eager_run_is_the_rule_with_its_log_within_the_staleness_and_replays_bit_by_bit(
    tmp_path: Path, seed: int
) -> None:
    special, clipping = SPECIAL[seed % len(SPECIAL)]
    asked, draw = drawn(seed, LAYERS), random.Random(seed)
    plan = planned(chain(tmp_path, OPTIMIZERS[seed % len(OPTIMIZERS)], **special), asked, eager=True)
    check(expand(plan), plan)
    slow, other = draw.sample(plan.stages_by_pipeline, 2)
    steps, taken = asked.least_steps + draw.randint(0, 2 * asked.wave), dict[int, list[Taken]]()
    carry = slowed(slow, draw)
    assert differs(tmp_path / "eager", plan, steps, carry=carry, taken=taken, case=tmp_path, **clipping) < 1e-12
    assert max(lateness(plan, taken)) <= (asked.staleness + 1) * asked.wave + asked.wave - 2
    log = log_of(plan, steps, taken)
    log.check(plan, Path("pulls.json"))
    again = {rank: list(log.taken_by(rank)[0]) for rank in taken}
    carry = slowed(other, draw)
    assert differs(tmp_path / "replayed", plan, steps, carry=carry, taken=again, case=tmp_path, **clipping) < 1e-12
    assert again == taken
    same_bits(plan, tmp_path / "eager", tmp_path / "replayed")
    first: dict[str, torch.Tensor] = {}
    for key, each in bits(plan, tmp_path / "eager").items():
        if key.startswith("parameters"):
            # All pipelines end with the same ones.
            assert torch.equal(first.setdefault(key.split(": ")[1], each), each)


def random_log(plan: Plan, steps: int, draw: random.Random, *, least: bool = False) -> dict[int, list[Taken]]:
    """Return what pulls may have taken, pipelines going on in a random order; or always as little as they may."""
    assert plan.wave is not None
    assert plan.staleness is not None
    every, waves = range(len(plan.pipelines)), steps // plan.wave
    pushed, taken = [1 for _ in every], {rank: list[Taken]() for rank in range(len(plan.devices))}
    while any(count < waves for count in pushed):
        own = draw.choice([each for each in every if pushed[each] < waves])
        pull, others = pushed[own] - 1, [each for each in every if each != own]
        if any(pushed[each] < pull + 1 - plan.staleness for each in others):
            continue
        for rank in plan.stages_by_pipeline[own]:
            before: Sequence[int] = taken[rank][-1] if taken[rank] else [0 for _ in others]
            lowest = [max(count, pull + 1 - plan.staleness) for count in before]
            most = [low if least else pushed[each] for low, each in zip(lowest, others, strict=True)]
            taken[rank].append(tuple(draw.randint(*pair) for pair in zip(lowest, most, strict=True)))
        pushed[own] += 1
    return taken


@pytest.mark.some(6)
@pytest.mark.parametrize("seed", range(100))
def test_any_log_that_can_be_is_replayed_as_the_rule_has_it(tmp_path: Path, seed: int) -> None:
    """Where pulls took what no run on this machine would have them take, and ranks of a pipeline unlike numbers."""
    asked, draw = drawn(seed, LAYERS), random.Random(seed)
    plan = planned(chain(tmp_path, OPTIMIZERS[seed % len(OPTIMIZERS)]), asked, eager=True)
    steps = asked.least_steps + draw.randint(0, 2 * asked.wave)
    taken = random_log(plan, steps, draw)
    log_of(plan, steps, taken).check(plan, Path("pulls.json"))
    assert differs(tmp_path / "replayed", plan, steps, taken=taken, case=tmp_path) < 1e-12


def test_a_pipeline_that_is_slow_takes_more_than_its_staleness_asks_for(tmp_path: Path) -> None:
    asked = Waves(((2,), ()), ((2, 1), (1,)), 2, 1)
    plan, taken = planned(chain(tmp_path, "adam"), asked, eager=True), dict[int, list[Taken]]()
    differs(tmp_path / "eager", plan, 24, carry=slowed((0, 1), random.Random(0)), taken=taken, case=tmp_path)
    assert any(count > number + 1 - asked.staleness for number, (count,) in enumerate(taken[0]))
    default = planned(chain(tmp_path, "adam"), asked)
    differs(tmp_path / "default", default, 24, case=tmp_path)
    with pytest.raises(AssertionError):
        same_bits(plan, tmp_path / "eager", tmp_path / "default")


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_leader_is_as_far_ahead_as_is_planned_for(staleness: int) -> None:
    """Of two pipelines one takes as little as it may, and goes on when the other one waits for it."""
    leader, pushed, taken, most = 1, 1, 0, 0
    for pull in range(20):
        # Behind its newest push it pulls, and pushes again then.
        while leader - staleness <= pushed:
            leader += 1
        most = max(most, leader - taken)
        taken = max(0, pull + 1 - staleness)
        pushed += 1
    assert most == most_buffered(staleness)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_more_waves_wait_than_are_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """Of a pipeline that takes as little as it may, and is slow."""
    asked, longest = Waves(((2,), ()), ((2, 1), (1,)), 2, staleness), [0]
    plan = planned(chain(tmp_path, "sgd"), asked, eager=True)
    taken = random_log(plan, 40, random.Random(0), least=True)
    put = Exchange.put

    def counted(exchange: Exchange, key: Any, tensor: Any) -> None:  # noqa: ANN401
        put(exchange, key, tensor)
        if key[:2] == (2, 0):
            longest[0] = max(longest[0], exchange._queue(key).qsize())

    monkeypatch.setattr(Exchange, "put", counted)
    differs(tmp_path / "replayed", plan, 40, carry=slowed((0, 1), random.Random(0)), taken=taken, case=tmp_path)
    assert 0 < longest[0] <= most_buffered(staleness) == 2 * staleness + 2


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", range(100))
def test_pulls_come_from_the_second_wave_on(tmp_path: Path, seed: int) -> None:
    """Counted action by action, from 1, as the paper does."""
    asked = drawn(seed, LAYERS)
    plan = planned(chain(tmp_path, "sgd"), asked, eager=True)
    for actions in written_out(expand(plan), plan, asked.least_steps + seed % 5).ranks:
        updates = pushes = pulls = 0
        for action in actions:
            updates += action.kind == UPDATE
            pushes += action.kind == PUSH
            pulls += action.kind == PULL
            if action.kind == PULL:
                assert action.micro_batch + 1 == (pulls + 1) * asked.wave
                # A pipeline that pulls has told others of as many waves.
                assert pushes == pulls
            if action.kind == FORWARD:
                assert pulls == max(0, (action.micro_batch + 1) // asked.wave - 1)


@pytest.mark.slow
def test_the_log_of_a_run_that_was_stopped_goes_on_and_is_replayed_with_checkpoints_or_without(tmp_path: Path) -> None:
    case = chain(tmp_path, "adam")
    plan = planned(case, Waves(((2,), ()), ((2, 1), (1,)), 2, 1), eager=True).model_copy(update={"precision": "fp32"})

    def trained(steps: int | None, name: str, **more: Any) -> Report:  # noqa: ANN401
        return run(plan, str(case.file), RunOptions(steps, save=tmp_path / f"{name}-weights", **more)).report

    log = tmp_path / "pulls.json"
    saved: dict[str, Any] = {"checkpoint": tmp_path / "saved", "every": 7}
    first = trained(14, "eager", pulls=log, **saved)
    assert PullLog.load(log).ends == (7, 14)
    rest = trained(17, "eager", pulls=log, resume=True, **saved)
    assert PullLog.load(log).ends == (7, 14, 17)
    again = trained(None, "replayed", replay=log)
    assert again.loss == (*first.loss, *rest.loss)
    same_weights(tmp_path / "eager-weights", tmp_path / "replayed-weights")
    saved["checkpoint"] = tmp_path / "again"
    assert trained(7, "again", replay=log, **saved).loss == first.loss[:7]
    assert trained(None, "again", replay=log, resume=True, **saved).loss == (*first.loss[7:], *rest.loss)
    same_weights(tmp_path / "eager-weights", tmp_path / "again-weights")
    with pytest.raises(UsageError, match=r"drain pipelines behind step 3, .* `checkpoint`, or pass `every=7`, too"):
        trained(None, "other", replay=log, checkpoint=tmp_path / "other", every=3)
    # Without the log of what was before, it begins where the run goes on.
    other = tmp_path / "other.json"
    more = trained(19, "eager", pulls=other, resume=True, checkpoint=tmp_path / "saved", every=7)
    assert (PullLog.load(other).fills[0].first_step, PullLog.load(other).ends) == (17, (19,))
    assert any("other.json begins with step 17: there was no log" in each for each in more.notes)
    with pytest.raises(UsageError, match=r"behind step 19, and this one goes on behind step 0; leave `replay` out"):
        trained(None, "other", replay=other)


def test_waves_of_devices_with_a_memory_of_their_own_are_the_same(tmp_path: Path) -> None:
    asked, folders = Waves(((2,), (1, 3), ()), ((3, 2), (3, 2, 1), (1,)), 3, 1), (tmp_path / "one", tmp_path / "other")
    plan = planned(chain(tmp_path, "adam"), asked, eager=True)
    for folder in folders:
        taken = random_log(plan, 16, random.Random(3))
        carry = None if folder == folders[0] else lambda transport: StagedTransport(transport, FakeCopies())
        assert differs(folder, plan, 16, carry=carry, taken=taken, case=tmp_path) < 1e-12
    same_bits(plan, *folders)


@pytest.mark.slow
def test_pipelines_of_two_hosts_are_eager_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts waves go through groups, which cannot be asked for what has come."""
    monkeypatch.chdir(tmp_path)
    case = chain(tmp_path, "momentum")
    plan = planned(case, Waves(((2,), (3,)), ((2, 1), (2, 1)), 2, 1), eager=True)
    source = plan.model.model_copy(update={"source": "model.py"})
    plan.model_copy(update={"precision": "fp32", "model": source}).save("plan.json")
    worker = ["-m", "autopar", "--quiet", "worker", "plan.json", "--save"]
    for folder, how in (("eager", ("--steps", "21")), ("replayed", ("--replay", "pulls.json", "--overwrite"))):
        assert [code for code, *_ in ended(launch(4, [*worker, folder, *how], hosts=2))] == [0] * 4
    same_weights(tmp_path / "eager", tmp_path / "replayed")
    (fill,) = PullLog.load("pulls.json").fills
    assert any(count > number for rows in fill.taken for number, (count,) in enumerate(rows))


@pytest.mark.slow
def test_a_run_that_is_told_to_end_leaves_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planned(chain(tmp_path, "momentum"), Waves(((2,), ()), ((2, 1), (1,)), 2, 1), eager=True)
    source = plan.model.model_copy(update={"source": "model.py"})
    plan.model_copy(update={"precision": "fp32", "model": source}).save("plan.json")
    worker = ["-m", "autopar", "--quiet", "worker", "plan.json", "--overwrite", "--save"]
    running = launch(3, [*worker, "eager", "--steps", "100000", "--log-dir", "logs"])
    until(lambda: any(each.stat().st_size for each in Path("logs").glob("*.jsonl")), running=running)
    running[0].send_signal(signal.SIGTERM)
    ended(running)
    report = Report.load("report.json")
    assert PullLog.load("pulls.json").ends == (len(report.loss),)
    assert [code for code, *_ in ended(launch(3, [*worker, "replayed", "--replay", "pulls.json"]))] == [0] * 3
    assert Report.load("report.json").loss == report.loss
    same_weights(tmp_path / "eager", tmp_path / "replayed")


def same_weights(one: Path, other: Path) -> None:
    files = (own.glob("*.safetensors") for own in (one, other))
    found, expected = ({name: each for file in own for name, each in load_file(file).items()} for own in files)
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(each, expected[name]) for name, each in found.items())


DAMAGED: tuple[tuple[Any, str], ...] = (
    (lambda log: log["fills"][0]["taken"][1][2].__setitem__(0, 9), r"\$.fills\[0\].taken\[1\]\[2\]\[0\]: must be "),
    (lambda log: log["fills"][0]["taken"][2].pop(), r"\$.fills\[0\].taken\[2\]: 12 steps have 5 pulls, found 4"),
    (lambda log: log["fills"][0]["taken"].pop(), r"\$.fills\[0\].taken: the plan has 3 ranks, found 2"),
    (lambda log: log["fills"][0]["taken"][0][0].append(1), r"taken\[0\]\[0\]: there are 1 other pipelines, found 2"),
    (lambda log: log.update(plan_sha256="0" * 64), r"\$.plan_sha256: it is the log of another plan"),
    (lambda log: log["fills"].append(log["fills"][0]), r"\$.fills\[1\].first_step: must be 12, found 0"),
    (lambda log: log["fills"][0].update(steps=-1), r"\$.fills\[0\].steps"),
    (lambda log: log.pop("fills"), r"\$.fills"),
)


@pytest.mark.parametrize(("damage", "said"), DAMAGED)
def test_a_damaged_log_is_refused_with_its_file_and_path(tmp_path: Path, damage: Any, said: str) -> None:  # noqa: ANN401
    plan = planned(chain(tmp_path, "sgd"), Waves(((2,), ()), ((2, 1), (1,)), 2, 1), eager=True)
    log = log_of(plan, 12, random_log(plan, 12, random.Random(0)))
    content, path = json.loads(log.dumps()), tmp_path / "pulls.json"
    assert PullLog.parse(log.dumps(), path) == log
    damage(content)
    with pytest.raises(FileError, match=rf"pulls.json: .*{said}"):
        PullLog.parse(json.dumps(content), path).check(plan, path)


def test_a_log_whose_pulls_wait_for_each_other_is_refused(tmp_path: Path) -> None:
    plan = planned(chain(tmp_path, "sgd"), Waves(((), ()), ((1,), (1,)), 1, 1), eager=True)
    ring = {0: [(2,), (2,), (3,)], 1: [(2,), (2,), (3,)]}
    with pytest.raises(FileError, match=r"pulls.json: \$.fills\[0\].taken\[0\]\[0\]\[0\]: waits for a wave that waits"):
        log_of(plan, 4, ring).check(plan, Path("pulls.json"))
