"""Files: a good one of every kind, small, and what reads it."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Callable
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from typer.exceptions import TyperException

from autopar.capture.model.huggingface import PREFIX, read_configured
from autopar.cli import app
from autopar.cli.settings import read_settings
from autopar.code import code_of_file
from autopar.errors import UsageError, printable
from autopar.formats import checkpoint
from autopar.formats.document import read_text
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.program import Program
from autopar.formats.pulls import Fill, PullLog
from autopar.formats.references import kind_of
from autopar.formats.report import BeganAction, BlackBox, RankActions, RankTimes, Report, StepTimes
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import find_cluster, read_cluster
from autopar.interop.megatron import import_layout
from autopar.interop.pipedream import pipedream_profile
from autopar.interop.torchtitan import import_torchtitan
from autopar.planner import plan, simulate
from autopar.profiler.calibrate import read_runs
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.folder import read_manifest
from autopar.schedules.expand import expand
from instances import instance
from reproductions.piper_files import piper_profile

__all__ = ["READERS", "good_files", "pieces_of"]


class Reader(NamedTuple):
    """What reads a kind of file."""

    file: str
    read: Callable[[Path], object]


def _weights(path: Path) -> object:
    weights.shapes(path.parent)
    return weights.read(path.parent, ["w", "z"])


def _configured(path: Path) -> object:
    found = read_configured(f"{PREFIX}{path}")
    return found.config(), found.task and found.dataset(None)


def _index(path: Path) -> object:
    beside = path.parent / "part.safetensors"
    if not beside.exists():
        weights.write(beside, {"w": torch.ones(2), "z": torch.ones(2, dtype=torch.complex128)}, durable=False)
    return _weights(path)


@cache
def _llama() -> Profile:
    """Return the profile of a model whose parts go by Transformers' names."""
    made = instance(0, layers=4, devices=4).profile
    modules = (("model.embed_tokens",), ("model.layers.0",), ("model.layers.1",), ("model.norm", "lm_head"))
    layers = (layer.model_copy(update={"modules": own}) for layer, own in zip(made.layers, modules, strict=True))
    return made.model_copy(update={"layers": tuple(layers)})


def _torchtitan(path: Path) -> object:
    return import_torchtitan(read_text(path, "torchtitan"), path, _llama()).options


def _layout(path: Path) -> object:
    # Typed as an argument, which holds no bytes that are not UTF-8, and no NUL.
    return import_layout(read_text(path, "layout"), _llama()).options


def _cluster_name(path: Path) -> object:
    return find_cluster(read_text(path, "name"))


def _settings(path: Path) -> object:
    """Read the options in a folder's pyproject.toml, and have two commands take them."""
    command: Any = typer.main.get_command(app)
    try:
        with chdir(path.parent):
            context = command.context_class(command, info_name="autopar")
            read_settings(context)
            return [command.commands[name].make_context(name, [], parent=context).params for name in ("plan", "run")]
    except TyperException as error:
        # The command line says it so.
        raise UsageError(printable(error.format_message())) from error


