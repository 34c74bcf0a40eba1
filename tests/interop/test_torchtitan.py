"""torchtitan's configurations: what a plan is there, and back; names, schedules and files of both kinds."""

import ast
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from autopar.api.exports import export_plan
from autopar.errors import FileError, UsageError
from autopar.interop.torchtitan import import_torchtitan
from autopar.planner.dictated import parse
from autopar.schedules import SCHEDULES
from equal_plans import Planned, exported, llama_profile, planned, random_equal, stops
from example_inputs import TORCHTITAN
from priced_teams import teams_of

LLAMA = "LlamaForCausalLM"
TOML = TORCHTITAN.replace("lm_head", "output")
"""By the names of older versions."""


def values(text: str) -> dict[str, object]:
    """Return what the module sets, by name."""
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.keywords)
    return {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}


def two_stages(blocks: int = 12, *, schedule: str = "1f1b", tied: bool = False, **options: Any) -> Planned:  # noqa: ANN401
    return planned(llama_profile(blocks, tied=tied), schedule, 2, 2, **options)


def test_random_plans_are_the_same_stages_after_export_and_import(tmp_path: Path) -> None:
    seen = set()
    for seed in range(60):
        own = seed % 2 == 0
        plan, profile, cluster = random_equal(seed, tuple(SCHEDULES) if own else ("gpipe", "1f1b", "interleaved"))
        if len(plan.groups) == 1:
            continue
        size = (1, 1, 2, 4)[seed % 4]
        teams = teams_of(plan, seed, sizes=(size,), slices=float(seed % 3 > 0))
        made, file = (teams, profile, cluster), "own.csv" if own else None
        text = exported("torchtitan", tmp_path, made, LLAMA if seed % 3 else None, file)[0]
        found = import_torchtitan(text, tmp_path / "a.py", profile)
        stages = parse(found.stages, [layer.name for layer in profile.layers])
        assert list(stages.cuts) == stops(plan)
        assert set(stages.widths) == {plan.stages[0].replicas}
        assert set(stages.team_sizes) == {size}
        assert ("sequence_parallel" in found.options) == any(stage.sequence for stage in teams.stages)
        assert (found.chunks, found.batch) == (len(plan.groups[0]), plan.batch)
        assert own or found.schedule == plan.schedule
        seen.add((plan.schedule, found.chunks, len(plan.groups), own))
    assert len(seen) > 15


def test_names_are_torchtitans_or_the_models_and_the_plans_order_goes_into_a_file(tmp_path: Path) -> None:
    made = two_stages(blocks=2, cuts=(2,))
    native = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
    for architecture, parts, words in (
        ("LlamaForCausalLM", native, "torchtitan's llama3"),
        ("MistralForCausalLM", [[*each, "rotary_emb"] for each in native], "Transformers backend"),
        ("Unknown", [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]], "own na"),
    ):
        (text,) = exported("torchtitan", tmp_path, made, architecture)
        assert values(text)["module_fqns_per_model_part"] == parts
        assert words in text.replace("\n#  ", "")
    made = two_stages(depths=(3, 1))
    with pytest.raises(UsageError, match="stage 0 keeps 3 micro-batches in flight, and 2 by torchtitan's 1f1b"):
        exported("torchtitan", tmp_path, made)
    text, schedule = exported("torchtitan", tmp_path, made, file="own.csv")
    assert values(text)["pipeline_parallel_schedule_csv"] == "own.csv"
    assert schedule.splitlines()[0] == "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3"
    with pytest.raises(UsageError, match="`schedule_file` is of torchtitan"):
        exported("megatron", tmp_path, made, file="own.csv")


