"""Megatron-LM's arguments: recomputation, shards, precision, and cuts that have no name."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.exports import export_plan
from equal_plans import equal_plan, llama_profile


def test_megatron_says_recomputation_shards_and_precision(tmp_path: Path) -> None:
    def text(**options: object) -> str:
        profile = llama_profile()
        plan, cluster = equal_plan(profile, "1f1b", 2, 2, **options)  # type: ignore[arg-type]
        return export_plan("megatron", (plan, profile, cluster), tmp_path / "plan.json").text

    assert "recompute" not in text()
    assert "--recompute-method block --recompute-num-layers 2" in text(recompute=(1, 2, 7, 8))
    assert "--recompute-method uniform --recompute-num-layers 1" in text(recompute=range(1, 13))
    sharded = text(shard="optimizer", micro_batches=4)
    for line in ("--use-distributed-optimizer", "--micro-batch-size 2", "--global-batch-size 16", "--num-layers 12"):
        assert f"    {line}\n" in sharded
    with pytest.raises(UsageError, match="no replicas of a pipeline's stages that divide parameters"):
        text(shard="parameters")


def test_a_cut_among_what_stands_around_the_blocks_has_no_name(tmp_path: Path) -> None:
    profile = llama_profile(3)
    split = profile.layers[-1].model_copy(update={"name": "lm_head", "modules": ("lm_head",)})
    norm = profile.layers[-1].model_copy(update={"name": "model.norm", "modules": ("model.norm",)})
    tensor = profile.tensors[-1]
    tensors = (
        *profile.tensors[:-1],
        tensor.model_copy(update={"consumers": ("model.norm",)}),
        tensor.model_copy(update={"name": "last", "producer": "model.norm", "consumers": ("lm_head",)}),
    )
    profile = profile.model_copy(update={"layers": (*profile.layers[:-1], norm, split), "tensors": tensors})
    plan, cluster = equal_plan(profile, "1f1b", 2, cuts=(5,))
    with pytest.raises(UsageError, match="stage 0 ends within the layers around the blocks"):
        export_plan("megatron", (plan, profile, cluster), tmp_path / "plan.json")
    plan, cluster = equal_plan(profile, "1f1b", 2, cuts=(4,))
    assert (
        "--pipeline-model-parallel-layout 'Et*3|L'"
        in export_plan("megatron", (plan, profile, cluster), tmp_path / "plan.json").text
    )
