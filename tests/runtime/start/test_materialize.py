"""What does not fit its plan is refused before a job is there, or held to what the plan says of it."""

import pytest
import torch

import autopar
from autopar.errors import FileError, ModelError, UsageError
from autopar.formats.plan import NodeDevices
from labelled import loss
from script_jobs import batches, make_model, script_plan


def contrastive(output: torch.Tensor, batch: object) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output @ output.T, torch.arange(output.shape[0]))


@pytest.mark.slow
def test_a_loss_that_no_parts_add_up_to_is_refused_unless_accepted_or_not_divided() -> None:
    model, (batch,) = make_model(), batches(1)
    with pytest.raises(FileError, match=r"compares samples.* `accept_loss=True`"):
        autopar.materialize(model, script_plan([1]), batch, loss=contrastive)
    with autopar.materialize(model, script_plan([1]), batch, loss=contrastive, accept_loss=True) as job:
        job.step(batch)
    with pytest.raises(ModelError, match="compares samples"):
        autopar.profile(model, batch, loss=contrastive, budget_s=0.1, tensor=1)
    measured = autopar.profile(model, batch, loss=contrastive, accept_loss=True, budget_s=0.1, tensor=1)
    divided = autopar.plan(measured, gpus=1, micro_batches=2)
    assert divided.loss_difference == measured.loss_difference
    assert "results depend on micro-batches" in " ".join(divided.explain().split())
    whole = autopar.plan(measured, gpus=1, micro_batches=1)
    assert "results depend" not in " ".join(whole.explain().split())
    for plan in (divided, whole):
        with autopar.materialize(model, plan, batch, loss=contrastive) as job:
            found = job.step(batch).loss
    assert found == pytest.approx(contrastive(make_model()(batch[0]), batch).item(), rel=1e-12)


@pytest.mark.slow
def test_another_model_or_too_few_ranks_are_refused_before_training() -> None:
    other = torch.nn.Sequential(*make_model(), torch.nn.Linear(3, 3)).double()
    (batch,) = batches(1)
    with pytest.raises(FileError, match=r"the plan does not fit Sequential: layer \d+ is .*"):
        autopar.materialize(other, script_plan([1]), batch, loss=loss)
    with pytest.raises(UsageError, match=r"the plan needs 2 ranks, .* torchrun --nproc-per-node 2"):
        autopar.materialize(make_model(), script_plan([1, 1]), batch, loss=loss)
    plan = script_plan([1])
    nodes = (NodeDevices(node=0, type="H100", memory_bytes=2**30, count=1),)
    with pytest.raises(UsageError, match=r"the plan is for 1 node \(1 x H100\), and its ranks are on "):
        autopar.materialize(make_model(), plan.model_copy(update={"nodes": nodes}), batch, loss=loss)
    assert not torch.distributed.is_initialized()
