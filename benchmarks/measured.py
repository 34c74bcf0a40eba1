"""How near are predictions to runs that others have measured? Those of Megatron, NeMo, nanotron and Aceso.

    python benchmarks/measured.py --data DIR --json benchmarks/results/measured.json

The folder is that of ``AUTOPAR_DATA``. Of every run the model is estimated without a GPU, its stages and replicas are
dictated, and the planner's step and peak are held against what was measured; nothing is fitted. Runs are read with what
they used: parameters in bfloat16 with float32 gradients and a float32 copy in the optimizer; causal attention; of
Megatron and NeMo fused element-wise operators. DGX's, with context parallelism of 2, are twice the replicas of half the
tokens, each of which attends to both halves. With tensor parallelism (t > 1), what is between layers is in slices of
the sequence; nanotron's runs of that kind, which exchange while they compute, are left out. L4's are Aceso's plans of
its own operators' times, sums included, with what each recomputes; beside them stand Aceso's own prices, which tell the
peaks of both. Parts of blocks on an H100 are held against ``blocks.py``. ``vtrain.py`` has the runs of its table, by
default and fitted.

Runs of under a twentieth of the GPUs' rate are scored apart, as stalled: each takes 1.0 to 1.4 s for every micro-batch,
whatever there is to compute, and the one of 1B on eight stages was run a second time, 57 times as fast.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from statistics import mean
from typing import NamedTuple, TypeVar

import torch

import blocks
from autopar.capture import load
from autopar.capture.layers.export import capture_module
from autopar.formats.profile import Layer, PartCosts, Profile
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import find
from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas, Shard
from autopar.planner.candidate import Family
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated_run import DictatedRun
from autopar.profiler.estimate import Workload, profile_of, workload
from autopar.profiler.kernels import Kernel, KernelTable, default_constants
from autopar.profiler.subject import Subject
from machine import Watch
from reproductions.aceso import Aceso, AcesoStage, aceso_profile
from vtrain import score

STALLED = 0.05
"""Share of the GPUs' rate below which a run is scored apart."""
_ROOM = 2**40
"""Bytes of a device, so that no run is refused."""


class Model(NamedTuple):
    """A Llama by its sizes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool = False

    def config(self, sequence: int) -> dict[str, object]:
        """Return its configuration as Transformers read it."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": sequence,
        }

    @property
    def block_parameters(self) -> float:
        """Matrices of one block."""
        return (2 + 2 * self.kv_heads / self.heads) * self.hidden**2 + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> float:
        """Matrices that every token is multiplied with."""
        return self.layers * self.block_parameters + self.vocabulary * self.hidden


MODELS = {
    "llama3_70b-l12": Model(8192, 12, 64, 8, 28672, 128256),
    "Llama3.1-8B": Model(4096, 32, 32, 8, 14336, 128256),
    # huggingface/nanotron, scripts/scaling_benchmarks.py at 0e0a27e.
    "nanotron-1B": Model(2048, 16, 32, 32, 8192, 131072, tied=True),
    "nanotron-3B": Model(3072, 28, 32, 32, 8192, 131072, tied=True),
}
GPUS = {"B200-SXM": "B200", "H100-SXM-80G": "H100"}


class Way(NamedTuple):
    """How a run computed."""

    fuses: bool
    """Whether element-wise kernels in a row were one, which moves what the largest of them does."""
    meets_all: bool
    """Whether queries met all keys, and not the half before them: those of other devices, too."""
    sums_late: bool
    """Whether the gradients of a backward, in bfloat16, were only added to the sums when it was over."""


class Run(NamedTuple):
    """A run that was measured."""

    table: str
    model: str
    gpu: str
    gpus: int
    batch: int
    replicas: int
    stages: int
    micro_batch: int
    """Samples per replica."""
    sequence: int
    """Tokens of a sample on a device."""
    shard: Shard
    step_s: float
    peak_gib: float | None
    team: int = 1
    """Devices that run a replica of a stage together; of L4's plans, the most."""
    note: str = ""

    @property
    def way(self) -> Way:
        """How it computed: nanotron's operators are PyTorch's, one by one, and it adds to sums behind a backward."""
        own = self.table == "nanotron"
        return Way(fuses=not own, meets_all=bool(self.note), sums_late=own)

    @property
    def is_stalled(self) -> bool:
        """Whether its matrices take next to nothing of what the GPUs could do."""
        if self.model not in MODELS:
            return False
        flops = 6 * MODELS[self.model].parameters * self.batch * self.sequence
        return flops < STALLED * self.step_s * self.gpus * find(self.gpu).flops_per_s("bf16")

    @property
    def cluster(self) -> str:
        """The machines, with their own network."""
        nodes, fabric = self.gpus // 8, "efa" if self.table == "nanotron" else "infiniband"
        return f"{min(8, self.gpus)}x{self.gpu}" if nodes <= 1 else f"{nodes}x8x{self.gpu}:400Gbps/gpu:{fabric}"