def test_a_module_sets_degrees_batches_precision_and_recomputation(tmp_path: Path) -> None:
    (text,) = exported("torchtitan", tmp_path, two_stages(32, recompute=range(1, 33), shard="optimizer"), LLAMA)
    found = values(text)
    assert found["data_parallel_shard_degree"] == 2
    assert found["pipeline_parallel_schedule"] == "1F1B"
    assert found["pipeline_parallel_microbatch_size"] == 2
    for line in (
        "    config.training.local_batch_size = 8\n",
        "    config.training.global_batch_size = 16\n",
        "    config.training.seq_len = 64\n",
        '    config.training.mixed_precision_param = "float32"\n',
        "    config.activation_checkpoint = FullAC.Config()\n",
        '    return configure(replace(llama3_8b(), model_spec=model_registry("8B")))\n',
    ):
        assert line in text
    (text,) = exported("torchtitan", tmp_path, planned(llama_profile(), "1f1b", 1, 4, 2, shard="parameters"), LLAMA)
    assert "module_fqns_per_model_part" not in text
    assert values(text)["fsdp_reshard_after_forward"] == "always"
    assert "config.training.local_batch_size = 2\n" in text


def test_every_degree_of_a_plan_is_set_and_teams_of_one_size_are_the_tensor_degree(tmp_path: Path) -> None:
    plan, profile, cluster = two_stages(32)
    for size in (1, 4):
        made = teams_of(plan, 0, sizes=(size,), slices=0.0), profile, cluster
        (text,) = exported("torchtitan", tmp_path, made, LLAMA)
        degrees = {name: each for name, each in values(text).items() if name.endswith("_degree")}
        assert degrees == {
            "data_parallel_replicate_degree": 2,
            "data_parallel_shard_degree": 1,
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": size,
            "context_parallel_degree": 1,
            "expert_parallel_degree": 1,
        }
        assert f"ranks: {4 * size};" in text
        assert values(text)["enable_sequence_parallel"] is False
        assert "    config.compile.enable_async_tensor_parallel = False\n" in text
        (text,) = exported("megatron", tmp_path, made)
        assert f"    --tensor-model-parallel-size {size}\n" in text
        assert "--sequence-parallel" not in text
    sliced = teams_of(plan, 0, sizes=(2,), slices=1.0), profile, cluster
    (text,) = exported("torchtitan", tmp_path, sliced, LLAMA)
    assert values(text)["enable_sequence_parallel"] is True
    assert "enable_async_tensor_parallel" not in text
    (text,) = exported("megatron", tmp_path, sliced)
    assert "    --sequence-parallel\n" in text
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [LLAMA], "num_key_value_heads": 2}))
    few = teams_of(plan, 0, sizes=(4,), slices=0.0).model_copy(
        update={"model": plan.model.model_copy(update={"source": "hf:config.json"})}
    )
    with pytest.raises(UsageError, match=r"4 devices .* together, and torchtitan has them divide 2 heads of keys"):
        export_plan("torchtitan", (few, profile, cluster), tmp_path / "plan.json")
    assert export_plan("megatron", (few, profile, cluster), tmp_path / "plan.json")
    with pytest.raises(UsageError, match="4 devices run each replica together, which is not written for"):
        exported("torch", tmp_path, (teams_of(plan, 0, sizes=(4,), slices=0.0), profile, cluster))


