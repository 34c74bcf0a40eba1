"""accelerate's YAML: DDP or FSDP2 of a single stage."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.errors import UsageError
from equal_plans import exported, llama_profile, planned


def text_of(folder: Path, architecture: str, groups: int = 1, device: str = "cuda", **options: Any) -> str:  # noqa: ANN401
    made = planned(llama_profile(), "1f1b", groups, 4, 2, **options)
    return exported("accelerate", folder, made, architecture, device_type=device, precision="bf16")[0]


def test_replicas_that_divide_nothing_are_ddp(tmp_path: Path) -> None:
    text = text_of(tmp_path, "LlamaForCausalLM")
    machine = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 1}
    assert yaml.safe_load(text) == {**machine, "num_processes": 4, "mixed_precision": "bf16"}
    assert "num_steps=2, sync_each_batch=False" in text.replace("\n#  ", "")
    assert yaml.safe_load(text_of(tmp_path, "LlamaForCausalLM", device="cpu"))["distributed_type"] == "MULTI_CPU"


@pytest.mark.parametrize(("shard", "reshards"), [("gradients", False), ("parameters", True)])
def test_replicas_that_shard_are_fsdp2(shard: str, reshards: bool, tmp_path: Path) -> None:
    text = text_of(tmp_path, "LlamaForCausalLM", shard=shard, recompute=range(1, 13))
    assert yaml.safe_load(text)["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshards,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_activation_checkpointing": True,
    }
    assert "sync_each_batch=True" in text
    unknown = text_of(tmp_path, "Unknown", shard=shard)
    assert "fsdp_transformer_layer_cls_to_wrap" not in yaml.safe_load(unknown)["fsdp_config"]
    assert "to the class of model.layers.*" in unknown.replace("\n#  ", "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 2}, "accelerate has no pipelines, and the plan has 2 stages"),
        ({"shard": "optimizer"}, "no replicas that divide optimizer"),
        ({"recompute": range(1, 13)}, "recomputes layers only where replicas divide something"),
        ({"shard": "parameters", "device": "cpu"}, "no replicas that divide parameters"),
    ],
)
def test_what_accelerate_has_not_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        text_of(tmp_path, "LlamaForCausalLM", **options)