class Found(NamedTuple):
    """What is predicted of a run."""

    run: Run
    step_s: float
    peak_gib: float

    @property
    def error(self) -> float:
        """Of the step, relative to what was measured."""
        return self.step_s / self.run.step_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published runs")
    parser.add_argument("--tables", default="b200,dgx,nanotron,l4,h100", help="of the folder")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, found = Watch(), list[Found]()
    tables = arguments.tables.split(",")
    for table in tables:
        if table == "h100":
            continue
        every = of_operators(arguments.data) if table == "l4" else map(predicted, read_runs(arguments.data, table))
        for each in every:
            found.append(each)
            sys.stderr.write(f"{each} {each.error:+.1%}\n")
    parts = scores_of_parts(arguments.data) if "h100" in tables else {}
    watch.record({"parts": parts, **scored(found)}, arguments.json)


def read_runs(folder: Path, table: str) -> list[Run]:
    """Return the runs of a table that are priced."""
    rows = _rows(folder / table / "runs.csv")
    return [_run(table, row) for row in rows if row["tp"] == "1" or table != "nanotron"]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _run(table: str, row: dict[str, str]) -> Run:
    context, gpus, batch = int(row["cp"] or 1), int(row["gpus"]), int(row["global_batch"])
    value, sequence = float(row["value"]), int(row["seq"])
    step_s = value if row["metric"] == "seconds_per_step" else batch * sequence / (value * gpus)
    sharded = "distributed optimizer" in row["note"] or "ZeRO 1" in row["note"]
    return Run(
        table=table,
        model=row["model"],
        gpu=GPUS[row["device"]],
        gpus=gpus,
        batch=batch * context,
        replicas=int(row["dp"]) * context,
        stages=int(row["pp"]),
        micro_batch=int(row["micro_batch"]),
        sequence=sequence // context,
        shard="optimizer" if sharded else "none",
        step_s=step_s,
        peak_gib=float(row["mem_gb"]) if row["mem_gb"] else None,
        team=int(row["tp"]),
        note="half the tokens for each of two devices" if context > 1 else "",
    )


def predicted(run: Run) -> Found:
    """Return what the simulator has for a run's stages, in the usual order of 1F1B."""
    profile = estimated(run.model, run.gpu, run.micro_batch, run.sequence, run.way, run.team)
    rows, cuts = run.replicas * run.micro_batch, _cuts(run, profile)
    costs = CostModel(profile, cluster_named(run.cluster), PlanOptions(batch=run.batch, memory_bytes=_ROOM))
    replicas = Replicas(shard=run.shard, team=run.team, sliced=run.team > 1).so_many(run.replicas)
    family = Family(run.batch // rows, rows, "1f1b")
    step_s, peaks = DictatedRun(costs, family, cuts, [replicas] * run.stages).predicted()
    return Found(run, step_s, (max(peaks) - profile.device.reserved_bytes) / 2**30)


def _cuts(run: Run, profile: Profile) -> tuple[int, ...]:
    """Return the ends of a run's stages: nanotron divides blocks and head by their matrices, Megatron blocks alone."""
    model = MODELS[run.model]
    blocks = [index for index, layer in enumerate(profile.layers) if re.search(r"layers\.\d+$", layer.name)]
    head = model.vocabulary * model.hidden / model.block_parameters if run.table == "nanotron" else 0.0
    shares = (stage * (model.layers + head) / run.stages for stage in range(1, run.stages))
    return (*(blocks[min(model.layers, ceil(share - 1e-9)) - 1] + 1 for share in shares), len(profile.layers))


@cache
def estimated(name: str, gpu: str, rows: int, sequence: int, way: Way, team: int) -> Profile:
    """Return a model's profile with parameters in bfloat16, and float32 gradients and masters."""
    sys.stderr.write(f"estimating {name} on {gpu}, {rows} x {sequence}\n")
    model = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(model.config(sequence)))
        user = load(f"hf:{config}", sequence=sequence)
        module = user.build(on_meta=True).to(torch.bfloat16)
        graph = capture_module(module, user.load_batch(user.dataset(), range(2)), user.loss)
    subject = Subject(user, module, graph, "bf16", ())
    found = _as_run(workload(subject, find(gpu), rows, sizes=[rows], tensor=team), way)
    profile = profile_of(subject, found, rows, default_constants(find(gpu)))
    sizes = 4 * model.hidden * rows * sequence, 3 if way.sums_late else 2
    layers = tuple(_with_parts(each, *sizes, tied=model.tied) for each in profile.layers)
    tied = tuple(each.model_copy(update={"bytes": 2 * each.bytes}) for each in profile.tied)
    return profile.model_copy(update={"layers": layers, "tied": tied})


