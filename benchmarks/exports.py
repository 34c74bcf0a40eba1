"""Exports: what other trainers make of plans that autopar wrote for them.

    make exports

Plans of equal widths are drawn and exported in this environment; torchtitan, Megatron-LM's core, DeepSpeed, accelerate
and Kubeflow's schema read them in one of their own (`export_targets.py`, pinned in `exports.txt`). torch's pipelining
trains the GPT example here, and shells read the scripts, one of which is run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir
from itertools import product
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "harness")]

# ruff: noqa: E402
import autopar
from autopar import examples
from autopar.api.exports import TARGETS, export_plan
from autopar.formats.cluster import Cluster
from autopar.formats.expressible import grid_of
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.schedules import SCHEDULES
from equal_plans import equal_plan, llama_profile, random_equal, stops
from exported_stages import largest_differences
from machine import Watch
from priced_teams import teams_of

DRAWN = 200
EXAMPLES = Path(examples.__file__).parent
LLAMA = {"architectures": ["LlamaForCausalLM"]}
BASES = {"llama3_8b": (32, 4096), "llama3_70b": (80, 8192), "llama3_405b": (126, 16384)}
"""Blocks and width of torchtitan's configurations."""
SIZES = (1, 1, 2, 4)
"""Of teams."""
Case = dict[str, Any]


def written(
    name: str,
    planned: tuple[Plan, Profile, Cluster],
    folder: Path,
    model: Mapping[str, object] = LLAMA,
    **options: Any,  # noqa: ANN401
) -> list[str]:
    """Write an export into a folder of its own, and return the paths of its files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model))
    plan, profile, cluster = planned
    hf = plan.model.model_copy(update={"source": "hf:config.json", "sequence": 64})
    plan = plan.model_copy(update={"model": hf})
    made = export_plan(name, (plan, profile, cluster), folder / "plan.json", folder / TARGETS[name].file, **options)
    for file in made.files:
        (folder / file.name).write_text(file.text)
    return [str(folder / file.name) for file in made.files]


def in_teams(plan: Plan, seed: int) -> Plan:
    """Return a plan whose replicas are run by teams of one size, half of which keep slices of the sequence."""
    return teams_of(plan, seed, sizes=(SIZES[seed % len(SIZES)],), slices=float(seed // len(SIZES) % 2))


def megatron(folder: Path) -> Iterator[Case]:
    """Yield drawn plans with their blocks of every device, chunk by chunk; and some that recompute."""
    plans = [random_equal(seed, ("1f1b", "interleaved")) for seed in range(DRAWN)]
    profile = llama_profile()
    for again in ((1, 2, 7, 8), range(1, 13)):
        plan, cluster = equal_plan(profile, "1f1b", 2, 2, 4, recompute=again, shard="optimizer")
        plans.append((plan.model_copy(update={"precision": "bf16"}), profile, cluster))
    for at, planned in enumerate(plans):
        plan = in_teams(planned[0], at)
        files = written("megatron", (plan, *planned[1:]), folder / str(at))
        own = [[sum("layers" in name for name in plan.stages[at].layers) for at in chunks] for chunks in plan.groups]
        again = any(stage.recompute for stage in plan.stages)
        yield {"files": files, "blocks": own, "recomputes": again, **grid_of(plan)._asdict()}


def torchtitan(folder: Path) -> Iterator[Case]:
    """Yield drawn plans of six blocks, as many as torchtitan's debug Llama has, with their layers by stage."""
    for seed in range(DRAWN):
        schedules = tuple(SCHEDULES) if seed % 2 else ("gpipe", "1f1b", "interleaved")
        plan, profile, cluster = random_equal(seed, schedules, blocks=6)
        if len(plan.groups) == 1:
            continue
        plan = in_teams(plan, seed)
        schedule_file = {"schedule_file": str(folder / str(seed) / "own.csv")} if seed % 2 else {}
        files = written("torchtitan", (plan, profile, cluster), folder / str(seed), **schedule_file)
        grid = grid_of(plan)
        yield {
            "files": files[:1],
            "stops": stops(plan),
            "placed": [list(each) for each in plan.groups],
            "ranks": grid.ranks,
            **grid._asdict(),
        }


def torchtitan_bases(folder: Path) -> Iterator[Case]:
    """Yield plans of torchtitan's own Llama 3, with every sort of degrees: its configurations have some already."""
    for (base, (blocks, width)), (groups, shard) in product(
        BASES.items(), ((1, "parameters"), (1, "none"), (2, "none"), (4, "optimizer"))
    ):
        profile = llama_profile(blocks)
        for size, slices in ((1, 0.0), (2, 0.0), (8, 0.0), (8, 1.0)):
            plan, cluster = equal_plan(profile, "1f1b", groups, 2, shard=shard)  # type: ignore[arg-type]
            plan = teams_of(plan, 0, sizes=(size,), slices=slices)
            name = f"{base}_{groups}_{shard}_{size}_{slices:g}"
            files = written("torchtitan", (plan, profile, cluster), folder / name, {**LLAMA, "hidden_size": width})
            grid = grid_of(plan)
            yield {"files": files, "base": base, "name": name, "ranks": grid.ranks, **grid._asdict()}


