"""Stages whose replicas divide what they hold train as the plain loop does: docs/howto/verify.md, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

import plain
from autopar.capture.batch import model_arguments, named_outputs
from autopar.capture.export import capture
from autopar.capture.plain import train_plainly
from autopar.capture.source import load
from autopar.errors import UsageError
from autopar.formats.plan import Shard
from autopar.formats.program import WEIGHT_BACKWARD
from autopar.planner.costs.memory import Parts, PeakTerms, peak_of
from autopar.ranks.pool import RankPool
from autopar.runtime.settings import TrainSettings
from autopar.runtime.stage.parameters import stages_of_parameters
from autopar.runtime.start.launch import RunOptions, run
from autopar.runtime.start.workspace import Workspace
from autopar.runtime.weights import names, read
from autopar.schedules.expand import expand
from dictated import dictate
from paths import MODELS
from rank_jobs import real
from sharded_cases import Case, make_case, trains_as_plain
from training_cases import EXAMPLES, FILE, NARROW, OPTIMIZERS

LEVELS: tuple[Shard, ...] = ("optimizer", "gradients", "parameters")
MIXED = """
class Mixed(nn.Sequential):
    def narrowed(self):
        self[1].bias.data = self[1].bias.data.float()
        return self


"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name in ("gpt", "resnet"):
        narrow = NARROW[name] | ({"BLOCKS": 3} if name == "gpt" else {})
        text = FILE.format(base=str(EXAMPLES / f"{name}.py"), narrow=narrow, optimizer=OPTIMIZERS["adamw"])
        found[name] = make_case(folder / f"{name}.py", text)
    for name in ("everything", "dropout", "detached", "uneven"):
        found[name] = make_case(folder / f"{name}.py", (MODELS / f"{name}.py").read_text())
    for kind in ("foreach", "fused"):
        text = (MODELS / "everything.py").read_text().replace("lr=1e-2", f"lr=1e-2, {kind}=True")
        found[kind] = make_case(folder / f"{kind}.py", text)
    return found