_Costed = TypeVar("_Costed", Layer, PartCosts)


def _with_parts(layer: Layer, copy_bytes: int, gradients: int, *, tied: bool) -> Layer:
    """Return a layer and its parts on ranks of teams as they were trained; see :func:`_as_trained`."""
    splits = []
    for split in layer.splits:
        sizes = {"part": copy_bytes, "sliced": copy_bytes // split.count}
        own = {name: (getattr(split, name), size) for name, size in sizes.items()}
        parts = {
            name: _as_trained(part, size, gradients, tied=tied)
            for name, (part, size) in own.items()
            if part is not None
        }
        splits.append(split.model_copy(update=parts))
    return _as_trained(layer, copy_bytes, gradients, tied=tied).model_copy(update={"splits": tuple(splits)})


def _as_trained(layer: _Costed, copy_bytes: int, gradients: int, *, tied: bool) -> _Costed:
    """Return a layer, or its part, of bfloat16 parameters, with sums of gradients in float32 and a copy to optimize.

    Beside sums of gradients in bfloat16, which are read and written, those in float32 move 10 bytes for 6, and beside
    AdamW's 14 bytes a number 30. Of tied parameters the planner knows one size: they count as float32, and the copy in
    the optimizer is as much smaller. Fused norms keep no copy in float32, of ``copy_bytes``, of what they are given.
    ``gradients`` are kept, in sizes of bfloat16: sums, and what is yet to be added to them.
    """
    state = {"optimizer_bytes": layer.optimizer_bytes * 3}
    if tied:
        state = {"parameters_bytes": 2 * layer.parameters_bytes, "optimizer_bytes": layer.optimizer_bytes * 5 // 2}
    costs = tuple(
        cost.model_copy(update={"saved": tuple(each for each in cost.saved if each.bytes != copy_bytes)})
        for cost in layer.costs
    )
    return layer.model_copy(
        update={
            "costs": costs,
            "trainable_bytes": 2 * layer.trainable_bytes,
            "gradient_bytes": gradients * layer.gradient_bytes,
            "summand_bytes": 2 * layer.summand_bytes,
            "accumulate_s": layer.accumulate_s * 10 / 6,
            "update_s": layer.update_s * 30 / 14,
            **state,
        }
    )


def _as_run(load_: Workload, way: Way) -> Workload:
    """Return a model's work with the kernels that a run had."""
    own = {id(layer): layer for work in load_.works for layer in work.layers}
    every = [*own.values(), *(work for part in load_.parts for work in part.works)]
    passes = "forward", "backward", "backward_input", "accumulate"
    groups = [_kernels(getattr(work, name), way) for work in every for name in passes]
    return replace(load_, table=KernelTable.of(groups, load_.gpu))


def _kernels(kernels: Sequence[Kernel], way: Way) -> list[Kernel]:
    found: list[Kernel] = []
    for kernel in kernels:
        last = found[-1] if way.fuses and found and found[-1].kind == kernel.kind == "other" else None
        if last is not None:
            read, written = max(last.read_bytes, kernel.read_bytes), max(last.written_bytes, kernel.written_bytes)
            found[-1] = last._replace(read_bytes=read, written_bytes=written)
        elif kernel.kind == "attention" and way.meets_all:
            # Of a causal mask, what is skipped is not counted.
            found.append(kernel._replace(flops=2 * kernel.flops))
        else:
            found.append(kernel)
    return found


def of_operators(folder: Path) -> Iterator[Found]:
    """Yield what the simulator has for Aceso's plans of operators that were measured on L4, and Aceso's own prices."""
    for row in _rows(folder / "l4" / "runs.csv"):
        said = json.loads((folder / "l4" / "plans" / f"{row['plan']}.json").read_text())
        yield from _of_operators(
            row, AcesoStage.of_plan(said), _aceso(folder / "l4" / "operators", row["model"], said["num_layers"])
        )


@cache
def _aceso(folder: Path, size: str, blocks: int) -> Aceso:
    return Aceso.read(folder, size, blocks)


def _of_operators(row: dict[str, str], stages: Sequence[AcesoStage], model: Aceso) -> Iterator[Found]:
    """Yield what is predicted of one plan, whose operators stand for layers; nothing updates parameters."""
    gpus, batch, rows = int(row["gpus"]), int(row["batch"]), int(row["micro_batch"])
    costs = CostModel(
        aceso_profile(model), model.cluster(gpus, per_node=8), PlanOptions(batch=batch, memory_bytes=_ROOM)
    )
    replicas = [Replicas(team=each.team).so_many(each.replicas) for each in stages]
    again = frozenset(at for each in stages for at in each.recompute)
    family = Family(batch // rows, rows, "1f1b")
    step_s, _ = DictatedRun(costs, family, [each.stop for each in stages], replicas, again).predicted()
    # Of plans on several nodes, one node's peaks are known.
    known = [int(each) for each in row["reserved_mb"].split()]
    run = Run(
        table="l4",
        model=row["model"],
        gpu="L4",
        gpus=gpus,
        batch=batch,
        replicas=1,
        stages=len(stages),
        micro_batch=rows,
        sequence=2048,
        shard="none",
        step_s=float(row["step_ms"]) / 1e3,
        peak_gib=max(known) / 1024 if len(known) == len(stages) else None,
        team=max(each.team for each in stages),
    )
    peak_gib = max(model.peak_bytes(stages, rows)) / 2**30
    yield Found(run, step_s, peak_gib)
    yield Found(run._replace(table="l4, by Aceso"), model.step_s(stages, rows, batch, per_node=8), peak_gib)


def scores_of_parts(folder: Path) -> dict[str, dict[str, float]]:
    """Return how far parts of a Transformer's block are from what an H100 took, by what binds them."""
    path = folder / "h100" / "measured.csv"
    errors: dict[str, list[float]] = {"kernels": [], "launches": []}
    for row, found in blocks.compare(path, blocks.measured_launches(path)):
        bound = "launches" if found.launches_s > found.kernels_s else "kernels"
        errors[bound].append(found.both_s / float(row["forward_backward_s"]) - 1)
    return {
        f"h100, bound by {bound}": {
            "parts": len(each),
            "error_mean": round(mean(map(abs, each)), 4),
            "bias": round(mean(each), 4),
            "error_worst": round(max(map(abs, each)), 4),
        }
        for bound, each in errors.items()
    }


def scored(found: Sequence[Found]) -> dict[str, object]:
    """Return the scores of every table, of one node and of several, and of all of them."""
    groups = {table: [each for each in found if each.run.table == table] for table in {e.run.table for e in found}}
    parts: dict[str, object] = {}
    for table, own in sorted(groups.items()):
        for where, some in (
            ("", own),
            (", one node", [each for each in own if each.run.gpus <= 8]),
            (", 2 to 16 nodes", [each for each in own if 8 < each.run.gpus <= 128]),
            (", t > 1", [each for each in own if each.run.team > 1]),
        ):
            going = [each for each in some if not each.run.is_stalled]
            if some:
                stalled = len(some) - len(going)
                own_scores = _scores(going) | ({"stalled": stalled, "with_them": _scores(some)} if stalled else {})
                parts[f"{table}{where}"] = own_scores
    rows = [{**each.run._asdict(), **each._asdict(), "run": None, "error": round(each.error, 4)} for each in found]
    return {"scores": parts, "runs": rows}


def _scores(found: Sequence[Found]) -> dict[str, float]:
    peaks = [each.peak_gib / each.run.peak_gib - 1 for each in found if each.run.peak_gib]
    scores = score([each.run for each in found], [each.step_s for each in found]) if found else {}
    memory = {"memory_mean": round(sum(map(abs, peaks)) / len(peaks), 4)} if peaks else {}
    return {"runs": len(found), **scores, **memory}


if __name__ == "__main__":
    main()
