"""deepspeed: a plan as DeepSpeed's JSON, and the parts of its pipeline.

The JSON states batches, accumulation, precision and ZeRO: stage 1 is ``--shard optimizer``, 2 ``gradients``, 3
``parameters``. JSON has no comments, so the head is a key, ``autopar``, that DeepSpeed does not read. A pipeline runs
by ``1f1b``, divides nothing or the optimizer's state, and recomputes all layers or none. DeepSpeed cuts pipelines
evenly by layers, parameters or classes, and takes no list of parts (`deepspeed/runtime/pipe/module.py`,
``_partition_layers``): ``deepspeed_parts.py`` has a ``PipelineModule`` of a few lines that cuts where the plan says,
and lists its layers. Without a pipeline, recomputation is the model's own matter in DeepSpeed, and refused. DeepSpeed's
bf16 keeps parameters in bfloat16 beside float32 ones; autopar's is autocast, so memory is another.

Tried: ``DeepSpeedConfig`` reads the JSON; ``PlannedPipeline`` gives every rank of a topology its bounds. Its engine was
not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate

from autopar.formats.expressible import Expressible, grid_of, recomputation_of
from autopar.interop.target import ExportFile, ExportSubject, Target, comment, heading
from autopar.ownership import SHARDS

_PARTS = """\
from deepspeed.pipe import PipelineModule

PARTS = {parts}  # the layers before which stages begin, and how many there are


class PlannedPipeline(PipelineModule):
    def _partition_layers(self, method="planned"):
        if len(self._layer_specs) != PARTS[-1] or self.num_stages != len(PARTS) - 1:
            raise ValueError(f"{{PARTS}} are parts of {{PARTS[-1]}} layers in {{len(PARTS) - 1}} stages")
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = PARTS
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
"""


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield the JSON, and of a pipeline the module that cuts it."""
    yield ExportFile(target.file, json.dumps(_configuration(subject, target), indent=2) + "\n")
    if len(subject.plan.stages) > 1:
        yield ExportFile("deepspeed_parts.py", _parts(subject, target))


def _configuration(subject: ExportSubject, target: Target) -> dict[str, object]:
    plan, grid = subject.plan, grid_of(subject.plan)
    found: dict[str, object] = {
        # JSON has no comments, and DeepSpeed does not read keys that it does not know.
        "autopar": heading(subject, target),
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": grid.rows,
        "gradient_accumulation_steps": grid.micro_batches,
        "zero_optimization": {"stage": SHARDS.index(grid.shard)},
    }
    if plan.precision != "fp32":
        found[plan.precision] = {"enabled": True}
    if recomputation_of(plan, subject.blocks) == "all":
        found["pipeline"] = {"activation_checkpoint_interval": 1}
    return found


def _parts(subject: ExportSubject, target: Target) -> str:
    plan = subject.plan
    layers = " ".join(layer.name for layer in subject.profile.layers)
    use = [
        f"PlannedPipeline(layers=[...], num_stages={len(plan.stages)}, loss_fn=...) cuts as planned; its layers "
        f"are, in this order: {layers}"
    ]
    parts = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    return comment([*heading(subject, target), *use]) + _PARTS.format(parts=parts)


TARGET = Target(
    version="DeepSpeed 0.19.8",
    trial="its configuration and its pipeline took such files",
    file="deepspeed.json",
    write=write,
    expressible=Expressible(
        "DeepSpeed",
        ("1f1b",),
        shards=("none", "optimizer"),
        single_stage_shards=SHARDS,
        recompute=("none", "all"),
        single_stage_recompute=("none",),
    ),
    cuts_layers=True,
)
