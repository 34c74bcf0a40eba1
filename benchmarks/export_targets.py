"""What other trainers make of exported files: `export_targets.py FOLDER`, in the environment of `exports.txt`.

Reads FOLDER's `cases.json`, holds every file to what the plan says, and leaves counts and versions in `found.json`.
This environment has no autopar.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
Case = dict[str, Any]


def megatron(cases: list[Case]) -> dict[str, object]:
    """Hold layouts to the blocks of every device, and arguments to Megatron's configuration."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_config import TransformerConfig

    layouts = 0
    for case in cases:
        lines = Path(case["files"][0]).read_text().partition("AUTOPAR_ARGUMENTS=(")[2].rpartition(")")[0]
        words = shlex.split(lines)
        given = {name: value for name, value in zip(words, [*words[1:], ""], strict=True) if name.startswith("--")}
        size, blocks = int(given["--pipeline-model-parallel-size"]), int(given["--num-layers"])
        layout = given.get("--pipeline-model-parallel-layout")
        options: dict[str, Any] = {"pipeline_model_parallel_size": size, "pipeline_model_parallel_layout": layout}
        if case["recomputes"]:
            options |= {
                name: given[f"--{name.replace('_', '-')}"] for name in ("recompute_granularity", "recompute_method")
            }
            options["recompute_num_layers"] = int(given["--recompute-num-layers"])
        if layout is not None:
            read = PipelineParallelLayerLayout(layout, size)
            found = [[chunk.count(LayerType.decoder) for chunk in rank] for rank in read.layout]
            assert found == case["blocks"], (layout, found, case["blocks"])
            read.validate_layer_layout(blocks, 0)
            layouts += 1
        import torch

        made = TransformerConfig(
            num_layers=blocks,
            hidden_size=64,
            num_attention_heads=4,
            pipeline_dtype=torch.float32,
            bf16="--bf16" in words,
            tensor_model_parallel_size=int(given["--tensor-model-parallel-size"]),
            sequence_parallel="--sequence-parallel" in words,
            **options,
        )
        assert made.num_layers == blocks
        assert (made.tensor_model_parallel_size, made.sequence_parallel) == (case["tensor"], case["sliced"])
    return {"version": version("megatron-core"), "files": len(cases), "layouts_counted": layouts}


def torchtitan(cases: list[Case]) -> dict[str, object]:
    """Hold configurations to torchtitan's class, its splitter and its runtime of schedules."""
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule, _split_module

    names = ["tok_embeddings", *(f"layers.{index}" for index in range(6)), "norm", "lm_head"]
    whole = None
    for at, case in enumerate(cases):
        file = Path(case["files"][0])
        (file.parent / f"case_{at}.py").write_text(file.read_text())
        (file.parent / f"run_{at}.py").write_text(
            "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
            f"from case_{at} import configure\n\n\ndef planned():\n    return configure(llama3_debugmodel())\n"
        )
        sys.path.insert(0, str(file.parent))
        config = ConfigManager().parse_args(["--module", f"run_{at}", "--config", "planned"])
        if whole is None:
            with torch.device("meta"):
                whole = config.model_spec.model.build()
        stages = config.parallelism.module_fqns_per_model_part
        layers = [[name for name in stage if name not in ("norm",)] for stage in stages]
        edges = [0, *case["stops"]]
        planned = [[n for n in names if n != "norm"][first:stop] for first, stop in pairwise(edges)]
        assert layers == planned, (layers, planned)
        _check_titan_degrees(config, case)
        cut = [dict(_split_module(whole, stage).named_parameters()) for stage in stages]
        assert sum(map(len, cut)) == len(dict(whole.named_parameters()))
        _check_titan_schedule(config, case, _build_pipeline_schedule)
    return {"version": version("torchtitan"), "files": len(cases)}


def torchtitan_bases(cases: list[Case]) -> dict[str, object]:
    """Hold what files make of torchtitan's own Llama 3 to its own checks of a configuration and of its degrees."""
    from torchtitan.components.quantization import float8
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.config import ConfigManager

    # The largest one asks for a GPU that has float8 before the file turns that off.
    float8.has_cuda_capability = lambda *_: True
    for case in cases:
        file = Path(case["files"][0])
        (file.parent / f"{case['name']}.py").write_text(file.read_text())
        sys.path.insert(0, str(file.parent))
        config = ConfigManager().parse_args(["--module", case["name"], "--config", f"planned_{case['base']}"])
        config.__post_init__()
        config.compile.__post_init__()
        _check_titan_degrees(config, case)
        assert not has_quantization(config.model_spec.model)
    return {"version": version("torchtitan"), "files": len(cases), "bases": len({case["base"] for case in cases})}


