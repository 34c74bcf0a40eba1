"""Stages whose replicas divide what they hold train as the plain loop does: docs/howto/verify.md, in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from autopar.capture.plain.loop import train_plainly
from autopar.errors import TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.options.train import RunOptions
from autopar.ownership import Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.weights import read, shapes
from autopar.runtime.stage.parameters import first_stages
from autopar.runtime.start.launch import run
from drawn_models import model_case
from paths import MODELS
from rank_jobs import real
from training_cases import Case, make_case, text_case, text_of, train, trains_as_plain

LEVELS: tuple[Shard, ...] = ("optimizer", "gradients", "parameters")
MIXED = """
class Mixed(nn.Sequential):
    def narrowed(self):
        self[1].bias.data = self[1].bias.data.float()
        return self


"""


def case_of(name: str) -> Case:
    if name in ("gpt", "resnet"):
        return text_case(name, text_of(name, **({"BLOCKS": 3} if name == "gpt" else {})))
    if name in ("foreach", "fused"):
        return text_case(name, (MODELS / "everything.py").read_text().replace("lr=1e-2", f"lr=1e-2, {name}=True"))
    return text_case(name, (MODELS / f"{name}.py").read_text())


PLANS: dict[str, tuple[str, tuple[int, ...], int, int, dict[str, Any]]] = {
    "one stage": ("gpt", (2,), 3, 7, {"recompute": True}),
    "two stages": ("gpt", (2, 1), 3, 7, {}),
    "convolutions": ("resnet", (1, 2), 3, 7, {"recompute": True}),
    "five ranks": ("resnet", (2, 3), 3, 7, {}),
    "counting": ("everything", (2,), 3, 5, {}),
    "tied": ("everything", (2, 1), 3, 5, {}),
    "tied by three": ("everything", (1, 2, 2), 3, 5, {}),
    "kernels for all parameters": ("foreach", (2, 1), 3, 5, {}),
    "fused kernels": ("fused", (2, 1), 3, 5, {}),
    "no gradient": ("detached", (2,), 2, 4, {}),
    "scalars, empty and complex ones": ("uneven", (2, 1), 3, 5, {"schedule": "gpipe"}),
    "fewer rows than replicas": ("uneven", (3, 1), 3, 5, {"schedule": "gpipe"}),
    "uneven halves": ("uneven", (2, 2), 3, 5, {"schedule": "zb-h1"}),
    "uneven turns": ("uneven", (3, 1), 3, 5, {"schedule": "gpipe", "turns": [0]}),
    "drawing": ("dropout", (2, 1), 3, 5, {"cuts": [3], "recompute": True}),
    "several stages a rank": ("dropout", (2, 2), 4, 4, {"schedule": "interleaved", "chunks": 2}),
    "halves": ("everything", (2, 2), 5, 4, {"schedule": "zb-h1"}),
    "halves of several stages": ("dropout", (2, 2), 5, 4, {"schedule": "zb-v", "chunks": 2}),
    "unequally many turns": ("dropout", (2, 1), 5, 3, {"schedule": "gpipe", "turns": [0]}),
    "turns of both": ("dropout", (2, 3), 5, 3, {"schedule": "gpipe", "turns": [0, 1]}),
}
"""Model, replicas, micro-batches, rows, and more."""


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("what", "level"),
    [(what, level) for what, (*_, how) in PLANS.items() for level in (LEVELS if "turns" not in how else LEVELS[:1])],
)
def test_sharded_stages_train_as_the_plain_loop(what: str, level: Shard, pool: RankPool, tmp_path: Path) -> None:
    name, widths, micro_batches, rows, how = PLANS[what]
    plan = case_of(name).plan(widths, micro_batches, rows, **how, shard=level)
    assert bool(plan.tied) == (name in ("everything", "foreach", "fused", "gpt") and len(widths) > 1)
    trains_as_plain(pool, case_of(name), plan, tmp_path)


@pytest.mark.slow
def test_jobs_in_a_row_have_groups_of_their_own_and_save_weights_whole(pool: RankPool, tmp_path: Path) -> None:
    # Ranks 3 and 4 are the second group of the first plan, and the first one of the second.
    for number, widths in enumerate(((1, 2, 2), (1, 1, 1, 2), (1, 2, 2))):
        (folder := tmp_path / str(number)).mkdir()
        trains_as_plain(pool, case_of("foreach"), case_of("foreach").plan(widths, 2, 6, shard="parameters"), folder)
    case = case_of("uneven")
    assert {"1.gain", "2.nothing", "3.turn"} <= case.state.keys()
    _saves_whole(case, case.plan((2, 1), 3, 5, shard="parameters"), pool, tmp_path / "saved")


@pytest.mark.some(4)
@pytest.mark.parametrize("clip", ["model", "stage"])
@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-v", 2)])
def test_gradients_are_clipped_by_the_norm_of_all_parts_that_replicas_hold(
    level: Shard, schedule: str, chunks: int, clip: str, pool: RankPool, tmp_path: Path
) -> None:
    case = case_of("uneven")
    plan = case.plan((1, 2), 3, 6, schedule, chunks=chunks, shard=level)
    train(pool, case, plan, tmp_path, 3, clip_norm=1e-3, clip=clip)
    stage_of = first_stages(plan, case.graph)
    own, common = (
        train_plainly(case.model, plan, 3, clip_norm=1e-3, clips_stages=each, stage_of=stage_of).parameters
        for each in (clip == "stage", clip != "stage")
    )
    for rank in range(3):
        for name, parameter in load_file(tmp_path / f"parameters-{rank}").items():
            torch.testing.assert_close(parameter, real(own[name]), rtol=1e-10, atol=1e-12, msg=name)
    assert any(not each.allclose(common[name]) for name, each in own.items())


@pytest.mark.some(1)
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2)])
def test_no_sharded_rank_holds_more_than_its_stages_and_a_layer_while_it_reads_and_saves(
    pool: RankPool, tmp_path: Path, schedule: str, chunks: int
) -> None:
    case = case_of("gpt")
    plan = case.plan((2,), 2, 4, schedule, chunks=chunks, shard="parameters")
    sizes = [sum(each.nbytes for each in layer.module.parameters()) for layer in case.graph.layers]
    total = sum(parameter.nbytes for parameter in case.model.build(0).parameters())
    arguments = {"plan": plan.dumps(), "model": str(case.file), "workspace": str(case.workspace)}
    found = pool.run("rank_jobs:build_and_save", {**arguments, "folder": str(tmp_path)}, ranks=2)
    for building, between, saving in found:  # type: ignore[misc]
        assert total <= building <= total + max(sizes)
        # What several stages use stays whole, and so does its gradient.
        assert between < 0.6 * total + 2 * sum(tied.bytes for tied in plan.tied)
        assert saving <= between + max(sizes)


def _saves_whole(case: Case, plan: Plan, pool: RankPool, folder: Path) -> None:
    run(plan, str(case.file), RunOptions(steps=2, save=folder), pool=pool)
    truth = case.truth(plan, 2)
    expected = {**truth.parameters, **truth.buffers}
    torch.testing.assert_close(read(folder, shapes(folder)), expected, rtol=1e-10, atol=1e-10)


def test_a_layer_of_several_types_is_named(pool: RankPool, tmp_path: Path) -> None:
    text = (MODELS / "dropout.py").read_text()
    text = text.replace("x + self.drop(", "x + self.bias * self.drop(").replace(").double()", ").double().narrowed()")
    text = text.replace("        self.drop =", "        self.bias = nn.Parameter(torch.ones(8))\n        self.drop =")
    text = text.replace("nn.Sequential(nn.Linear", "Mixed(nn.Linear").replace("def model", MIXED + "def model")
    case = make_case(tmp_path / "mixed.py", text)
    with pytest.raises(UsageError, match=r"layer 1 has trained parameters of torch.float32 and torch.float64"):
        run(case.plan((2,), 2, 4, shard="parameters"), str(case.file), RunOptions(steps=1), pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "level"), [("Adafactor(parameters)", "parameters"), ("Rprop(parameters)", "optimizer")]
)
def test_an_optimizer_that_cannot_step_parts_is_refused_before_training(
    made: str, level: Shard, pool: RankPool, tmp_path: Path
) -> None:
    text = f"{(MODELS / 'dropout.py').read_text()}\ndef optimizer(parameters): return torch.optim.{made}\n"
    case = make_case(tmp_path / "whole.py", text)
    plan = case.plan((2, 1), 2, 4, shard=level)
    with pytest.raises(UsageError, match=r"whole.py cannot step stages that are sharded: its step .* `shard='none'`"):
        run(plan, str(case.file), RunOptions(steps=1, save=tmp_path / "saved"), pool=pool)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("widths", "micro_batches", "level", "said"),
    [
        ((2, 1), 4, "gradients", "wait for each other in every layer"),
        ((2, 1), 4, "parameters", "wait for each other in every layer"),
        ((3, 1), 2, "optimizer", "3 replicas divide gradients that only 2 make"),
    ],
)
def test_replicas_that_take_turns_divide_what_all_of_them_have(
    widths: tuple[int, ...], micro_batches: int, level: Shard, said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        model_case("dropout").plan(widths, micro_batches, 4, "gpipe", turns=[0], shard=level)
    case, options = model_case("dropout"), RunOptions(cpu_offload=True)
    with pytest.raises(UsageError, match="`cpu_offload`: the plan is for CPUs"):
        run(case.plan((2,), 2, 4, shard="parameters"), str(case.file), options)


def _deciding(
    folder: Path, kind: str, signs: tuple[int, int], level: Shard, turns: Sequence[int] = (), micro_batches: int = 4
) -> tuple[Case, Plan]:
    """Return a model whose listed modules decide which parameters they use, and a plan that divides these."""
    text = (MODELS / "deciding.py").read_text().replace('KIND = "extra"', f'KIND = "{kind}"')
    case = make_case(folder / f"{kind}.py", text.replace("SIGNS = (1, 1)", f"SIGNS = {signs}"))
    # Of modules that decide, none is behind the cut, where one might let no gradient through.
    return case, case.plan((2, 1), micro_batches, 2, "gpipe", cuts=[3], shard=level, turns=turns)


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "kind"),
    [("optimizer", "other"), ("gradients", "other"), ("parameters", "extra"), ("parameters", "layer")],
)
def test_replicas_that_disagree_end_the_run_and_name_a_parameter(
    level: Shard, kind: str, pool: RankPool, tmp_path: Path
) -> None:
    # In a step of several, each replica reaches all parameters in one micro-batch or another.
    case, plan = _deciding(tmp_path, kind, (1, -1), level, micro_batches=1 if level == "optimizer" else 4)
    said = r"the backward of a micro-batch reaches \d\.(extra|other|always)\.\w+ on some replicas of its stage and not"
    with pytest.raises(TrainingError, match=said):
        run(plan, str(case.file), RunOptions(steps=1), pool=pool)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("level", "kind", "turns"), [("optimizer", "other", [0]), ("gradients", "other", []), ("parameters", "layer", [])]
)
def test_replicas_that_agree_train_as_the_plain_loop(
    level: Shard, turns: list[int], kind: str, pool: RankPool, tmp_path: Path
) -> None:
    _saves_whole(*_deciding(tmp_path, kind, (1, 1), level, turns), pool, tmp_path / "saved")
