"""Files that examples in docstrings read: profiles of a GPT, and files of other systems."""

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
