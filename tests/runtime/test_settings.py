"""How ranks train, apart from the plan, and what of it is refused."""

from contextlib import nullcontext
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.stage import SharedParameter
from autopar.options.train import TrainSettings
from autopar.ownership import Shard
from autopar.runtime.settings import (
    check_clipping,
    check_compiling,
    check_offload,
    check_scope,
    check_training,
    check_unflushed,
)
from autopar.schedules.expand import expand
from drawn_models import model_case
from oracles.unflushed import RULES


def _plan(widths: tuple[int, ...], schedule: str = "1f1b", chunks: int = 1, shard: Shard = "none") -> Plan:
    return model_case("dropout").plan(widths, 2, 4, schedule, chunks=chunks, shard=shard)


def test_clipping_without_flushes_is_by_stage() -> None:
    plan = _plan((1, 1))
    shared = SharedParameter(parameter="weight", stages=(0, 1), bytes=8)
    tied, asked = plan.model_copy(update={"tied": (shared,)}), TrainSettings(clip_norm=1.0, clip="stage")
    check_clipping(plan, asked)
    check_clipping(tied, TrainSettings(clip_norm=1.0))
    check_clipping(tied, TrainSettings(clip_norm=1.0, clip="model"))
    with pytest.raises(UsageError, match=r"`clip='stage'`: stages 0 and 1 share weight, .* \(`clip='model'`\)"):
        check_clipping(tied, asked)
    for policy in RULES:
        plan = _plan((1, 1)).model_copy(update={"weight_policy": policy})
        check_unflushed(plan, TrainSettings(clip_norm=1.0, clip="stage"))
        said = r"`clip_norm` takes a flush, .* \(`clip='stage'`\), or .*`policy='2bw'`"
        with nullcontext() if policy == "2bw" else pytest.raises(UsageError, match=said):
            check_unflushed(plan, TrainSettings(clip_norm=1.0))
    for policy, precision, refused in (("predict", "bf16", True), ("predict", "fp32", False), ("stash", "bf16", False)):
        plan = _plan((1, 1)).model_copy(update={"weight_policy": policy, "precision": precision})
        with pytest.raises(UsageError, match="bf16 keeps weights as forwards have cast") if refused else nullcontext():
            check_unflushed(plan, TrainSettings())


def test_what_a_run_cannot_do_of_a_plan_is_refused() -> None:
    whole, sharded, halves = _plan((2,)), _plan((2,), shard="parameters"), _plan((2,), "zb-v", chunks=2)
    check_scope(whole)
    with pytest.raises(UsageError, match="divides micro-batches freely"):
        check_scope(whole.model_copy(update={"divisible": True}))
    with pytest.raises(UsageError, match="`share_gpus`: the plan is for CPUs"):
        check_training(whole, TrainSettings(), share_gpus=True)
    with pytest.raises(UsageError, match="`cpu_offload`: the plan is for CPUs"):
        check_offload(sharded)
    on_gpus = {"device_type": "cuda"}
    with pytest.raises(UsageError, match="`cpu_offload`: no stage of the plan is sharded"):
        check_offload(whole.model_copy(update=on_gpus))
    check_offload(sharded.model_copy(update=on_gpus))
    check_compiling(whole, expand(whole))
    stages = tuple(stage.model_copy(update={"tensor_parallel": 2}) for stage in whole.stages)
    with pytest.raises(UsageError, match=r"does not say how they divide it.*trains no such plan"):
        check_scope(whole.model_copy(update={"stages": stages}))
    for plan, said in (
        (sharded, "sharded layers are not compiled"),
        (halves, r"the program \(schedule zb-v\) runs backwards in halves"),
        (whole.model_copy(update={"stages": stages}), r"layers that several devices run together .* `stages` of one"),
    ):
        with pytest.raises(UsageError, match=f"`compile`: {said}"):
            check_compiling(plan, expand(halves if plan is halves else whole))


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        *(
            ({}, {name: True}, f"`{name}` takes a flush")
            for name in ("deferred_batch_norm", "sync_batch_norm", "compile")
        ),
        ({"precision": "fp16"}, {}, "fp16 scales losses for all stages alike, which weight policy stash does not"),
        ({"replicate_state": "first"}, {}, "layers write buffers that replicas make alike after a step"),
    ],
)
def test_what_takes_a_flush_is_refused_where_there_is_none(changes: Any, asked: Any, said: str) -> None:  # noqa: ANN401
    plan = _plan((1, 1)).model_copy(update=changes)
    check_unflushed(plan, TrainSettings(**asked))
    with pytest.raises(UsageError, match=said):
        check_unflushed(plan.model_copy(update={"weight_policy": "stash"}), TrainSettings(**asked))
