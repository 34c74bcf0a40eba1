"""torchtitan: a plan as a module of its configuration, and such a configuration as somebody's stages.

Configurations are Python since version 0.3: ``--module FILE --config FUNCTION`` calls a function that returns a
``Trainer.Config`` (`torchtitan/config/manager.py`). ``autopar_torchtitan.py`` has ``configure(config)``, which sets
degrees, schedule, micro-batches, batches, precision, recomputation and ``module_fqns_per_model_part`` of any such
configuration; for Llama 3 of 8, 70 and 405 billion parameters also a function that torchtitan calls, without the float8
of its 405B:

    torchrun ... -m torchtitan.train --module autopar_torchtitan --config planned_llama3_8b

Modules go by torchtitan's names (``tok_embeddings``, ``layers.3``, ``norm``, ``lm_head``, which was ``output`` before
0.3) where ``architectures`` of the model's configuration is a class that torchtitan has, or that its Transformers
backend runs; those parts have ``rotary_emb``, too. Else they go by the model's own names, and the file says so:
torchtitan then cuts what are the model's direct children.

The schedules are ``gpipe``, ``1f1b`` and ``interleaved``, with torch's micro-batches in flight. With ``--schedule-file
own.csv`` the plan's own order is written, too, and read there: any schedule, any depth. Of pipelines, a step's
micro-batches are one ``local_batch_size``. Replicas are ``data_parallel_replicate_degree``, or, where they shard,
``data_parallel_shard_degree``: what they shard is gathered once a step, and gradients are whole until its end, since
torch's pipelining keeps them so (`torch.distributed.pipelining`, ``backward_maybe_with_nosync``). So pipelines may only
shard the optimizer's state; without pipelines, gradients or parameters are sharded. All blocks are recomputed, or
none. Teams of one size are ``tensor_parallel_degree``, with ``enable_sequence_parallel`` where they keep slices of the
sequence; every other degree is set to 1, whatever the configuration had, and ``enable_async_tensor_parallel`` is off
where no such slices are exchanged. Each device of a team has whole heads of keys: fewer heads than devices are refused.

Tried, with triton 3.9.0 installed: its ``ConfigManager`` loads the file onto its debug Llama of six blocks; its
splitter cuts that where the plan says, on the meta device; its builder of schedules takes name or file. Its
``ParallelDims`` takes the degrees, also where the file configures its Llama 3 of 8, 70 and 405 billion parameters. Its
trainer wants GPUs, and was not run; names for its Qwen3 and its Transformers backend are from its source.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import FileError, UsageError
from autopar.formats.document import SHOWN, parse_json, parse_toml, value_text
from autopar.formats.expressible import Expressible, Grid, grid_of, recomputation_of
from autopar.formats.profile import Profile
from autopar.formats.stage import layout_of
from autopar.interop.target import (
    LLAMA_LIKE,
    DictatedStages,
    ExportFile,
    ExportSubject,
    ModelNames,
    Target,
    comment,
    ends_refusal,
    family_of,
    heading,
    modules_of,
    modules_of_stage,
    parts_of,
    rename,
    stages_text,
)
from autopar.interop.torch_pipelining import computations, orders_of
from autopar.schedules import TORCH_NAMES, canonical

_NAMES = ModelNames(("tok_embeddings",), "layers", "norm", "lm_head")
_ROTARY = "rotary_emb"
_NATIVE = {"LlamaForCausalLM": "llama3", "Qwen3ForCausalLM": "qwen3"}
"""torchtitan's own models, by the class of Transformers' that is the same."""
_FLAVORS = {(32, 4096): "8B", (80, 8192): "70B", (126, 16384): "405B"}
"""Models of which `torchtitan.models.llama3.config_registry` has configurations, by blocks and width."""
_BY_LAYOUT = {"line": "1F1B", "loop": "Interleaved1F1B", "vee": "ZBVZeroBubble"}
"""What says how stages lie on devices, where the schedule is that of a file."""


class _Naming(NamedTuple):
    """What torchtitan calls a model's modules, and why."""

    family: ModelNames | None
    rotary: bool
    note: str


def _naming(subject: ExportSubject) -> _Naming:
    family, architecture = family_of(subject.profile, subject.architecture), subject.architecture
    if family is None or family != LLAMA_LIKE:
        return _Naming(None, False, "modules go by the model's own names: torchtitan has no table for it")
    if architecture in _NATIVE:
        return _Naming(_NAMES, False, f"modules are those of torchtitan's {_NATIVE[architecture]}")
    return _Naming(_NAMES, True, "modules are those of torchtitan's Transformers backend")