def _check_titan_degrees(config: Any, case: Case) -> None:  # noqa: ANN401
    """Have torchtitan's class take a configuration's degrees for as many ranks as planned."""
    from torchtitan.distributed import ParallelDims

    dims = ParallelDims.from_config(config.parallelism, case["ranks"])
    assert (dims.pp, dims.dp_replicate * dims.dp_shard, dims.tp) == (case["groups"], case["pipelines"], case["tensor"])
    assert (dims.dp_shard > 1) == (case["shard"] != "none")
    assert config.parallelism.enable_sequence_parallel == case["sliced"]
    assert not config.compile.enable_async_tensor_parallel or case["sliced"]
    # As its trainer does.
    assert config.training.seq_len % (dims.tp if case["sliced"] else 1) == 0
    assert config.training.global_batch_size % (config.training.local_batch_size * case["pipelines"]) == 0


def _check_titan_schedule(config: Any, case: Case, build: Any) -> None:  # noqa: ANN401
    """Have torchtitan make a schedule; compare where stages are, and how many micro-batches there are."""
    import torch
    from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping as placed

    parallelism, count, size = config.parallelism, len(case["stops"]), len(case["placed"])
    for rank in range(size):
        own = placed(rank, size, parallelism.pipeline_parallel_schedule, count)
        assert list(own) == case["placed"][rank]
    stages = [
        SimpleNamespace(
            num_stages=count,
            group_size=size,
            group_rank=0,
            stage_index=index,
            is_first=index == 0,
            is_last=index == count - 1,
            submod=torch.nn.Module(),
            device=torch.device("cpu"),
        )
        for index in case["placed"][0]
    ]
    made = build(
        parallelism=parallelism,
        local_batch_size=config.training.local_batch_size,
        stages=stages,
        loss_fn=lambda *_: None,
    )
    assert made._n_microbatches == case["micro_batches"]
    dims = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    assert dims == case["pipelines"]
    assert config.training.global_batch_size == config.training.local_batch_size * dims


def deepspeed(cases: list[Case]) -> dict[str, object]:
    """Hold JSON to DeepSpeed's configuration, and parts to the bounds of every rank of a pipeline."""
    import deepspeed.runtime.config as configuration
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    configuration.dist.get_rank = lambda *_: 0
    pipelines = 0
    for at, case in enumerate(cases):
        width = case["pipelines"]
        data_parallel = SimpleNamespace(get_data_parallel_world_size=lambda width=width: width)
        made = configuration.DeepSpeedConfig(case["files"][0], mpu=data_parallel)
        shards = ("none", "optimizer", "gradients", "parameters")
        assert made.zero_config.stage == shards.index(case["shard"])
        sizes = made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps, made.train_batch_size
        assert sizes == (case["rows"], case["micro_batches"], case["batch"])
        if len(case["files"]) == 1:
            continue
        pipelines += 1
        folder = Path(case["files"][1]).parent
        (folder / f"parts_{at}.py").write_text(Path(case["files"][1]).read_text())
        sys.path.insert(0, str(folder))
        module = import_module(f"parts_{at}")
        topology, edges = PipeDataParallelTopology(num_pp=case["groups"], num_dp=width), [0, *case["stops"]]
        for rank in range(topology.world_size()):
            pipeline = module.PlannedPipeline.__new__(module.PlannedPipeline)
            vars(pipeline).update(
                _layer_specs=[None] * edges[-1], num_stages=case["groups"], _topo=topology, global_rank=rank
            )
            pipeline._partition_layers()
            stage = topology.get_coord(rank).pipe
            assert (pipeline._local_start, pipeline._local_stop) == (edges[stage], edges[stage + 1])
    return {"version": version("deepspeed"), "files": len(cases), "pipelines_cut": pipelines}


def accelerate(cases: list[Case]) -> dict[str, object]:
    """Hold YAML to accelerate's configuration, and what it says of FSDP to its plugin."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin

    for case in cases:
        made = load_config_from_file(case["files"][0])
        assert made.num_processes == case["replicas"]
        assert made.distributed_type.value == ("MULTI_GPU" if case["shard"] == "none" else "FSDP")
        if case["shard"] == "none":
            continue
        stated = made.fsdp_config
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=stated["fsdp_version"],
            reshard_after_forward=stated["fsdp_reshard_after_forward"],
            auto_wrap_policy=stated["fsdp_auto_wrap_policy"].lower(),
            transformer_cls_names_to_wrap=[stated["fsdp_transformer_layer_cls_to_wrap"]],
            activation_checkpointing=stated["fsdp_activation_checkpointing"],
        )
        assert plugin.reshard_after_forward == (case["shard"] == "parameters")
        assert plugin.activation_checkpointing == case["recomputes"]
    return {"version": version("accelerate"), "files": len(cases)}


def kubernetes(cases: list[Case]) -> dict[str, object]:
    """Hold manifests to the models of Kubeflow's schema: nothing is refused, and nothing left out."""
    import yaml
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    for case in cases:
        content = yaml.safe_load(Path(case["files"][0]).read_text())
        assert TrainerV1alpha1TrainJob.from_dict(content).to_dict() == content
    return {"version": version("kubeflow-trainer-api"), "files": len(cases)}


def main() -> None:
    folder = Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text())
    every = megatron, torchtitan, torchtitan_bases, deepspeed, accelerate, kubernetes
    found = {each.__name__: each(cases[each.__name__]) for each in every}
    import torch

    (folder / "found.json").write_text(json.dumps({"torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
