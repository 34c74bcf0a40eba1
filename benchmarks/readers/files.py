"""Files: a good one of every kind, small, and what reads it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar.capture.model.huggingface import PREFIX, read_configured
from autopar.code import code_of_file
from autopar.formats.document import read_text
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.program import Program
from autopar.formats.references import kind_of
from autopar.formats.report import RankTimes, Report, StepTimes
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import read_cluster
from autopar.interop.pipedream import pipedream_profile
from autopar.planner import plan, simulate
from autopar.profiler.calibrate import read_runs
from autopar.runtime.checkpoint import weights
from autopar.schedules.expand import expand
from instances import instance
from reproductions.piper_files import piper_profile

__all__ = ["READERS", "good_files"]


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


READERS = {
    "profile": Reader("profile.json", Profile.load),
    "plan": Reader("plan.json", Plan.load),
    "cluster": Reader("cluster.json", read_cluster),
    "described cluster": Reader("lab.toml", read_cluster),
    "program": Reader("program.json", Program.load),
    "trace": Reader("trace.json", Timeline.load),
    "report": Reader("report.json", Report.load),
    "any": Reader("any.json", kind_of),
    "runs": Reader("runs.csv", read_runs),
    "PipeDream": Reader("graph.txt", lambda path: pipedream_profile(read_text(path, "PipeDream"), path, 4)),
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
        "any": planned.dumps(),
        "runs": RUNS,
        "PipeDream": GRAPH,
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