@pytest.mark.parametrize(
    ("more", "precision", "words"),
    [
        ({"schedule": "zb-v", "micro_batches": 4}, "bf16", "no schedule zb-v, only gpipe, 1f1b, interleaved"),
        ({"shard": "parameters"}, "bf16", "that divide parameters"),
        ({"tied": True}, "bf16", "model.embed_tokens.weight is shared between stages"),
        ({}, "fp16", "torchtitan trains in bfloat16 or float32, and not in fp16"),
    ],
)
def test_what_torchtitan_has_not_is_refused(more: dict[str, Any], precision: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        exported("torchtitan", tmp_path, two_stages(**more), precision=precision)


def test_older_configurations_and_saved_ones_are_read(tmp_path: Path) -> None:
    profile = llama_profile(4)
    found = import_torchtitan(TOML, tmp_path / "a.toml", profile)
    grid = {"stages": "0-2:2,3-5:2", "schedule": "1f1b", "batch": 16, "micro_batches": 4, "shard": "optimizer"}
    assert found.options == grid
    copies = TOML.replace("shard_degree = 2", "shard_degree = 1\ndata_parallel_replicate_degree = 2")
    assert import_torchtitan(copies, tmp_path / "a.toml", profile).options == {**grid, "shard": "none"}
    assert import_torchtitan(json.dumps(tomllib.loads(TOML)), tmp_path / "a.json", profile) == found
    left = TOML.replace("shard_degree = 2", "shard_degree = -1")
    assert import_torchtitan(left, tmp_path / "a.toml", profile, 2) == found
    with pytest.raises(UsageError, match="what is left of all ranks; say how many: `replicas`"):
        import_torchtitan(left, tmp_path / "a.toml", profile)
    for each in (TOML, copies):
        with pytest.raises(UsageError, match=r"`replicas=3`: .* has 2"):
            import_torchtitan(each, tmp_path / "a.toml", profile, 3)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("[parallelism", FileError, "not TOML"),
        ("a = 1", FileError, "states no module_fqns_per_model_part"),
        (TOML.replace('"layers.1"', "1"), FileError, "module_fqns_per_model_part: expected lists of names"),
        (TOML.replace("layers.1", "layers.7"), UsageError, "module 'layers.7' is none of the profile's layers"),
        (TOML.replace('"layers.2", ', ""), UsageError, "does not have all layers"),
        (TOML.replace("degree = 2\npipeline", "degree = 3\npipeline"), UsageError, "does not divide"),
        (TOML + "context_parallel_degree = 2", UsageError, "context_parallel_degree 2: autopar has no such plan; set"),
        (TOML + "tensor_parallel_degree = 0", UsageError, "tensor_parallel_degree must be at least 1, found 0"),
        (TOML + 'pipeline_parallel_schedule = "Looped"', UsageError, "no schedule 'Looped'"),
        (TOML + "data_parallel_replicate_degree = 2", UsageError, "all sharded, or none is"),
        (TOML.replace("size = 8", 'size = "8"'), FileError, "local_batch_size: expected a number"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(text: str, error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words) as raised:
        import_torchtitan(text, tmp_path / "a.toml", llama_profile(4))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


HEX = "0x" + "f" * 6000
"""More than Python writes in decimal digits."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:", "not Python"),
        ("(" * 300, "not Python"),
        ("#" * 300_000, "letters are too many for a configuration"),
        ("f(module_fqns_per_model_part={[]: 1})", "states no module_fqns_per_model_part"),
        ("f(module_fqns_per_model_part={{}})", "states no module_fqns_per_model_part"),
        (f"f(module_fqns_per_model_part={'[' * 60}{']' * 60})", "expected lists of names"),
        (f"f(module_fqns_per_model_part=[[{HEX}]])", "expected lists of names"),
        (f"f(module_fqns_per_model_part=['a'], pipeline_parallel_degree={HEX})", "below 2.*, found a huge number"),
        (
            f"f(module_fqns_per_model_part=['a'], pipeline_parallel_schedule={HEX})",
            "expected a name, found a huge number",
        ),
        (f"f(module_fqns_per_model_part=['a'], pipeline_parallel_degree=[{HEX}])", "found a list of 1"),
        (f"f(module_fqns_per_model_part=['{'a' * 9000}'], data_parallel_shard_degree=1)", "module 'aaa"),
    ],
)
def test_python_that_is_odd_is_refused_in_a_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises((FileError, UsageError), match=words) as raised:
        import_torchtitan(text, tmp_path / "a.py", llama_profile(2))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_what_stands_beside_the_stages_may_be_anything(tmp_path: Path) -> None:
    """Keys that cannot be hashed, numbers that cannot be written, and texts that Python warns of."""
    parts = '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'
    for beside in ("{[]: 1}", HEX, "-[]", "{1: [], **{}}", "'\\d'", "1if 1else 2"):
        text = f"f(other={beside}, module_fqns_per_model_part={parts}, data_parallel_shard_degree=1)"
        assert import_torchtitan(text, tmp_path / "a.py", llama_profile(2)).stages == "0-1:1,2-3:1"
