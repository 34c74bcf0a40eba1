"""DeepSpeed's JSON and the parts of its pipelines."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import UsageError
from equal_plans import exported, llama_profile, planned


@pytest.mark.parametrize(("shard", "stage"), [("none", 0), ("optimizer", 1), ("gradients", 2), ("parameters", 3)])
def test_shards_are_stages_of_zero(shard: str, stage: int, tmp_path: Path) -> None:
    (text,) = exported("deepspeed", tmp_path, planned(llama_profile(), "1f1b", 1, 4, 2, shard=shard))
    found = json.loads(text)
    assert found["zero_optimization"] == {"stage": stage}
    sizes = [found[name] for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    assert found["train_batch_size"] == sizes[0] * sizes[1] * 4 == 16


def test_a_pipeline_has_parts_and_what_deepspeed_has_not_is_refused(tmp_path: Path) -> None:
    made = planned(llama_profile(), "1f1b", 3, 2, 4, cuts=(2, 9), recompute=range(14), shard="optimizer")
    for precision in ("bf16", "fp16"):
        text, parts = exported("deepspeed", tmp_path, made, precision=precision)
        assert json.loads(text)["pipeline"] == {"activation_checkpoint_interval": 1}
        assert json.loads(text)[precision] == {"enabled": True}
        (assigned,) = [node.value for node in ast.parse(parts).body if isinstance(node, ast.Assign)]
        assert ast.literal_eval(assigned) == [0, 2, 9, 14]
        assert "model.embed_tokens model.layers.0" in parts.replace("\n#  ", "")
    assert len(exported("deepspeed", tmp_path, planned(llama_profile(), "1f1b", 2, 2, 4))) == 2
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("1f1b", 2, 2), {"shard": "gradients"}, "of a pipeline's stages that divide gradients"),
        (("1f1b", 2), {"recompute": range(1, 13)}, "all blocks, and DeepSpeed recomputes no layer or all layers"),
        (("1f1b", 1), {"recompute": range(14)}, "all layers, and DeepSpeed recomputes no layer;"),
        (("gpipe", 2), {}, "no schedule gpipe, only 1f1b"),
    ]
    for arguments, options, words in refused:
        with pytest.raises(UsageError, match=words):
            exported("deepspeed", tmp_path, planned(llama_profile(), *arguments, **options))
