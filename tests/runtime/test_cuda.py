"""On a GPU, training gives what the plain loop gives there; several ranks may share it."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autopar.errors import TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.options.train import RunOptions
from autopar.profiler.device import _workspace_bytes
from autopar.ranks.pool import RankPool
from autopar.runtime.device import Copies
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.start.launch import run
from autopar.runtime.start.workspace import Workspace
from autopar.schedules.expand import expand
from in_teams import in_teams
from oracles.unflushed import RULES
from paths import HARNESS, MODELS
from policy_cases import differs, planned
from threads import own
from training_cases import STEPS, Case, check, make_case, text_of, train

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU, and torch finds none")
RANKS = 4
ENDLESS = """
import torch
def model(): return torch.nn.Linear(3, 1)
def dataset(): return torch.utils.data.TensorDataset(torch.full((8, 3), float("inf")), torch.zeros(8, 1))
def loss(output, batch): return (output - batch[1]).square().mean()
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.fixture(scope="module", autouse=True)
def harness() -> Iterator[None]:
    """Let ranks import what tests have them run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def pool(harness: None) -> Iterator[RankPool]:
    """Ranks on one GPU each where there are enough, which NCCL then connects; else they share."""
    with RankPool(RANKS, device_type="cuda", share_gpus=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("models")
    texts = {name: text_of(name) for name in ("gpt", "resnet", "mlp")}
    texts["dropout"] = (MODELS / "dropout.py").read_text()
    return {name: make_case(folder / f"{name}.py", text) for name, text in texts.items()}


def _on_gpu(plan: Plan) -> Plan:
    return plan.model_copy(update={"device_type": "cuda"})


def _trains_as_plain(pool: RankPool, case: Case, plan: Plan, folder: Path) -> None:
    losses = train(pool, case, _on_gpu(plan), folder)
    check(plan, case.truth(plan, device="cuda"), folder, losses)


@pytest.mark.parametrize("example", ["gpt", "resnet"])
@pytest.mark.parametrize(
    ("widths", "schedule", "chunks"),
    [
        ((1,), "gpipe", 1),
        ((2,), "1f1b", 1),
        ((1, 1), "1f1b", 1),
        ((1, 2), "1f1b", 1),
        ((1, 1), "interleaved", 2),
        ((1, 1, 1, 1), "zb-h1", 1),
    ],
)
def test_training_equals_the_plain_loop_on_the_gpu(
    example: str,
    widths: tuple[int, ...],
    schedule: str,
    chunks: int,
    cases: dict[str, Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = cases[example]
    _trains_as_plain(pool, case, case.plan(widths, 3, 7, schedule, chunks=chunks), tmp_path)


@pytest.mark.parametrize("recompute", [False, True])
def test_random_layers_draw_on_the_gpu_what_a_seeded_loop_draws(
    recompute: bool, cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    plan = cases["dropout"].plan((1, 2), 3, 5, cuts=[3], seed=3, recompute=recompute)
    _trains_as_plain(pool, cases["dropout"], plan, tmp_path)


@pytest.mark.parametrize("name", ["gpt", "dropout"])
@pytest.mark.parametrize(("widths", "sizes"), [([1], [2]), ([1, 1], [2, 1]), ([1], [4]), ([2], [2])])
def test_teams_train_and_draw_on_the_gpu_as_one_rank_does(
    widths: list[int], sizes: list[int], name: str, cases: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case, sequence = cases[name], name == "gpt" and len(widths) == 1
    plan = in_teams(case.graph, case.plan(widths, 3, 7, seed=3), sizes, sequence=sequence)
    assert any(stage.cuts for stage in plan.stages)
    _trains_as_plain(pool, case, plan, tmp_path)


WIDTHS: dict[str, tuple[list[int], int, list[int]]] = {
    "alone": ([3, 2, 1], 2, [1, 1, 1]), "replicated": ([2, 1], 3, [2, 2]), "in turn": ([2, 1], 1, [3, 1]),
}  # fmt: skip
"""Depths, micro-batches and replicas."""


@pytest.mark.parametrize(
    ("policy", "how"), [*((policy, how) for how in ("alone", "replicated") for policy in RULES), ("stash", "in turn")]
)
def test_training_without_flushes_equals_its_rule(policy: str, how: str, pool: RankPool, tmp_path: Path) -> None:
    depths, micro_batches, widths = WIDTHS[how]
    turns = (0,) if how == "in turn" else ()
    plan = _on_gpu(planned(tmp_path, "adamw", policy, depths, micro_batches, widths=widths, turns=turns))
    assert differs(tmp_path, plan, pool=pool) < 1e-12


def test_a_run_reports_what_carried_its_tensors_and_times_of_the_device(cases: dict[str, Case]) -> None:
    case = cases["mlp"]
    plan = _on_gpu(case.plan((1, 1), 3, 7))
    outcome = run(plan, str(case.file), RunOptions(steps=STEPS, share_gpus=True, loaders=2))
    assert outcome.report.loss == pytest.approx(case.truth(plan, device="cuda").losses, rel=1e-12)
    assert outcome.report.backend == ("nccl" if GPUS > 1 else "gloo")
    assert ("ranks share GPUs" in " ".join(outcome.report.notes)) == (GPUS == 1)
    assert outcome.report.peak_kind == "allocated"
    assert all(outcome.report.peak_bytes)
    assert 0 < outcome.report.step_s.p10 <= outcome.report.step_s.p90 < 60
    assert all(0 <= event.start_s <= event.end_s for event in outcome.timeline)


@pytest.mark.skipif(GPUS > 1, reason="there is a GPU for each of two ranks")
def test_ranks_that_find_themselves_on_one_gpu_are_refused_unless_asked_to_share() -> None:
    with RankPool(2, device_type="cuda") as pool, pytest.raises(UsageError, match="ranks 0, 1 have the same GPU"):
        pool.run("rank_jobs:train_and_keep", {})


def test_copies_wait_for_what_makes_a_tensor_and_for_what_used_it() -> None:
    copies = Copies(torch.device("cuda", 0))
    square = torch.full((2048, 2048), 1 / 2048, device="cuda")
    for _ in range(50):
        made = square @ square
    copy = copies.to_host(made)
    landing = torch.zeros_like(made)
    for _ in range(50):
        landing += square @ square
    since = copies.moment()
    copy.wait()
    copies.to_device(copy.tensor, landing, since)
    torch.testing.assert_close((landing - made).cpu(), torch.zeros(2048, 2048))
    torch.testing.assert_close(copy.tensor, made.cpu(), rtol=0, atol=0)


def _job(case: Case, plan: Plan) -> Job:
    """Return the job of the one rank of a plan."""
    place = (own(case.graph), case.model, Workspace(case.workspace).read, InProcessTransport(Exchange(), 0))
    return Job(plan, expand(plan), 0, *place, torch.device("cuda", 0), lambda step, position: None)


def test_in_the_steady_state_nothing_waits_for_all_of_the_devices_work(cases: dict[str, Case]) -> None:
    case = cases["mlp"]
    plan = _on_gpu(case.plan((1,), 3, 7))
    job = _job(case, plan)
    records = [job.step(step, STEPS + 1) for step in range(2)]
    # torch then raises where the host waits for a stream unasked: copies from pageable memory, reading a number.
    try:
        with warnings.catch_warnings():
            # That it does not find all of them yet.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        records += [job.step(step, STEPS + 1) for step in range(2, STEPS)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    job.finish()
    truth = case.truth(plan, device="cuda")
    assert [record.loss for record in records] == pytest.approx(truth.losses, rel=1e-12)
    moments = [moment for record in records for span in record.times_s for moment in span]
    assert moments == sorted(moments)


def test_matrix_products_keep_no_more_than_their_workspaces() -> None:
    device = torch.device("cuda", 0)
    kept, before = _workspace_bytes(device), torch.cuda.memory_allocated(device)
    factor = torch.ones(2048, 2048, device=device, requires_grad=True)
    torch.nn.functional.linear(factor, factor, factor[0]).sum().backward()
    del factor
    assert kept > 0
    assert torch.cuda.memory_allocated(device) == before


def test_a_loss_that_is_not_finite_updates_nothing(tmp_path: Path) -> None:
    case = make_case(tmp_path / "endless.py", ENDLESS)
    job = _job(case, _on_gpu(case.plan((1,), 2, 2)))
    before = {name: parameter.detach().clone() for name, parameter in job.parameters.items()}
    with pytest.raises(TrainingError, match=r"U@0\): the loss is not finite in micro-batch 0; nothing was updated"):
        job.step(0, 2)
    assert all(torch.equal(before[name], parameter) for name, parameter in job.parameters.items())
