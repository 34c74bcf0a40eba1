"""A job that is given one mini-batch at a time ends each once, in their order, and trains what a run of all trains."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from autopar.capture.layers.export import capture
from autopar.capture.model.batch import named_tensors
from autopar.capture.model.source import load
from autopar.formats.plan import Plan
from autopar.runtime.data import Batch, split_rows
from autopar.runtime.job import Feed, Job
from autopar.runtime.messages.transport import Transport
from policy_cases import planned
from threads import act_in_threads

COUNT = 11
CASES: list[tuple[str, list[int], int, dict[str, object]]] = [
    ("sync", [1, 1], 2, {}),
    ("stash", [3, 1], 2, {}),
    ("stash", [2, 1], 1, {"widths": [3, 1], "turns": [0]}),
    ("stash", [3, 1], 1, {"widths": [2, 3], "turns": [0, 1]}),
    ("2bw", [2, 1], 2, {}),
    ("pipemare", [3, 1], 2, {"synchronous_steps": 3}),
]


def trained(folder: Path, plan: Plan, drains: Sequence[int]) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Feed all mini-batches, drained before some; return what ended with each of them and in the end, and weights."""
    user = load(str(folder / "model.py"))
    graph, data = capture(user, user.build(0)), user.dataset()
    state = {name: each.detach().clone() for name, each in user.build(0).named_parameters()}
    ended: dict[int, list[list[int]]] = {}
    weights: dict[str, torch.Tensor] = {}

    def inputs(job: Job, step: int) -> Batch:
        samples = [data[row] for row in range(step * plan.batch, (step + 1) * plan.batch)]
        values = named_tensors([torch.stack(each) for each in zip(*samples, strict=True)])
        return split_rows(plan, job.rank, values, job.inputs, torch.device("cpu"))

    def act(job: Job, transport: Transport) -> None:
        feed, own = Feed(job, 0), list[list[int]]()
        for step in range(COUNT):
            before = [record.step for record in feed.drain()] if step in drains else []
            own.append(before + [record.step for record in feed.step(inputs(job, step))])
        own.append([record.step for record in feed.drain()])
        assert not feed.under_way
        job.finish()
        ended[job.rank] = own
        weights.update({name: each.detach().clone() for name, each in job.parameters.items()})

    act_in_threads(plan, graph, user, state, act)
    assert all(each == ended[0] for each in ended.values())
    return ended[0], weights


@pytest.mark.parametrize(("policy", "depths", "micro_batches", "more"), CASES)
def test_every_mini_batch_ends_once_and_in_order(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int, more: dict[str, object]
) -> None:
    plan = planned(tmp_path, "sgd", policy, depths, micro_batches, **more)  # type: ignore[arg-type]
    found, weights = trained(tmp_path, plan, (5,))
    assert [step for steps in found for step in steps] == list(range(COUNT))
    assert found[:1] == ([[0]] if policy in ("sync", "pipemare") else [[]])
    # After a drain, everything that was given has ended.
    assert {step for steps in found[:6] for step in steps} >= set(range(5))
    _, undrained = trained(tmp_path, plan, ())
    assert all(torch.equal(each, undrained[name]) for name, each in weights.items()) == (policy == "sync")
