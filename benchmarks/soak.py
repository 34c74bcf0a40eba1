"""Does training leak, and does a run that is stopped leave anything behind?

    python benchmarks/soak.py --steps 500 --stops 50 --json benchmarks/results/soak.json

`--steps`: three ranks (stages of one and two replicas) train that long; every tenth of the way, what the process holds
and the bytes of all tensors that are alive are noted. `--stops`: `autopar run` is started that often, and its process
or one of its ranks, drawn by chance, is sent KILL, TERM or INT at a moment drawn by chance, from the interpreter's
start on. Then no process of the run may be there, found by an environment variable that all of them inherit; nor may a
temporary folder, but that of a run whose own process was killed: the next one removes it.
`--faults`: so many faults, of all kinds in turn, befall runs that save checkpoints and are gone on with
(`fault_drills.py`), under plans of all kinds; none may be silent, lose a checkpoint or more than two intervals of
steps, or end with other parameters than an undisturbed run, bit for bit; 97 of 100 must be blamed on what they befell.
`--add` counts those of another `--seed` with those that the file has:

    python benchmarks/soak.py --steps 0 --stops 0 --faults 100 --seed 1 --add --json benchmarks/results/faults.json
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.capture import load
from autopar.capture.layers.export import capture
from autopar.capture.model.effects import StorageTracker
from autopar.formats.plan import Plan
from autopar.ranks.context import RankContext
from autopar.ranks.pool import RankPool
from autopar.ranks.scratch import Scratch
from autopar.runtime.start.worker import build
from autopar.runtime.start.workspace import Workspace
from cut import cut
from fault_drills import drills
from machine import Watch, commit_of

FOLDER = Path(__file__).parent
MODEL = FOLDER.parent / "examples" / "mlp.py"
WIDTHS, MICRO_BATCHES, ROWS = (1, 2), 4, 8
RANKS = sum(WIDTHS)
MARK = "AUTOPAR_SOAK"
SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
SETTLED = 100
"""Steps until allocators have what they need."""
GROWTH_BYTES = 4 * 2**20
"""What a process may hold more in the end than when it was settled."""
LONGEST_S = 120.0
LATEST_S = 10.0
"""Moments are drawn up to here: of half of the runs, from when all ranks are there."""


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    plan = _plan()
    result: dict[str, Any] = {}
    if arguments.steps:
        result["steady"] = _steady(plan, arguments.steps)
    if arguments.stops:
        result["stops"] = _stops(plan, arguments.stops, arguments.seed)
    if arguments.faults:
        result["faults"] = _faults(arguments.faults, arguments.seed, arguments.json if arguments.add else None)
    watch.record(result, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="count the faults that --json has, of other seeds, too")
    return parser.parse_args()


def _faults(count: int, seed: int, earlier: Path | None) -> dict[str, Any]:
    """Drill so many faults; count them with those that a file has."""
    before = json.loads(earlier.read_text())["faults"] if earlier else {"runs": [], "drills": []}
    if seed in [each["seed"] for each in before["runs"]]:
        sys.exit(f"{earlier} has faults of seed {seed}; `--seed` gives others")
    now = {"seed": seed, "faults": count, "date": datetime.date.today().isoformat(), "commit": commit_of(FOLDER)}
    found = [*before["drills"], *(each._asdict() for each in drills(count, seed))]
    return {
        "faults": len(found),
        "runs": [*before["runs"], now],
        "wrong": [each for each in found if each["faults_found"]],
        "blamed_right": round(sum(each["blamed"] for each in found) / len(found), 3),
        "blamed_wrong": [each for each in found if not each["blamed"]],
        "most_lost_steps": max(each["lost_steps"] for each in found),
        "drills": found,
    }


def _plan() -> Plan:
    user = load(str(MODEL))
    return cut(capture(user, user.build(0)), user, "1f1b", WIDTHS, MICRO_BATCHES, ROWS)


def _steady(plan: Plan, steps: int) -> dict[str, Any]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder, RankPool(len(plan.devices)) as pool:
        Workspace(Path(folder)).prepare(load(str(MODEL)), plan, None)
        arguments = {"plan": plan.dumps(), "workspace": folder, "steps": steps}
        ranks: list[Any] = pool.run("soak:train", arguments)
    grown = [rank[-1]["resident_bytes"] - _settled(rank)["resident_bytes"] for rank in ranks]
    tensors = [rank[-1]["tensor_bytes"] - _settled(rank)["tensor_bytes"] for rank in ranks]
    flat = max(grown) <= GROWTH_BYTES and not any(tensors)
    return {"steps": steps, "grown_bytes": grown, "grown_tensor_bytes": tensors, "flat": flat, "ranks": ranks}


def _settled(noted: list[dict[str, int]]) -> dict[str, int]:
    return next((each for each in noted if each["step"] >= SETTLED), noted[-1])


def train(context: RankContext, arguments: Mapping[str, Any]) -> list[dict[str, int]]:
    """Train as a rank; return what it held, every tenth of the way."""
    plan = Plan.parse(arguments["plan"], Path("plan.json"))
    user, workspace = load(str(MODEL)), Workspace(Path(arguments["workspace"]))
    noted = []
    graph = workspace.graph(user, plan)
    with StorageTracker() as tracker:
        job = build(context, plan, user, graph, workspace)
        for step in range(arguments["steps"]):
            job.step(step)
            if (step + 1) % max(1, arguments["steps"] // 10) == 0:
                gc.collect()
                held = {"resident_bytes": _resident_bytes(), "tensor_bytes": int(tracker.alive_bytes)}
                noted.append({"step": step + 1, **held})
        job.finish()
    return noted


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _stops(plan: Plan, count: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "scratch").mkdir()
        plan.model_copy(update={"model": plan.model.model_copy(update={"source": os.path.relpath(MODEL, here)})}).save(
            here / "plan.json"
        )
        for number in range(count):
            rows.append(_stop(here, f"{os.getpid()}-{number}", chance))
            sys.stderr.write(f"{number + 1}: {rows[-1]}\n")
        os.environ["TMPDIR"] = str(here / "scratch")
        tempfile.tempdir = None
        Scratch("last").close()
        folders = len(list((here / "scratch").iterdir()))
    return {
        "stops": count,
        "processes_left": sum(row["processes_left"] for row in rows),
        "folders_left": folders + sum(row["folders_left"] for row in rows if row["left_by"] != "killed itself"),
        "slowest_end_s": max(row["end_s"] for row in rows),
        "runs": rows,
    }


def _stop(here: Path, mark: str, chance: random.Random) -> dict[str, Any]:
    """Start a run, stop it, and count what it left."""
    environment = {**os.environ, MARK: mark, "TMPDIR": str(here / "scratch")}
    command = [sys.executable, "-m", "autopar", "run", "plan.json", "--steps", "1000000", "--report", f"{mark}.json"]
    before = set((here / "scratch").iterdir())
    run = subprocess.Popen(command, cwd=here, env=environment, stderr=subprocess.PIPE, text=True)
    if chance.random() < 0.5:
        _wait_for(mark, 1 + RANKS, run)
    time.sleep(chance.uniform(0.0, LATEST_S))
    ranks = [process for process in _marked(mark) if process != run.pid]
    victim = chance.choice([run.pid, *ranks]) if chance.random() < 0.7 or not ranks else run.pid
    name = chance.choice(list(SIGNALS))
    os.kill(victim, SIGNALS[name])
    stopped_s = time.monotonic()
    said = run.communicate(timeout=LONGEST_S)[1]
    while _marked(mark) and time.monotonic() < stopped_s + LONGEST_S:
        time.sleep(0.05)
    end_s = time.monotonic() - stopped_s
    itself = victim == run.pid
    return {
        "signal": name,
        "victim": "run" if itself else "rank",
        "ranks": len(ranks),
        "exit": run.returncode,
        "end_s": round(end_s, 2),
        "processes_left": len(_marked(mark)),
        "folders_left": len(set((here / "scratch").iterdir()) - before),
        "left_by": "killed itself" if itself and name == "KILL" else "ended",
        "said": re.sub(r"\s+", " ", said.strip().splitlines()[-1] if said.strip() else "")[:200],
    }


def _wait_for(mark: str, processes: int, run: subprocess.Popen[str]) -> None:
    """Wait until a run has so many processes, unless it ends before."""
    begun_s = time.monotonic()
    while len(_marked(mark)) < processes and run.poll() is None and time.monotonic() < begun_s + LONGEST_S:
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    """Return the processes that inherited a mark, zombies aside."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes() + b"\0":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


if __name__ == "__main__":
    main()