READERS = {
    "profile": Reader("profile.json", Profile.load),
    "plan": Reader("plan.json", Plan.load),
    "cluster": Reader("cluster.json", read_cluster),
    "described cluster": Reader("lab.toml", read_cluster),
    "program": Reader("program.json", Program.load),
    "trace": Reader("trace.json", Timeline.load),
    "report": Reader("report.json", Report.load),
    "black box": Reader("report.blackbox.json", BlackBox.load),
    "pulls": Reader("pulls.json", PullLog.load),
    "manifest": Reader("step-3/manifest.json", lambda path: read_manifest(path.parent)),
    "unsigned manifest": Reader("manifest.json", checkpoint.Checkpoint.load),
    "any": Reader("any.json", kind_of),
    "runs": Reader("runs.csv", read_runs),
    "PipeDream": Reader("graph.txt", lambda path: pipedream_profile(read_text(path, "PipeDream"), path, 4)),
    "torchtitan, Python": Reader("titan.py", _torchtitan),
    "torchtitan, TOML": Reader("titan.toml", _torchtitan),
    "torchtitan, JSON": Reader("titan.json", _torchtitan),
    "Megatron's layout": Reader("layout.txt", _layout),
    "cluster's name": Reader("name.txt", _cluster_name),
    "settings": Reader("settings/pyproject.toml", _settings),
    "Piper": Reader("piper.json", lambda path: piper_profile(read_text(path, "Piper"), path)),
    "weights": Reader("weights/model.safetensors", _weights),
    "index of weights": Reader("indexed/model.safetensors.index.json", _index),
    "model file": Reader("model.py", code_of_file),
    "configuration": Reader("config.json", _configured),
}
LAB = """name = "lab"
[[nodes]]
count = 2
gpus = 4
gpu = "H100-SXM"
memory = "70GiB"
price_per_hour = 12.5
[[nodes]]
gpus = 2
gpu = "V100"
rack = 1
[rack]
bandwidth = "100Gbps"
[network]
bandwidth = "10Gbps"
latency_s = 1e-4
"""
RUNS = """step_s,batch,model,devices,stages,micro_batches,schedule,recompute,cluster
0.5,32,model.py,4,"0-3:2,4-7:2",4,1f1b,none,1x8xA100-80G
0.7,64,,8,2,8,gpipe,full,
"""
SETTINGS_TOML = """\
[project]
name = "mine"
[tool.autopar]
gpus = 2
micro-batches = 4
memory = "16GiB"
[tool.autopar.plan]
min-stages = 2
exact = true
pin = ["wte,h.0 same stage"]
[tool.autopar.run]
steps = 20
last = "pad"
"""
TIMES = "forward_compute_time=1.5, backward_compute_time=3.0"
GRAPH = "\n".join(
    [
        f"node1 -- Input -- {TIMES}, activation_size=100.0, parameter_size=0",
        f"node2 -- LSTM(4, 4) -- {TIMES}, activation_size=[64.0; 8.0], parameter_size=40 -- stage_id=0",
        f"node3 -- Add -- {TIMES}, activation_size=65, parameter_size=0",
        "\tnode1 -- node2",
        "\tnode2 -- node3",
    ]
)


def _way(name: str, time_s: float, forth: dict[str, float], back: dict[str, float]) -> dict[str, Any]:
    sizes = {"parameterSize": 40.0, "memoryUsageA": 100.0, "memoryUsageB": 90}
    return {"id": name, "timePerSample": time_s, **sizes, "syncTimeFw": forth, "syncTimeBw": back}


PIPER: dict[str, Any] = {
    "maxDevices": 8,
    "maxMemoryPerDevice": 1e9,
    "bandwidth": 25e9,
    "mbsInBatch": 12,
    "nodes": [
        {"id": 7, "name": "head", "TMPCs": {"1": [_way("vanilla", 0.3, {"3": 0}, {})]}},
        {"id": 3, "name": "layer", "TMPCs": {"1": [_way("vanilla", 0.6, {}, {"7": 0})]}},
    ],
    "edges": [{"sourceId": 3, "destId": 7, "communicationCost": 64.0}],
}
CONFIGURATION = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 32,
    "vocab_size": 50,
    "pad_token_id": None,
    "task_specific_params": {"text-generation": {"do_sample": True}},
}
TITAN_TOML = """\
[training]
local_batch_size = 8
[parallelism]
data_parallel_shard_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_microbatch_size = 2
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
"""
TITAN_PYTHON = """\
from dataclasses import replace


def configure(config):
    config.parallelism = replace(
        config.parallelism,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=2,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_microbatch_size=2,
        module_fqns_per_model_part=[["tok_embeddings"], ["layers.0"], ["layers.1"], ["norm", "lm_head"]],
    )
    config.training.local_batch_size = 8
    return config
"""
MODEL = "import helper\nfrom . import other\n\n\ndef model():\n    return None\n"