def test_jobs_in_a_row_do_not_take_each_others_groups_of_ranks(
    cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = cases["foreach"]
    # Ranks 3 and 4 are the second group of the first plan, and the first one of the second.
    for number, widths in enumerate(((1, 2, 2), (1, 1, 1, 2), (1, 2, 2))):
        plan = dictate(case.graph, case.model, widths, 2, 6, shard="parameters")
        folder = tmp_path / str(number)
        folder.mkdir()
        trains_as_plain(pool, case, plan, folder)


@pytest.mark.parametrize(("widths", "recompute"), [((2,), True), ((2, 1), False), ((1, 2), True), ((2, 3), False)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("example", ["gpt", "resnet"])
def test_sharded_stages_train_as_the_plain_loop(
    example: str,
    level: Shard,
    widths: tuple[int, ...],
    recompute: bool,
    cases: dict[str, Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = cases[example]
    plan = dictate(case.graph, case.model, widths, 3, 7, "1f1b", recompute=recompute, shard=level)
    trains_as_plain(pool, case, plan, tmp_path)


@pytest.mark.parametrize("widths", [(2,), (2, 1), (1, 2, 2)])
@pytest.mark.parametrize("level", LEVELS)
def test_tied_parameters_and_token_counts_survive_sharding(
    level: Shard, widths: tuple[int, ...], cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = cases["everything"]
    plan = dictate(case.graph, case.model, widths, 3, 5, "1f1b", shard=level)
    assert bool(plan.tied) == (len(widths) > 1)
    trains_as_plain(pool, case, plan, tmp_path)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_kernels_that_step_all_parameters_at_once_take_divided_and_whole_ones(
    kind: str, cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    plan = dictate(cases[kind].graph, cases[kind].model, (2, 1), 3, 5, "1f1b", shard="parameters")
    trains_as_plain(pool, cases[kind], plan, tmp_path)


def test_a_parameter_without_a_gradient_stays_as_it_is(cases: dict[str, Case], pool: RankPool, tmp_path: Path) -> None:
    case = cases["detached"]
    trains_as_plain(pool, case, dictate(case.graph, case.model, (2,), 2, 4, shard="parameters"), tmp_path)


@pytest.mark.parametrize(
    ("level", "widths", "options"),
    [
        ("optimizer", (2, 1), {}),
        ("gradients", (2, 1), {}),
        ("parameters", (3, 1), {}),
        ("optimizer", (3, 1), {"turns": [0]}),
        ("parameters", (2, 2), {"schedule": "zb-h1"}),
        ("none", (2, 1), {}),
    ],
)
def test_scalars_empty_and_complex_parameters_and_fewer_rows_than_replicas_train_as_in_the_plain_loop(
    level: Shard,
    widths: tuple[int, ...],
    options: dict[str, Any],
    cases: dict[str, Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = cases["uneven"]
    plan = dictate(case.graph, case.model, widths, 3, 5, **{"schedule": "gpipe", **options}, shard=level)
    trains_as_plain(pool, case, plan, tmp_path)


@pytest.mark.parametrize("level", LEVELS)
def test_dropout_is_drawn_as_without_sharding(
    level: Shard, cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = cases["dropout"]
    plan = dictate(case.graph, case.model, (2, 1), 3, 5, "1f1b", cuts=[3], recompute=True, shard=level)
    trains_as_plain(pool, case, plan, tmp_path)


@pytest.mark.parametrize("level", LEVELS)
def test_a_rank_shards_several_stages(level: Shard, cases: dict[str, Case], pool: RankPool, tmp_path: Path) -> None:
    case = cases["dropout"]
    plan = dictate(case.graph, case.model, (2, 2), 4, 4, "interleaved", chunks=2, shard=level)
    trains_as_plain(pool, case, plan, tmp_path)


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize("example", ["everything", "dropout"])
def test_split_backwards_of_replicas_train_as_the_plain_loop(
    example: str, level: Shard, schedule: str, chunks: int, cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = cases[example]
    plan = dictate(case.graph, case.model, (2, 2), 5, 4, schedule, chunks=chunks, shard=level)
    assert any(action.kind == WEIGHT_BACKWARD for actions in expand(plan).ranks for action in actions)
    trains_as_plain(pool, case, plan, tmp_path)


@pytest.mark.parametrize(("widths", "turns"), [((2, 1), [0]), ((2, 3), [0, 1])])
def test_replicas_that_take_unequally_many_turns_divide_the_optimizers_state(
    widths: tuple[int, ...], turns: list[int], cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = cases["dropout"]
    plan = dictate(case.graph, case.model, widths, 5, 3, "gpipe", turns=turns, shard="optimizer")
    trains_as_plain(pool, case, plan, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level", "widths", "options"),
    [
        ("everything", "gradients", (1, 2), {}),
        ("otherwise", "optimizer", (2, 3), {"turns": [0]}),
        ("otherwise", "parameters", (2, 2), {"schedule": "interleaved", "chunks": 2}),
        ("otherwise_listed", "parameters", (2, 1), {}),
    ],
)
def test_sharded_stages_evaluate_as_the_plain_model(
    name: str, level: Shard, widths: tuple[int, ...], options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    user = load(str(MODELS / f"{name}.py"))
    plan = dictate(capture(user, user.build(0)), user, widths, 2, 6, shard=level, **options)
    # A mini-batch, a micro-batch, and a few.
    arguments = {"plan": plan.dumps(), "model": str(MODELS / f"{name}.py"), "samples": [40, 63]}
    parts = pool.run("rank_jobs:train_and_evaluate", {**arguments, "folder": str(tmp_path)}, ranks=len(plan.devices))
    total, count = (sum(each) for each in zip(*parts, strict=True))  # type: ignore[call-overload]
    model = plain.load_file(MODELS / f"{name}.py").model()
    for stage in plan.stages:
        model.load_state_dict(load_file(tmp_path / f"state-{stage.devices[0]}"), strict=False)
    batch = user.load_batch(user.dataset(), range(40, 63))
    with torch.no_grad():
        arguments, named = model_arguments(model.eval(), batch, has_loss=True)
        output = model(*arguments, **named)
        loss = user.loss(output, batch)  # type: ignore[misc]
    assert total / count == pytest.approx(float(loss[0] / loss[1] if isinstance(loss, tuple) else loss), rel=1e-12)
    predicted, outputs = load_file(tmp_path / "predicted"), named_outputs(output)
    assert predicted.keys() == {name for name, value in outputs.items() if value.dim()}
    for name, value in predicted.items():
        torch.testing.assert_close(value, outputs[name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [1e-3])
@pytest.mark.parametrize("name", ["everything", "uneven"])
def test_clipping_counts_every_part_of_a_gradient_once(
    name: str, clip_norm: float, cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = cases[name]
    norms = set()
    every: tuple[Shard, ...] = ("none", *LEVELS)
    for level in every:
        plan = dictate(case.graph, case.model, (1, 2, 2), 3, 5, "1f1b", shard=level)
        arguments = {"plan": plan.dumps(), "model": str(case.file), "workspace": str(case.workspace)}
        found = pool.run("rank_jobs:train_and_clip", {**arguments, "clip_norm": clip_norm}, ranks=5)
        norms |= {f"{norm:.9e}" for norm in found}  # type: ignore[str-bytes-safe]
    assert len(norms) == 1


@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-v", 2)])
def test_a_stages_norm_is_of_all_parts_that_its_replicas_hold(
    level: Shard, schedule: str, chunks: int, cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = cases["uneven"]
    plan = dictate(case.graph, case.model, (1, 2), 3, 6, schedule, chunks=chunks, shard=level)
    arguments = {"plan": plan.dumps(), "model": str(case.file), "workspace": str(case.workspace), "steps": 3}
    settings = {"clip_norm": 1e-3, "clip": "stage"}
    pool.run("rank_jobs:train_and_keep", {**arguments, "folder": str(tmp_path), "settings": settings}, ranks=3)
    stage_of = stages_of_parameters(case.graph, plan)
    truths = [
        train_plainly(case.model, plan, 3, clip_norm=1e-3, clips_stages=each, stage_of=stage_of)
        for each in (True, False)
    ]
    for rank in range(3):
        for name, parameter in load_file(tmp_path / f"parameters-{rank}").items():
            torch.testing.assert_close(parameter, real(truths[0].parameters[name]), rtol=1e-10, atol=1e-12, msg=name)
    assert any(not each.allclose(truths[1].parameters[name]) for name, each in truths[0].parameters.items())


@pytest.mark.slow
def test_a_sharded_stage_holds_what_the_planner_says(pool: RankPool, tmp_path: Path) -> None:
    user = load(str(EXAMPLES / "gpt.py"))
    module = user.build(0)
    graph = capture(user, module)
    Workspace(tmp_path).prepare(user, dictate(graph, user, (1,), 1, 2), None)
    total = sum(parameter.nbytes for parameter in module.parameters())
    largest = max(sum(parameter.nbytes for parameter in layer.module.parameters()) for layer in graph.layers)

    def held(level: Shard) -> int:
        plan = dictate(graph, user, (2,), 2, 4, "1f1b", warmup=[1], shard=level)
        arguments = {"plan": plan.dumps(), "model": str(EXAMPLES / "gpt.py"), "workspace": str(tmp_path)}
        return max(pool.run("rank_jobs:train_and_weigh", arguments, ranks=2))  # type: ignore[type-var, return-value]

    # What there is beside the state: activations, inputs.
    passing = held("none") - 4 * total
    nothing = Parts(*[0] * len(Parts._fields))
    parts = nothing._replace(parameters=total, optimizer=2 * total, gradients=total, largest=largest, peak=passing)
    for level in LEVELS:
        assert peak_of(parts, PeakTerms(2, 1, 2, replicas=2, shard=level)) == pytest.approx(held(level), rel=0.05), (
            level
        )


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2)])
def test_no_sharded_rank_holds_more_than_its_stages_and_a_layer_while_it_reads_and_saves(
    cases: dict[str, Case], pool: RankPool, tmp_path: Path, schedule: str, chunks: int
) -> None:
    case = cases["gpt"]
    plan = dictate(case.graph, case.model, (2,), 2, 4, schedule, chunks=chunks, shard="parameters")
    sizes = [sum(each.nbytes for each in layer.module.parameters()) for layer in case.graph.layers]
    total = sum(parameter.nbytes for parameter in case.model.build(0).parameters())
    arguments = {"plan": plan.dumps(), "model": str(case.file), "workspace": str(case.workspace)}
    found = pool.run("rank_jobs:build_and_save", {**arguments, "folder": str(tmp_path)}, ranks=2)
    for building, between, saving in found:  # type: ignore[misc]
        assert total <= building <= total + max(sizes)
        # What several stages use stays whole, and so does its gradient.
        assert between < 0.6 * total + 2 * sum(tied.bytes for tied in plan.tied)
        assert saving <= between + max(sizes)


@pytest.mark.parametrize(("name", "held"), [("dropout", {"5.bias"}), ("uneven", {"1.gain", "2.nothing", "3.turn"})])
def test_sharded_weights_are_saved_whole(
    name: str, held: set[str], cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = cases[name]
    both: tuple[Shard, ...] = ("none", "parameters")
    for level in both:
        plan = dictate(case.graph, case.model, (2, 1), 3, 5, "1f1b", shard=level)
        run(plan, str(case.file), RunOptions(steps=2, save=tmp_path / level), pool=pool)
    plain_ones, sharded = (read(tmp_path / level, names(tmp_path / level)) for level in both)
    assert plain_ones.keys() == sharded.keys() >= {"0.weight"} | held
    for name, tensor in plain_ones.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=1e-10, atol=1e-10)


def test_a_layer_of_several_types_is_named(cases: dict[str, Case], pool: RankPool, tmp_path: Path) -> None:
    text = (MODELS / "dropout.py").read_text()
    text = text.replace("x + self.drop(", "x + self.bias * self.drop(").replace(").double()", ").double().narrowed()")
    text = text.replace("        self.drop =", "        self.bias = nn.Parameter(torch.ones(8))\n        self.drop =")
    text = text.replace("nn.Sequential(nn.Linear", "Mixed(nn.Linear").replace("def model", MIXED + "def model")
    case = make_case(tmp_path / "mixed.py", text)
    plan = dictate(case.graph, case.model, (2,), 2, 4, shard="parameters")
    with pytest.raises(UsageError, match=r"layer 1 has trained parameters of torch.float32 and torch.float64"):
        run(plan, str(case.file), RunOptions(steps=1), pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "level"), [("Adafactor(parameters)", "parameters"), ("Rprop(parameters)", "optimizer")]
)
def test_an_optimizer_that_cannot_step_parts_is_refused_before_training(
    made: str, level: Shard, pool: RankPool, tmp_path: Path
) -> None:
    text = (MODELS / "dropout.py").read_text().replace("SGD(parameters, lr=0.1, momentum=0.9)", made)
    case = make_case(tmp_path / "whole.py", text)
    plan = dictate(case.graph, case.model, (2, 1), 2, 4, shard=level)
    with pytest.raises(UsageError, match=r"whole.py cannot step stages that are sharded: its step .* `shard='none'`"):
        run(plan, str(case.file), RunOptions(steps=1, save=tmp_path / "saved"), pool=pool)
    assert not (tmp_path / "saved").exists()


def test_what_cannot_be_offloaded_is_refused(cases: dict[str, Case]) -> None:
    case = cases["dropout"]
    options = RunOptions(settings=TrainSettings(cpu_offload=True))
    sharded = dictate(case.graph, case.model, (2,), 2, 4, shard="parameters")
    with pytest.raises(UsageError, match="`cpu_offload`: the plan is for CPUs"):
        run(sharded, str(case.file), options)
    whole = dictate(case.graph, case.model, (2,), 2, 4).model_copy(update={"device_type": "cuda"})
    with pytest.raises(UsageError, match="`cpu_offload`: no stage of the plan is sharded"):
        run(whole, str(case.file), options)


@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_replicas_that_take_turns_do_not_meet_in_layers(level: Shard, cases: dict[str, Case]) -> None:
    case = cases["dropout"]
    with pytest.raises(ValidationError, match="wait for each other in every layer"):
        dictate(case.graph, case.model, (2, 1), 4, 3, "gpipe", turns=[0], shard=level)


def test_sharded_replicas_without_a_micro_batch_are_refused(cases: dict[str, Case]) -> None:
    case = cases["dropout"]
    with pytest.raises(ValidationError, match="3 replicas divide gradients that only 2 make"):
        dictate(case.graph, case.model, (3, 1), 2, 4, "gpipe", turns=[0], shard="optimizer")