def deepspeed(folder: Path) -> Iterator[Case]:
    """Yield pipelines, and single stages of every sharding."""
    for seed in range(DRAWN):
        plan, profile, cluster = random_equal(seed, ("1f1b",))
        files = written("deepspeed", (plan, profile, cluster), folder / str(seed))
        yield {"files": files, "stops": stops(plan), "batch": plan.batch, **grid_of(plan)._asdict()}
    profile = llama_profile()
    for shard in ("optimizer", "gradients", "parameters"):
        plan, cluster = equal_plan(profile, "1f1b", 1, 4, 2, shard=shard)  # type: ignore[arg-type]
        files = written("deepspeed", (plan, profile, cluster), folder / shard)
        yield {"files": files, "stops": stops(plan), "batch": plan.batch, **grid_of(plan)._asdict()}


def accelerate(folder: Path) -> Iterator[Case]:
    """Yield single stages that divide nothing, gradients and parameters, with and without recomputation."""
    profile = llama_profile()
    for shard in ("none", "gradients", "parameters"):
        for again in (range(0), range(1, 13)) if shard != "none" else (range(0),):
            plan, cluster = equal_plan(profile, "1f1b", 1, 4, 2, shard=shard, recompute=again)  # type: ignore[arg-type]
            plan = plan.model_copy(update={"device_type": "cuda", "precision": "bf16"})
            files = written("accelerate", (plan, profile, cluster), folder / f"{shard}{len(again)}")
            yield {"files": files, "shard": shard, "recomputes": bool(again), "replicas": 4}


def launches(folder: Path, name: str) -> Iterator[Case]:
    """Yield launches on one machine and on several."""
    profile = llama_profile()
    for device, machines in (("cuda", 1), ("cuda", 2), ("cpu", 2), ("cuda", 4)):
        plan, cluster = equal_plan(profile, "1f1b", 2, 2)
        devices = [each.model_copy(update={"node": at * machines // 4}) for at, each in enumerate(cluster.devices)]
        planned = plan.model_copy(update={"device_type": device})
        files = written(
            name,
            (planned, profile, cluster.model_copy(update={"devices": tuple(devices)})),
            folder / f"{device}{machines}",
        )
        yield {"files": files}


def shells(folder: Path) -> dict[str, object]:
    """Return how many scripts a shell takes, and what running one of them on this machine ends with."""
    scripts = [each["files"][0] for name in ("torchrun", "slurm") for each in launches(folder / name, name)]
    megatron_scripts = [str(path) for path in (folder / "megatron").rglob("*.sh")]
    for script in (*scripts, *megatron_scripts):
        subprocess.run(["bash", "-n", script], check=True)
    shutil.copy(EXAMPLES / "mlp.py", folder)
    with chdir(folder):
        profile = autopar.profile("mlp.py", 64, budget_s=0.5)
        plan = autopar.plan(profile, autopar.links(ranks=2), stages=f"0-2:1,3-{len(profile.layers) - 1}:1")
        plan.save("plan.json")
        Path("torchrun.sh").write_text(autopar.export(plan, "torchrun").text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "torchrun.sh", "--steps", "2"],
        cwd=folder,
        env={**os.environ, "PATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return {"scripts": len(scripts) + len(megatron_scripts), "torchrun_exit_code": ran.returncode}


def targets(folder: Path, python: str) -> dict[str, object]:
    """Return what the other trainers say, from their own environment."""
    every = megatron, torchtitan, torchtitan_bases, deepspeed, accelerate
    cases = {each.__name__: list(each(folder / each.__name__)) for each in every}
    cases["kubernetes"] = list(launches(folder / "kubernetes", "kubernetes"))
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("export_targets.py")
    subprocess.run([python, str(script), str(folder)], check=True, timeout=550)
    found: dict[str, object] = json.loads((folder / "found.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", required=True, help="Python of the environment that has the trainers.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch = Watch()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {"targets": targets(folder, arguments.targets), "shells": shells(folder)}
        (folder / "torch").mkdir()
        example = EXAMPLES / "gpt.py"
        found["torch_gradients"] = largest_differences(example, folder / "torch")
    watch.record(found, arguments.json)


if __name__ == "__main__":
    main()