def good_files() -> dict[str, bytes]:
    """Return the content of a good file of every kind."""
    made = instance(0, layers=4, devices=4)
    planned = plan(made.profile, made.cluster, made.options)
    texts = {
        "profile": made.profile.dumps(),
        "plan": planned.dumps(),
        "cluster": made.cluster.dumps(),
        "described cluster": LAB,
        "program": expand(planned).dumps(),
        "report": _report(planned).dumps(),
        "black box": _black_box().dumps(),
        "pulls": _pulls().dumps(),
        "manifest": _manifest(planned).dumps(),
        "unsigned manifest": _manifest(planned).dumps(),
        "any": planned.dumps(),
        "runs": RUNS,
        "PipeDream": GRAPH,
        "torchtitan, Python": TITAN_PYTHON,
        "torchtitan, TOML": TITAN_TOML,
        "torchtitan, JSON": json.dumps(tomllib.loads(TITAN_TOML)),
        "Megatron's layout": "Et|(t|)*1L",
        "settings": SETTINGS_TOML,
        "cluster's name": "2x4xH100+8xA100-80G:200Gbps",
        "Piper": json.dumps(PIPER),
        "model file": MODEL,
        "configuration": json.dumps(CONFIGURATION),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        simulate(planned, made.profile, made.cluster).save(folder / "trace.json")
        tensors = {"w": torch.ones(2), "z": torch.ones(2, dtype=torch.complex128)}
        weights.publish(folder, [weights.write(folder / "part.safetensors", tensors)])
        contents = {
            "trace": (folder / "trace.json").read_bytes(),
            "weights": (folder / "part.safetensors").read_bytes(),
            "index of weights": (folder / weights.INDEX).read_bytes(),
        }
    return {name: text.encode() for name, text in texts.items()} | contents


def _report(planned: Plan) -> Report:
    times = RankTimes(rank=0, stages=(0,), replica=0, compute_s=1.0, update_s=0.5, waiting_s=0.2)
    return Report(
        model="model.py",
        plan_sha256="0" * 64,
        device="cpu",
        backend="gloo",
        torch=torch.__version__,
        ranks=1,
        steps=2,
        loss=(0.5, 0.25),
        step_s=StepTimes(median=1.5, p10=1.0, p90=2.0),
        predicted_step_s=planned.predicted.step_s,
        error=0.0,
        samples_per_s=4.0,
        peak_bytes=(1000,),
        peak_kind="resident",
        bubble=0.1,
        rank_times=(times,),
        initial_weights="model(), seed 0",
    )


def _pulls() -> PullLog:
    fill = Fill(first_step=0, steps=6, taken=(((0,), (2,)), ((1,), (2,))))
    return PullLog(plan_sha256="0" * 64, fills=(fill,))


def _black_box() -> BlackBox:
    began = BeganAction(step=3, action="F0.0", before_s=0.5)
    ranks = (RankActions(rank=0, doing="stage 0, step 3, F0.0", actions=(began,)),)
    return BlackBox(message="rank 0: RuntimeError", date="2026-11-28T10:00:00+00:00", ranks=ranks)


_FILE = checkpoint.PieceFile(name="stage-00000.safetensors", bytes=100, sha256="b" * 64)
_RUN = checkpoint.SavedRun(model="model.py", batch=8, seed=0, samples=64)


def pieces_of(count: int) -> str:
    """Return the manifest of a tensor of which so many files have a column each."""
    made = instance(0, layers=4, devices=4)
    pieces = tuple(
        checkpoint.Piece(file=_FILE.name, key=f"{at}", ranges=(checkpoint.IndexRange(dim=1, start=at, stop=at + 1),))
        for at in range(count)
    )
    tensor = checkpoint.StoredTensor(kind="parameter", name="w", shape=(4, count), dtype="float32", pieces=pieces)
    part = checkpoint.RankPart(tensors=(tensor,), files=(_FILE,))
    plan_of = checkpoint.SavedPlan.of(plan(made.profile, made.cluster, made.options), torch.__version__)
    return checkpoint.merge([part], 3, _RUN, plan_of, []).dumps()


def _manifest(planned: Plan) -> checkpoint.Checkpoint:
    """Return a manifest of a tensor in four pieces, and of everything else that there may be."""
    halves = [[checkpoint.IndexRange(dim=dim, start=at, stop=at + 2) for at in (0, 2)] for dim in (0, 1)]
    pieces = tuple(
        checkpoint.Piece(file=_FILE.name, key=f"{row.start},{column.start}", ranges=(row, column))
        for row in halves[0]
        for column in halves[1]
    )
    tensor = checkpoint.StoredTensor(kind="parameter", name="w", shape=(4, 4), dtype="float32", pieces=pieces)
    group = checkpoint.ParameterGroup(parameters=("w",), settings={"lr": 0.1}, current={"lr": 0.05})
    number = checkpoint.StateNumber(parameter="w", state="step", value=3)
    part = checkpoint.RankPart(
        tensors=(tensor,),
        files=(_FILE,),
        optimizer=checkpoint.OptimizerState(kind="torch.optim.adamw.AdamW", groups=(group,), numbers=(number,)),
        scheduler=checkpoint.SchedulerState(kind="StepLR"),
        loss_scale=checkpoint.LossScaleState(value=65536.0, sound_steps=2),
    )
    keys = [checkpoint.StateKey(key="w", tensor="w"), checkpoint.StateKey(key="tied", tensor="w")]
    return checkpoint.merge([part], 3, _RUN, checkpoint.SavedPlan.of(planned, torch.__version__), keys)
