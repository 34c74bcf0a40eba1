"""A rank of torch's pipelining that takes a step of exported stages: `exported_ranks.py RANK FOLDER STORE MODEL`.

Every folder in FOLDER holds an export of a plan of four stages or eight on four ranks, `schedule.csv` and `stages.py`;
the rank leaves there what gradients its stages have, in double precision, as `gradients-RANK.pt`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 4
SAMPLES = 8


def batch_of(model: dict[str, object]) -> dict[str, torch.Tensor]:
    """Return the first samples of a model file's dataset."""
    data = model["dataset"]()  # type: ignore[operator]
    return torch.utils.data.default_collate([data[index] for index in range(SAMPLES)])  # type: ignore[no-any-return]


def plain_gradients(file: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of a plain step, by every name that a parameter goes by."""
    code = runpy.run_path(str(file))
    torch.manual_seed(0)
    model, batch = code["model"]().double(), batch_of(code)
    code["loss"](model(batch["tokens"]), batch).backward()
    return {name: each.grad for name, each in model.named_parameters(remove_duplicate=False)}


def step(folder: Path, file: Path, rank: int) -> None:
    """Take a step by the stages that a folder holds."""
    code, stages = runpy.run_path(str(file)), runpy.run_path(str(folder / "stages.py"))
    groups, width = len(stages["STAGES"]), RANKS // len(stages["STAGES"])
    # All ranks make all groups: those of every pipeline, and those of every stage's replicas.
    pipelines = [dist.new_group([at * width + replica for at in range(groups)]) for replica in range(width)]
    replicas = [dist.new_group([at * width + replica for replica in range(width)]) for at in range(groups)]
    group, rows = pipelines[rank % width], SAMPLES // width
    mine = slice(rank % width * rows, (rank % width + 1) * rows)
    batch = {f"batch.{name}": tensor[mine] for name, tensor in batch_of(code).items()}
    torch.manual_seed(0)
    graph, own, runtime = stages["build"](code["model"]().double(), torch.device("cpu"), group)
    runtime.step(**batch, target=batch["batch.targets"])
    stages["reduce"](graph, own, group, replicas[rank // width] if width > 1 else None)
    layers = [layer for stage in own for layer in stage.submod.layers]
    found = {name: each.grad for layer in layers for name, each in layer.named_parameters()}
    torch.save(found, folder / f"gradients-{rank}.pt")


def main() -> None:
    rank, folder, store, file = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        step(each, file, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
