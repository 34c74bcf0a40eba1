"""Several pipelines of a model, which tell each other what they change wave by wave, train by the rule of wsp."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopar.errors import TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, PULL, PUSH, UPDATE, Fault, Program, RankProgram
from autopar.formats.report import Report
from autopar.options.train import RunOptions, TrainSettings
from autopar.runtime.settings import check_training
from autopar.runtime.start.launch import run
from autopar.schedules.check import ProgramError, check
from autopar.schedules.expand import expand
from autopar.schedules.repetition import written_out
from pooled import eight_ranks
from training_cases import bits, make_case
from wave_cases import OPTIMIZERS, ROWS, SPECIAL, Waves, chain, differs, drawn, planned, slowed

__all__ = ["eight_ranks"]

LAYERS = 5


@pytest.mark.some(7)
@pytest.mark.parametrize("seed", range(300))
def test_training_equals_the_rule(tmp_path: Path, seed: int) -> None:
    special, clipping = SPECIAL[seed % len(SPECIAL)]
    asked, draw = drawn(seed, LAYERS), random.Random(seed)
    recompute = {"0", "2"} if seed % 4 == 0 else False
    plan = planned(chain(tmp_path, OPTIMIZERS[seed % len(OPTIMIZERS)], **special), asked, recompute=recompute)
    check(expand(plan), plan)
    carry = slowed(draw.choice(plan.stages_by_pipeline), draw) if seed % 3 == 0 else None
    steps = asked.least_steps + draw.randint(0, 2 * asked.wave)
    assert differs(tmp_path, plan, steps, carry=carry, **clipping) < 1e-12


NORMALISED = """
import torch
from torch import nn


def model():
    layers = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(6, 6)).double()


def dataset():
    draw = torch.Generator().manual_seed(5)
    return torch.utils.data.TensorDataset(*(torch.randn(480, 6, generator=draw, dtype=torch.float64) for _ in range(2)))


def loss(output, batch):
    return ((output - batch[1]) ** 2).mean()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""


def test_batch_normalisation_has_each_pipelines_statistics(tmp_path: Path) -> None:
    asked = Waves(((2,), ()), ((2, 1), (2,)), 2, 1)
    plan = planned(make_case(tmp_path / "model.py", NORMALISED), asked)
    assert differs(tmp_path, plan, asked.least_steps + 3) < 1e-11


@pytest.mark.slow
@pytest.mark.core
def test_processes_train_by_the_rule_and_end_with_the_same_weights(tmp_path: Path, eight_ranks: Any) -> None:  # noqa: ANN401
    asked = Waves(((2,), (1, 3), ()), ((3, 2), (3, 2, 1), (1,)), 3, 1)
    plan = planned(chain(tmp_path, "adam"), asked)
    assert differs(tmp_path, plan, asked.least_steps + 4, pool=eight_ranks) < 1e-12
    weights = [
        {name.split(": ")[1]: each for name, each in bits(plan, tmp_path).items() if f"parameters-{rank}:" in name}
        for rank in range(len(plan.devices))
    ]
    alone = weights[-1]
    assert all(torch.equal(each, alone[name]) for own in weights for name, each in own.items())


@pytest.mark.some(10)
@pytest.mark.parametrize("seed", range(100))
def test_staleness_reaches_its_bound_and_no_more(tmp_path: Path, seed: int) -> None:
    """Counted action by action, from 1, as the paper does."""
    asked = drawn(seed, LAYERS)
    plan = planned(chain(tmp_path, "sgd"), asked)
    program = written_out(expand(plan), plan, asked.least_steps + seed % 5)
    wave, most = asked.wave, (asked.staleness + 1) * asked.wave + asked.wave - 2
    for rank, actions in enumerate(program.ranks):
        depth = plan.stages[rank].warmup
        updates = taken = pushed = 0
        stalest = behind = ahead = 0
        for action in actions:
            number = action.micro_batch + 1
            updates += action.kind == UPDATE
            if action.kind == PUSH:
                pushed += 1
                assert (number, updates) == (pushed * wave, pushed * wave)
            if action.kind == PULL:
                taken += 1
                assert number == (taken + asked.staleness + 1) * wave
            if action.kind == FORWARD:
                stalest, behind = max(stalest, number - 1 - taken * wave), max(behind, number - 1 - updates)
            ahead = max(ahead, pushed - taken)
        assert (stalest, behind) == (most, depth - 1)
        # What is kept of waves is planned for so many.
        assert ahead == asked.staleness + 1


def test_a_pull_elsewhere_a_missing_push_and_ranks_in_a_ring_are_found(tmp_path: Path) -> None:
    plan = planned(chain(tmp_path, "sgd"), Waves(((2,), ()), ((2, 1), (1,)), 2, 0))
    own = expand(plan)

    def changed(rank: int, change: Any) -> Program:  # noqa: ANN401
        ranks = [list(actions) for actions in own.ranks]
        ranks[rank] = change(ranks[rank])
        return Program(tuple(map(RankProgram.of, ranks)), own.shift)

    def pulled_late(actions: list[Any]) -> list[Any]:
        at = next(at for at, action in enumerate(actions) if action.kind == PULL)
        return [*actions[:at], actions[at + 1], actions[at], *actions[at + 2 :]]

    with pytest.raises(ProgramError, match="stands behind 0 pulls, where wsp has 1"):
        check(changed(2, pulled_late), plan)
    with pytest.raises(ProgramError, match="stands where the plan's own program has PS"):
        check(changed(2, lambda actions: [each for each in actions if each.kind != PUSH]), plan)


REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({}, {"clip_norm": 1.0}, "clip each stage by its own norm"),
    ({}, {"compile": True}, "`compile` takes a flush"),
    ({}, {"sync_batch_norm": True}, "`sync_batch_norm` takes a flush"),
    ({"precision": "fp16"}, {}, "fp16 scales losses"),
    ({"ema_decay": 0.9}, {}, "`ema_decay` averages weights"),
)


@pytest.mark.parametrize(("more", "settings", "said"), REFUSED)
def test_what_takes_a_flush_is_refused(
    tmp_path: Path, more: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    plan = planned(chain(tmp_path, "sgd"), Waves(((), ()), ((1,), (1,)), 1, 0)).model_copy(update=more)
    with pytest.raises(UsageError, match=said):
        check_training(plan, TrainSettings(**settings), share_gpus=False)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"loaders": 2}, "`loaders` read mini-batches that all ranks share"),
        ({"eval_every": 3}, "`eval_every` takes a flush"),
    ],
)
def test_what_several_pipelines_do_not_have_is_refused(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    plan = planned(chain(tmp_path, "sgd"), Waves(((), ()), ((1,), (1,)), 1, 0))
    with pytest.raises(UsageError, match=said):
        run(plan, str(tmp_path / "model.py"), RunOptions(4, **asked))


@pytest.mark.slow
def test_a_rank_holds_of_each_more_wave_what_it_changed_and_the_sum(tmp_path: Path, eight_ranks: Any) -> None:  # noqa: ANN401
    case, held, trained = chain(tmp_path, "momentum"), list[list[int]](), list[int]()
    for staleness in (0, 2):
        asked = Waves(((2,), ()), ((3, 1), (2,)), 3, staleness)
        plan = planned(case, asked)
        arguments = {"plan": plan.dumps(), "model": str(case.file), "workspace": str(case.workspace)}
        arguments |= {"steps": asked.least_steps + 6}
        held.append(eight_ranks.run("rank_jobs:train_pipelines_and_weigh", arguments, ranks=3))
        trained = [sum(8 * each.numel() for layer in own for each in layer.parameters()) for own in _layers(case, plan)]
    assert [more - less for less, more in zip(*held, strict=True)] == [2 * 2 * each for each in trained]


def _layers(case: Any, plan: Any) -> list[list[torch.nn.Module]]:  # noqa: ANN401
    return [[case.graph.layer(name).module for name in stage.layers] for stage in plan.stages]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_stopped_and_resumed_equals_a_run_that_is_drained_at_the_same_waves(tmp_path: Path, optimizer: str) -> None:
    asked = Waves(((2,), ()), ((2, 1), (1,)), 2, 1)
    case = chain(tmp_path, optimizer)
    plan = planned(case, asked).model_copy(update={"precision": "fp32"})
    alone = case.plan([1, 1], 1, ROWS).model_copy(update={"precision": "fp32"})

    def trained(steps: int, name: str, which: Plan = plan, **more: Any) -> Report:  # noqa: ANN401
        how = {"checkpoint": tmp_path / name, "every": 7, "save": tmp_path / f"{name}-weights"}
        return run(which, str(case.file), RunOptions(steps, **how | more)).report

    whole, _ = trained(21, "whole"), trained(14, "stopped")
    rest = trained(21, "stopped", resume=True)
    assert rest.loss == whole.loss[14:]
    one, other = (weights_in(tmp_path / f"{name}-weights") for name in ("whole", "stopped"))
    assert one.keys() == other.keys()
    assert all(torch.equal(each, other[name]) for name, each in one.items())
    # A plan of one pipeline goes on with the first one's moments; and back.
    single = trained(24, "stopped", alone, resume=True)
    assert len(single.loss) == 3
    assert any(
        "the checkpoint's run had 2: of each that it had, the optimizer goes on" in each for each in single.notes
    )
    again = trained(28, "stopped", resume=True)
    assert (len(again.loss), again.loss[-1] < whole.loss[0]) == (4, True)


@pytest.mark.slow
def test_a_rank_that_is_lost_is_named_with_its_pipeline(tmp_path: Path) -> None:
    plan = planned(chain(tmp_path, "sgd"), Waves(((2,), ()), ((2, 1), (1,)), 2, 0))
    options = RunOptions(30, inject_fault=(Fault.parse("kill@2:7:F"),))
    with pytest.raises(TrainingError, match=r"rank 2 .*pipeline 1, stage 2, step 7"):
        run(plan.model_copy(update={"precision": "fp32"}), str(tmp_path / "model.py"), options)
