"""Replicas that several ranks run together train as one process would."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.options.train import TrainSettings
from autopar.runtime.job import Job
from autopar.runtime.loss import StepRecord
from autopar.runtime.messages.transport import InProcessTransport, Pending, Transport
from drawn_models import model_case, team_plans
from in_teams import in_teams
from oracles.unflushed import RULES
from policy_cases import differs, planned
from pooled import eight_ranks
from threads import act_in_threads
from training_cases import OPTIMIZERS, STEPS, Case, check, make_case, own_part, text_of

__all__ = ["eight_ranks"]

KINDS = ("double", "float")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("models") / "gpt.py", text_of("gpt", BLOCKS=3))


@pytest.mark.some(3)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("widths", "sizes"),
    [((1,), (2,)), ((2,), (2,)), ((1, 1), (2, 2)), ((1, 1), (1, 2)), ((2, 1), (2, 4)), ((1,), (4,))],
)
def test_training_equals_the_plain_loop(
    widths: Sequence[int], sizes: Sequence[int], sequence: bool, gpt: Case, tmp_path: Path
) -> None:
    plan = in_teams(gpt.graph, gpt.plan(widths, 2, 5), sizes, sequence=sequence)
    assert any(stage.sequence for stage in plan.stages) == sequence
    losses = gpt.train(plan, tmp_path)
    check(plan, gpt.truth(plan), tmp_path, losses)


@pytest.mark.some(3)
@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize(
    ("depths", "micro_batches", "widths", "sizes"),
    [([3, 2, 1], 2, [1, 1, 1], [2, 2, 2]), ([2, 1], 3, [2, 1], [2, 4]), ([3, 1], 2, [1, 2], [1, 2])],
)
def test_training_without_flushes_equals_its_rule(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int, widths: list[int], sizes: list[int]
) -> None:
    plan = planned(tmp_path, "adamw", policy, depths, micro_batches, widths=widths, team_sizes=sizes)
    assert any(stage.cuts for stage in plan.stages)
    assert differs(tmp_path, plan) < 1e-12


class Recorder:
    """A transport that notes what is summed, in order."""

    def __init__(self, inner: Transport, sums: list[tuple[tuple[int, ...], bool, tuple[int, ...]]]) -> None:
        self._inner, self._sums = inner, sums

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        """See :class:`Transport`."""
        self._sums.append((ranks, apart, tuple(tensor.shape)))
        return self._inner.all_reduce(tensor, ranks, apart=apart)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)


def sums_of(name: str, plan: Plan) -> list[list[tuple[tuple[int, ...], bool, tuple[int, ...]]]]:
    """Train two steps in threads; return what every rank has summed, in its order."""
    case = model_case(name)
    sums: list[list[tuple[tuple[int, ...], bool, tuple[int, ...]]]] = [[] for _ in plan.devices]

    def train(job: Job, transport: Transport) -> None:
        for step in range(2):
            job.step(step)
        job.finish()

    def carry(transport: Transport) -> Transport:
        assert isinstance(transport, InProcessTransport)
        return Recorder(transport, sums[transport._rank])  # type: ignore[return-value]

    act_in_threads(plan, case.graph, case.model, case.state, train, carry=carry)
    return sums


def test_blocks_sum_twice_and_norms_have_what_is_added_up_late(tmp_path: Path) -> None:
    case = model_case("narrow_gpt")
    graph = case.graph
    blocks = [at for at, layer in enumerate(graph.layers) if layer.fingerprint == graph.layers[2].fingerprint]
    rows, micro_batches = 3, 2
    alone = case.plan([1, 1, 1], micro_batches, rows, cuts=[blocks[0], blocks[-1] + 1])
    found = sums_of("narrow_gpt", in_teams(graph, alone, [1, 2, 1]))
    (hidden,) = {tensor.sizes for tensor in graph.tensors if tensor.producer == graph.layers[blocks[0]].name}
    for rank in (1, 2):
        own = [shape for ranks, apart, shape in found[rank] if ranks == (1, 2)]
        between = [shape for shape in own if shape == (rows, *hidden)]
        # What it receives is joined as bytes, a tensor and a gradient of each micro-batch.
        assert len(own) - len(between) == 2 * 2 * micro_batches
        assert len(between) == 2 * micro_batches * 4 * len(blocks)
    case, norms = _untied(tmp_path), []
    for sizes in ((1, 1), (2, 2), (2, 4)):
        plan = in_teams(case.graph, case.plan([1, 1], 2, 5), sizes, sequence=sizes != (2, 4))
        records: dict[int, list[StepRecord]] = {}
        case.train(plan, tmp_path / str(sizes), STEPS, TrainSettings(clip_norm=0.05), records)
        norms.append([record.gradient_norm for record in records[0]])
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)
    assert norms[2] == pytest.approx(norms[0], rel=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_of_whole_parameters_are_summed_once_a_step_together(micro_batches: int) -> None:
    """Tensors between layers are in slices, which are gathered and scattered: what is summed are those gradients."""
    case = model_case("narrow_gpt")
    plan = in_teams(case.graph, case.plan([1], micro_batches, 3), [2], sequence=True)
    whole = set(dict(case.model.build(0).named_parameters())) - {cut.parameter for cut in plan.stages[0].cuts}
    summed = sums_of("narrow_gpt", plan)[0]
    numbers = sum(case.state[name].numel() for name in whole)
    # Everything else that is summed belongs to one micro-batch, and is smaller.
    assert [shape for _, _, shape in summed if math.prod(shape) >= numbers] == [(numbers,)] * 2


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=team_plans("narrow_gpt"))
def test_ranks_that_sum_together_do_so_in_one_order(plan: Plan) -> None:
    found = sums_of("narrow_gpt", plan)
    for ranks in {each[:2] for sums in found for each in sums}:
        orders = [[shape for *group, shape in found[rank] if tuple(group) == ranks] for rank in ranks[0]]
        assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("policy", ["stash", "pipemare"])
def test_a_stage_is_clipped_by_the_norm_of_all_its_parts(policy: str, tmp_path: Path) -> None:
    case = _untied(tmp_path)
    alone = case.plan([1, 1], 2, 5, warmup=[1, 1])
    plans = [alone, in_teams(case.graph, alone, (2, 2), sequence=policy == "stash")]
    folders, losses = [tmp_path / "alone", tmp_path / "teams"], []
    more = {"anneal_steps": 3, "synchronous_steps": 1} if policy == "pipemare" else {}
    for at, folder in enumerate(folders):
        deep = zip(plans[at].stages, (2, 1), strict=True)
        stages = tuple(stage.model_copy(update={"warmup": depth}) for stage, depth in deep)
        plans[at] = plans[at].model_copy(update={"stages": stages, "weight_policy": policy, **more})
        losses.append(case.train(plans[at], folder, STEPS, TrainSettings(clip_norm=0.05, clip="stage")))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    for rank in range(4):
        wanted = load_file(folders[0] / f"parameters-{rank // 2}")
        for name, found in load_file(folders[1] / f"parameters-{rank}").items():
            torch.testing.assert_close(found, own_part(plans[1], rank, name, wanted[name]), rtol=1e-9, atol=1e-9)


def _untied(folder: Path) -> Case:
    """Return a narrow GPT whose head has a weight of its own, which stages do not share, stepped by SGD."""
    text = text_of("gpt", OPTIMIZERS["sgd"], BLOCKS=2)
    untied = "found = base.model()\n    found.head.weight = torch.nn.Parameter(found.head.weight.detach().clone())\n"
    return make_case(folder / "untied.py", text.replace("return base.model()", f"{untied}    return found"))


def _of_matrices(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2])


@pytest.mark.parametrize("refused", [True, False])
def test_an_optimizer_that_looks_at_whole_parameters_is_refused_before_training(refused: bool, gpt: Case) -> None:
    functions = {**gpt.model.functions, **({"optimizer": _of_matrices} if refused else {})}
    plan, said = in_teams(gpt.graph, gpt.plan((1,), 2, 5), (2,)), list[str]()

    def attempt(job: Job, transport: Transport) -> None:
        try:
            job.try_optimizer()
        except UsageError as error:
            said.append(str(error))

    act_in_threads(plan, gpt.graph, replace(gpt.model, functions=functions), gpt.state, attempt)
    assert len(said) == (2 if refused else 0)
    assert all(
        "cannot step parts of parameters" in each and "plan with `stages` of one device" in each for each in said
    )


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_in_half_precision_teams_are_as_far_from_exact_gradients_as_one_rank_is(
    precision: Literal["bf16", "fp16"], size: int, sequence: bool, tmp_path: Path
) -> None:
    """They round sums of parts, one rank rounds whole sums: neither equals the other, and neither is the better one."""
    text = text_of("gpt", OPTIMIZERS["sgd"])
    double, case = (make_case(tmp_path / f"{kind}.py", text.replace("double()", f"{kind}()")) for kind in KINDS)
    whole = case.plan([1], 2, 8)
    plan = in_teams(case.graph, whole, [size], sequence=sequence).model_copy(update={"precision": precision})
    losses, exact = case.train(plan, tmp_path), double.truth(whole)
    single = case.truth(whole.model_copy(update={"precision": precision}))
    assert losses == pytest.approx(exact.losses, rel=0.02)
    teams, one, largest = 0.0, 0.0, 0.0
    for rank in range(size):
        for name, gradient in load_file(tmp_path / f"gradients-{rank}").items():
            wanted, other = (own_part(plan, rank, name, each.gradients[name]) for each in (exact, single))
            teams += float((gradient - wanted).square().sum())
            one += float((other - wanted).square().sum())
            largest += float(wanted.square().sum())
    assert 0.5 < math.sqrt(teams / one) < 1.5
    assert math.sqrt(teams / largest) < 0.05


@pytest.mark.parametrize(
    ("optimizer", "micro_batches", "widths", "sizes", "more"),
    [
        ("momentum", 1, [3, 1], [2, 1], {"turns": [0]}),
        ("momentum", 1, [2, 1], [2, 2], {"turns": [0]}),
        ("adamw", 2, [1, 1], [2, 2], {"special": {"FROZEN": (0, 4)}}),
        ("adamw", 2, [1, 1], [2, 2], {"special": {"FROZEN": (0, 1)}}),
    ],
)
def test_teams_that_take_turns_or_have_frozen_layers_equal_the_rule(
    tmp_path: Path, optimizer: str, micro_batches: int, widths: list[int], sizes: list[int], more: dict[str, Any]
) -> None:
    plan = planned(tmp_path, optimizer, "stash", [2, 1], micro_batches, widths=widths, team_sizes=sizes, **more)
    assert any(stage.cuts for stage in plan.stages)
    assert differs(tmp_path, plan) < 1e-12
