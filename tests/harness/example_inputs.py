"""Files that examples in docstrings read: profiles of a GPT, and files of other systems."""

import json
from pathlib import Path

from equal_plans import llama_profile

GRAPH = """\
node1 -- Input -- forward_compute_time=0, backward_compute_time=0, activation_size=100, parameter_size=0
node2 -- LSTM(4, 4) -- forward_compute_time=1.5, backward_compute_time=3, activation_size=64, parameter_size=40
node3 -- Linear(4, 2) -- forward_compute_time=1, backward_compute_time=2, activation_size=32, parameter_size=32
\tnode1 -- node2
\tnode2 -- node3
"""
TORCHTITAN = """\
[training]
local_batch_size = 8
[parallelism]
data_parallel_shard_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
module_fqns_per_model_part = [
    ["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "lm_head"],
]
"""


def write_inputs(folder: Path) -> None:
    """Write them into a folder."""
    llama_profile(4).save(folder / "llama.json")
    for name, kind in (("h100.json", "H100-SXM"), ("a100.json", "A100-80G")):
        profile = llama_profile(4)
        device = profile.device.model_copy(update={"name": kind})
        profile.model_copy(update={"device": device}).save(folder / name)
    (folder / "graph.txt").write_text(GRAPH)
    (folder / "train.toml").write_text(TORCHTITAN)
    (folder / "bert.json").write_text(json.dumps(_piper()))


def _piper() -> dict[str, object]:
    """Return Piper's file of two layers, of which two devices may run each together."""

    def ways(forth: dict[str, float], back: dict[str, float]) -> dict[str, object]:
        sizes = {"parameterSize": 40.0, "memoryUsageA": 100, "memoryUsageB": 90}
        shared = {"id": "vanilla", **sizes, "syncTimeFw": forth, "syncTimeBw": back}
        return {"1": [{**shared, "timePerSample": 0.6}], "2": [{**shared, "timePerSample": 0.4}]}

    nodes = [
        {"id": 0, "name": "block", "TMPCs": ways({}, {"1": 16})},
        {"id": 1, "name": "head", "TMPCs": ways({"0": 16}, {})},
    ]
    edges = [{"sourceId": 0, "destId": 1, "communicationCost": 64.0}]
    limits = {"maxDevices": 8, "maxMemoryPerDevice": 1e9, "bandwidth": 25e9, "mbsInBatch": 12}
    return {**limits, "nodes": nodes, "edges": edges}
