"""accelerate: a plan of a single stage as the YAML of Hugging Face's accelerate, which has no pipelines.

``autopar plan --max-stages 1`` plans a single stage. Replicas that divide nothing are DDP; those that divide gradients
or parameters are FSDP2 on GPUs, which reshards parameters behind forwards, or not, wrapped by the class of the blocks,
with all blocks recomputed or none (`accelerate/commands/config/config_args.py`, `accelerate/utils/fsdp_utils.py`).
Accumulation is said in your script, as the head shows: with ``sync_each_batch``, since FSDP2's gradients are whole
while they wait. Where autopar has no table for the model's class, the file says what to fill in.

Tried: its configuration reads the YAML, and its FSDP plugin the keys in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.expressible import Expressible, grid_of, recomputation_of
from autopar.interop.target import BLOCKS, ExportFile, ExportSubject, Target, comment, heading, nodes_of, parts_of


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield the YAML."""
    grid = grid_of(subject.plan)
    plugin = f"GradientAccumulationPlugin(num_steps={grid.micro_batches}, sync_each_batch={grid.shard != 'none'})"
    use = [
        f"in your script: Accelerator(gradient_accumulation_plugin={plugin}), and {grid.rows} samples from the data "
        "loader of every process",
        f"accelerate launch --config_file {target.file} --machine_rank ... --main_process_ip ... train.py",
        *_wrap_note(subject),
    ]
    lines = "".join(f"{each}\n" for each in _lines(subject))
    yield ExportFile(target.file, comment([*heading(subject, target), *use]) + lines)


def _lines(subject: ExportSubject) -> Iterator[str]:
    plan, grid = subject.plan, grid_of(subject.plan)
    sharded = grid.shard != "none"
    on_cpu = plan.device_type == "cpu"
    not_sharded = "NO" if grid.pipelines == 1 else "MULTI_CPU" if on_cpu else "MULTI_GPU"
    yield "compute_environment: LOCAL_MACHINE"
    yield f"distributed_type: {'FSDP' if sharded else not_sharded}"
    yield f"num_machines: {len(nodes_of(subject))}"
    yield f"num_processes: {grid.pipelines}"
    yield f"mixed_precision: {'no' if plan.precision == 'fp32' else plan.precision}"
    if on_cpu:
        yield "use_cpu: true"
    if sharded:
        yield "fsdp_config:"
        yield "  fsdp_version: 2"
        yield f"  fsdp_reshard_after_forward: {'true' if grid.shard == 'parameters' else 'false'}"
        yield "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        if subject.architecture in BLOCKS:
            yield f"  fsdp_transformer_layer_cls_to_wrap: {BLOCKS[subject.architecture]}"
        again = recomputation_of(plan, subject.blocks) == "blocks"
        yield f"  fsdp_activation_checkpointing: {'true' if again else 'false'}"


def _wrap_note(subject: ExportSubject) -> Iterator[str]:
    if grid_of(subject.plan).shard == "none" or subject.architecture in BLOCKS:
        return
    parts = parts_of(subject.profile)
    where = "the layers" if parts is None else f"{parts.blocks_list}.*"
    yield (
        f"autopar has no table for this model: set fsdp_transformer_layer_cls_to_wrap to the class of {where}, unless "
        "the model's _no_split_modules names it"
    )


def _adjust(expressible: Expressible, subject: ExportSubject) -> Expressible:
    """Return what can be expressed of a plan's devices: accelerate's FSDP is for GPUs."""
    on_gpus = subject.plan.device_type == "cuda"
    return expressible if on_gpus else expressible._replace(single_stage_shards=("none",), recompute=("none",))


TARGET = Target(
    version="accelerate 1.15.0",
    trial="its configuration took such files",
    file="accelerate.yaml",
    write=write,
    expressible=Expressible(
        "accelerate",
        (),
        single_stage_shards=("none", "gradients", "parameters"),
        recompute=("none", "blocks"),
        recompute_needs_shards=True,
        most_stages=1,
    ),
    adjust=_adjust,
)