def _module_names(subject: ExportSubject) -> list[list[str]]:
    """Return the modules of every stage, as torchtitan names them."""
    naming = _naming(subject)
    found = [list(modules_of_stage(subject, stage)) for stage in range(len(subject.plan.stages))]
    if naming.family is None:
        return found
    renamed = [[rename(module, LLAMA_LIKE, naming.family) for module in stage] for stage in found]
    return [[*stage, _ROTARY] for stage in renamed] if naming.rotary else renamed


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield the configuration, and the schedule file where one is asked for."""
    grid, naming = grid_of(subject.plan), _naming(subject)
    name = Path(target.file).stem
    ranks = f"ranks: {grid.ranks}; {naming.note}"
    flavor = _flavor(subject)
    function = "a function of yours that calls configure" if flavor is None else f"planned_{_configured(flavor)}"
    use = f"torchrun ... -m torchtitan.train --module {name} --config {function}"
    yield ExportFile(target.file, comment([*heading(subject, target), ranks, use]) + _module(subject, grid))
    if subject.schedule_file is not None:
        yield ExportFile(subject.schedule_file, computations(orders_of(subject.plan)))


def _flavor(subject: ExportSubject) -> str | None:
    """Return what torchtitan calls the planned model, if it has a configuration of it."""
    parts, width = parts_of(subject.profile), subject.configuration.get("hidden_size")
    if parts is None or _NATIVE.get(subject.architecture or "") != "llama3" or _naming(subject).family is None:
        return None
    return _FLAVORS.get((len(parts.blocks), width if isinstance(width, int) else 0))


def _configured(flavor: str) -> str:
    """Return the function of such a model's configuration.

    >>> _configured("8B")
    'llama3_8b'
    """
    return f"llama3_{flavor.lower()}"


def _module(subject: ExportSubject, grid: Grid) -> str:
    again = recomputation_of(subject.plan, subject.blocks) == "blocks"
    flavor = _flavor(subject)
    lines = ["from dataclasses import replace", ""]
    if again:
        lines.append("from torchtitan.distributed.activation_checkpoint import FullAC")
    if flavor is not None:
        own = _configured(flavor)
        lines.append("from torchtitan.models.llama3 import model_registry")
        lines.append(f"from torchtitan.models.llama3.config_registry import {own}")
    lines += ["", "", "def configure(config):", "    config.parallelism = replace(", "        config.parallelism,"]
    lines += [f"        {name}={_value(value)}," for name, value in _parallelism(subject, grid).items()]
    lines.append("    )")
    lines += [f"    config.training.{name} = {_value(value)}" for name, value in _training(subject, grid).items()]
    if not grid.sliced:
        lines.append("    config.compile.enable_async_tensor_parallel = False")
    lines += [f"    config.activation_checkpoint = {'FullAC.Config()' if again else None}", "    return config"]
    if flavor is not None:
        # Without what it converts to other precisions than the planned one.
        plain = f'replace({own}(), model_spec=model_registry("{flavor}"))'
        lines += ["", "", f"def planned_{own}():", f"    return configure({plain})"]
    return "\n".join(lines).replace("\n\n\n\n", "\n\n\n") + "\n"


def _value(value: object) -> str:
    if not isinstance(value, list):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    rows = "".join(f"            {json.dumps(row)},\n" for row in value)
    return f"[\n{rows}        ]"


def _parallelism(subject: ExportSubject, grid: Grid) -> dict[str, object]:
    plan = subject.plan
    sharded = grid.shard != "none"
    found: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if sharded else grid.pipelines,
        "data_parallel_shard_degree": grid.pipelines if sharded else 1,
        "fsdp_reshard_after_forward": "always" if grid.shard == "parameters" else "never",
        "pipeline_parallel_degree": grid.groups,
        "tensor_parallel_degree": grid.tensor,
        "enable_sequence_parallel": grid.sliced,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
    }
    if grid.groups > 1:
        named = {ours: theirs for theirs, ours in TORCH_NAMES.items()}
        of_layout = _BY_LAYOUT[layout_of(plan.schedule)]
        found["pipeline_parallel_schedule"] = of_layout if subject.schedule_file else named[plan.schedule]
        found["pipeline_parallel_microbatch_size"] = grid.rows
        found["module_fqns_per_model_part"] = _module_names(subject)
        if subject.schedule_file is not None:
            found["pipeline_parallel_schedule_csv"] = subject.schedule_file
    return found


def _training(subject: ExportSubject, grid: Grid) -> dict[str, object]:
    plan = subject.plan
    found: dict[str, object] = {
        "local_batch_size": grid.rows * (grid.micro_batches if grid.groups > 1 else 1),
        "global_batch_size": plan.batch,
        "mixed_precision_param": "bfloat16" if plan.precision == "bf16" else "float32",
    }
    if plan.model.sequence is not None:
        found["seq_len"] = plan.model.sequence
    return {**found, "disable_cuda_graphs": True} if grid.groups > 1 else found


def _names_refusal(subject: ExportSubject) -> str | None:
    if subject.plan.precision == "fp16":
        return "torchtitan trains in bfloat16 or float32, and not in fp16"
    if len(subject.plan.stages) == 1:
        return None
    if len(subject.plan.groups) == 1:
        return "torchtitan has no pipeline on a single device, and the plan runs all stages on one"
    return ends_refusal(subject.plan, parts_of(subject.profile))


def _adjust(expressible: Expressible, subject: ExportSubject) -> Expressible:
    """Return what can be expressed of a model: torchtitan gives each device of a team whole heads of keys."""
    heads = subject.configuration.get("num_key_value_heads") or subject.configuration.get("num_attention_heads")
    return expressible._replace(tensor=heads) if isinstance(heads, int) and heads > 0 else expressible


TARGET = Target(
    version="torchtitan 0.3.0",
    trial="its configuration and its splitter took such files, on a CPU",
    file="autopar_torchtitan.py",
    write=write,
    expressible=Expressible(
        "torchtitan",
        ("gpipe", "1f1b", "interleaved"),
        shards=("none", "optimizer"),
        single_stage_shards=("none", "gradients", "parameters"),
        recompute=("none", "blocks"),
        tensor=0,
    ),
    adjust=_adjust,
    takes_schedule_file=True,
    names_refusal=_names_refusal,
)


def import_torchtitan(text: str, path: Path, profile: Profile, replicas: int | None = None) -> DictatedStages:
    """Return the stages of a torchtitan configuration: Python since 0.3, TOML before, or JSON as it saves it.

    Python is read, and not run: values must be written out. ``replicas`` are pipelines beside each other, where the
    configuration has as many as there are ranks for.

    Raises:
        FileError: the file is malformed, or states no stages.
        UsageError: its modules are not those of the profile's layers, or autopar has no such plan.
    """
    values = _values_of(text, path)
    parts = _checked_parts(values.get("module_fqns_per_model_part"), path)
    groups = _count(values, "pipeline_parallel_degree", path, len(parts))
    if groups < 1 or len(parts) % groups:
        raise UsageError(f"{path}: pipeline_parallel_degree {groups} does not divide {len(parts)} model parts")
    name = values.get("pipeline_parallel_schedule", "1F1B")
    if not isinstance(name, str):
        raise FileError(f"{path}: pipeline_parallel_schedule: expected a name, found {value_text(name)}")
    schedule = canonical(name)
    if schedule is None:
        raise UsageError(f"{path}: autopar has no schedule {name[:SHOWN]!r}")
    width, shard = _replicas(values, path, replicas)
    team = _team(values, path)
    stages, chunks = stages_text(_sizes(parts, profile, path), width, team), len(parts) // groups
    sliced = team > 1 and values.get("enable_sequence_parallel", True) is not False
    local, rows = _count(values, "local_batch_size", path, 0), _count(values, "pipeline_parallel_microbatch_size", path)
    if local < 1 or rows < 1 or local % rows:
        return DictatedStages(stages, schedule, chunks, shard=shard, sliced=sliced)
    return DictatedStages(stages, schedule, chunks, local // rows, local * width, shard, sliced)


def _team(values: Mapping[str, Any], path: Path) -> int:
    """Return how many devices run a replica together."""
    for name in ("context_parallel_degree", "expert_parallel_degree"):
        if _count(values, name, path) > 1:
            raise UsageError(f"{path}: {name} {values[name]}: autopar has no such plan; set it to 1")
    team = _count(values, "tensor_parallel_degree", path)
    if team < 1:
        raise UsageError(f"{path}: tensor_parallel_degree must be at least 1, found {team}")
    return team


def _replicas(values: Mapping[str, Any], path: Path, replicas: int | None) -> tuple[int, str | None]:
    """Return how many pipelines are beside each other, and what they shard."""
    copies = _count(values, "data_parallel_replicate_degree", path)
    shards = _count(values, "data_parallel_shard_degree", path, -1)
    if copies < 1 or shards == 0 or (copies > 1 and (shards > 1 or (shards < 0 and replicas not in (None, copies)))):
        raise UsageError(
            f"{path}: data_parallel_replicate_degree {copies} and data_parallel_shard_degree {shards}: autopar's "
            "replicas are all sharded, or none is"
        )
    if shards < 0 and replicas is None:
        raise UsageError(f"{path}: data_parallel_shard_degree is what is left of all ranks; say how many: `replicas`")
    if shards > 0 and replicas not in (None, copies * shards):
        raise UsageError(f"`replicas={replicas}`: {path} has {copies * shards}")
    width = copies * shards if shards > 0 else replicas or 1
    return width, None if width == 1 else "none" if copies > 1 else "optimizer"


def _sizes(parts: list[list[str]], profile: Profile, path: Path) -> list[int]:
    """Return how many layers every model part has; parts name the profile's modules, or torchtitan's."""
    layers, own = profile.layers, parts_of(profile)
    wanted = [module for part in parts for module in part if module != _ROTARY]
    names = {module: index for index, layer in enumerate(layers) for module in layer.modules}
    if own is not None and not names.keys() >= set(wanted):
        blocks = {f"{_NAMES.blocks}.{at}": index for at, index in enumerate(own.blocks)}
        ends = list(modules_of(profile, own.behind))
        heads = dict.fromkeys(("lm_head", "output"), own.behind.stop - 1)
        names = {**blocks, _NAMES.norm: names[ends[0]] if ends else -1, **heads, _NAMES.embedding[0]: 0}
    unknown = next((module for module in wanted if module not in names), None)
    if unknown is not None:
        raise UsageError(f"{path}: module {unknown[:SHOWN]!r} is none of the profile's layers")
    placed = [sorted({names[module] for module in part if module != _ROTARY}) for part in parts]
    if [index for part in placed for index in part] != list(range(len(layers))):
        raise UsageError(
            f"{path}: module_fqns_per_model_part does not have all layers of the profile, each once, in order"
        )
    return [len(part) for part in placed]


def _checked_parts(parts: object, path: Path) -> list[list[str]]:
    if not isinstance(parts, list | tuple) or not parts:
        raise FileError(f"{path}: states no module_fqns_per_model_part, or not as a list that is written out")
    found = [list(part) if isinstance(part, list | tuple) else [part] for part in parts]
    if not all(isinstance(module, str) for part in found for module in part):
        raise FileError(f"{path}: module_fqns_per_model_part: expected lists of names")
    return found


def _count(values: Mapping[str, Any], name: str, path: Path, default: int = 1) -> int:
    value = values.get(name, default)
    if type(value) is not int or abs(value) >= 2**31:
        raise FileError(f"{path}: {name}: expected a number below 2**31, found {value_text(value)}")
    return value


def _values_of(text: str, path: Path) -> dict[str, Any]:
    """Return the values of the sections for parallelism and training, by their names."""
    if path.suffix not in (".toml", ".json"):
        return _python_values(text, path)
    content = parse_json(text, path) if path.suffix == ".json" else parse_toml(text, path)
    sections = [content.get(name) for name in ("parallelism", "training")] if isinstance(content, dict) else []
    return {name: value for section in sections if isinstance(section, dict) for name, value in section.items()}


_MAX_PYTHON_LETTERS = 2**18
"""Its tree takes 500 times as much memory."""


def _python_values(text: str, path: Path) -> dict[str, Any]:
    """Return what a Python file assigns to attributes, or passes by keyword, where it is written out."""
    if len(text) > _MAX_PYTHON_LETTERS:
        raise FileError(
            f"{path}: {len(text):,} letters are too many for a configuration (at most {_MAX_PYTHON_LETTERS:,})"
        )
    try:
        with warnings.catch_warnings():
            # Of text that it only runs with a warning.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FileError(f"{path}: not Python: {str(error)[:SHOWN]}") from error
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        pairs = []
        if isinstance(node, ast.Call):
            pairs = [(each.arg, each.value) for each in node.keywords]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            pairs = [(node.targets[0].attr, node.value)]
        for name, value in pairs:
            try:
                found[name or ""] = ast.literal_eval(value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                # A name, a key that cannot be hashed, or a nest.
                continue
    return found
