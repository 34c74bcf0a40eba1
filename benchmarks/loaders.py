"""Do loaders keep up, are mini-batches the same with them, and is nothing left behind when something is killed?

    python benchmarks/loaders.py --json benchmarks/results/loaders.json

- ``pace``: a dataset that sleeps 5 ms a sample, twelve samples and 60 ms a step, one rank; without loading, with ranks
  that load for themselves, and with loaders, in turn on the same process.
- ``same``: random datasets, collates and plans (`tests/harness/loaded.py`), read by loaders and by every rank.
- ``kills``: runs of two ranks and two loaders, of which a process that is drawn is killed at some moment, or all of
  them are at once. Every other process has to end by itself, and whoever is left says why.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "harness")]

from autopar.options.train import RunOptions  # noqa: E402
from autopar.ranks.pool import RankPool  # noqa: E402
from autopar.ranks.scratch import Scratch  # noqa: E402
from autopar.runtime.loaders.server import serve  # noqa: E402
from autopar.runtime.start.launch import run  # noqa: E402
from loaded import alone, differences, draw, in_loaders  # noqa: E402
from machine import Watch  # noqa: E402
from training_cases import make_case  # noqa: E402

STEP_S, SAMPLE_S, BATCH = 0.06, 0.005, 12
MODEL = """
import time, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 120
    def __getitem__(self, index):
        time.sleep({sample_s})
        return torch.full((4,), float(index)), torch.ones(1)

class Sleeping(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep({step_s})
        return super().step(closure)

def model(): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
def dataset(): return Slow()
def loss(output, batch): return (output - batch[1]).square().mean()
def optimizer(parameters): return Sleeping(parameters, lr=1e-6)
"""
WITHOUT, ALONE = "without loading", "0 loaders"
KILLED = ("launcher", "fork server", "rank", "loaders' server", "loader", "all")
LATEST_S = 5.0
"""How long after all processes are there one is killed at the latest: when the run trains."""
END_S = 15.0
"""How long processes may take to end once one of them was killed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=("pace", "same", "kills"), action="append")
    parser.add_argument("--rounds", type=int, default=3, help="of all contestants")
    parser.add_argument("--steps", type=int, default=30, help="of a round")
    parser.add_argument("--cases", type=int, default=500, help="that are drawn")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    watch, found = Watch(), dict[str, Any]()
    parts: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]]
    parts = {"pace": _pace, "same": _same, "kills": _kills}
    for name in asked.part or parts:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = parts[name](asked, Path(folder))
    watch.record(found, asked.json)
    return 0 if all(part["holds"] for part in found.values()) else 1


def _pace(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the median step of every contestant."""
    contestants = {WITHOUT: (0.0, 0), ALONE: (SAMPLE_S, 0), **{f"{n} loaders": (SAMPLE_S, n) for n in (1, 2, 4)}}
    steps: dict[str, list[float]] = {name: [] for name in contestants}
    waits: dict[str, list[float]] = {name: [] for name in contestants}
    needed = 0
    with RankPool(1, imports=["autopar.runtime.start.worker"], spare=True) as pool:
        cases = {
            sample_s: make_case(folder / f"slow_{index}.py", MODEL.format(sample_s=sample_s, step_s=STEP_S))
            for index, sample_s in enumerate((0.0, SAMPLE_S))
        }
        for _ in range(asked.rounds):
            for name, (sample_s, loaders) in contestants.items():
                case = cases[sample_s]
                plan = case.plan((1,), 1, BATCH)
                report = run(plan, str(case.file), RunOptions(asked.steps, loaders=loaders), pool=pool).report
                assert report.loading is not None
                steps[name].append(report.step_s.median)
                waits[name].append(report.loading.waiting_s)
                needed = report.loading.loaders_needed if name == ALONE else needed
    medians = {name: round(statistics.median(each), 5) for name, each in steps.items()}
    waited = {name: round(statistics.median(each), 5) for name, each in waits.items()}
    over = medians["2 loaders"] / medians[WITHOUT] - 1
    told = {"rounds": asked.rounds, "steps": asked.steps, "loaders_needed": needed, "over_without": round(over, 4)}
    return {"step_s": medians, "waiting_s": waited, **told, "holds": over <= 0.05}


def _same(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what differs of the cases drawn."""
    found: list[str] = []
    said, batches = 0, 0
    with RankPool(0, imports=[serve.__module__], spare=True) as pool:
        for number in range(asked.cases):
            case = draw(10_000 * asked.seed + number, folder)
            expected = alone(case)
            outcomes = [each for rank in expected for each in rank]
            said += sum(isinstance(each, str) for each in outcomes)
            batches += len(outcomes)
            found += [f"{number}: {each}" for each in differences(in_loaders(case, pool, folder), expected)]
    told = {"cases": asked.cases, "seed": asked.seed, "mini_batches": batches, "of_which_errors": said}
    return {**told, "differences": found, "holds": not found}


def _kills(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what was left behind, and what was said."""
    (folder / "slow.py").write_text(MODEL.format(sample_s=SAMPLE_S, step_s=0.02))
    plan = make_case(folder / "slow.py").plan((1, 1), 2, BATCH // 2)
    source = plan.model.model_copy(update={"source": "slow.py"})
    plan.model_copy(update={"model": source}).save(folder / "plan.json")
    left, said, rows = list[str](), Counter[str](), Counter[str]()
    for number in range(asked.kills):
        rng = random.Random(f"{asked.seed}/{number}")
        who = KILLED[number % len(KILLED)]
        problems, line = _kill(folder, who, rng)
        left += [f"{number} ({who}): {each}" for each in problems]
        said[re.sub(r"\d+", "N", line)] += 1
        rows[who] += 1
        sys.stderr.write(f"kill {number + 1} of {asked.kills}: {who}: {line or problems}\n")
    return {"kills": dict(rows), "left": left, "said": dict(said), "holds": not left}


def _kill(folder: Path, who: str, rng: random.Random) -> tuple[list[str], str]:
    """Run, kill, and return what is wrong behind that, and the launcher's last line."""
    command = ["run", "plan.json", "--steps", "100000", "--loaders", "2", "--report", "report.json", "--overwrite"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "autopar", *command], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    tree = _grown(launcher.pid)
    time.sleep(rng.uniform(0.0, LATEST_S))
    victims = [each for each in tree if who in ("all", tree[each])]
    shared = [f"{tree[each]} maps {name}" for each in tree for name in _shared_files(each)]
    for victim in victims if who == "all" else [rng.choice(victims)]:
        with suppress(psutil.NoSuchProcess):
            os.kill(victim.pid, 9)
    _, errors = launcher.communicate(timeout=120)
    _, alive = psutil.wait_procs(list(tree), timeout=END_S)
    alive = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    for each in alive:
        each.kill()
    # The next scratch folder removes what a killed launcher has left.
    Scratch("loaders").close()
    files = [str(each) for each in Path(tempfile.gettempdir()).glob("autopar-run-*") if not _is_locked(each)]
    lines = [line for line in errors.splitlines() if line.startswith("autopar: ")]
    line = lines[-1] if lines else ""
    problems = [*shared, *(f"{tree[each]} is still there" for each in alive), *(f"{each} is left" for each in files)]
    if not line and who not in ("launcher", "all"):
        problems.append("nothing was said")
    return problems, line.partition("; `autopar show")[0]


def _grown(pid: int) -> dict[psutil.Process, str]:
    """Return the processes of a run, once it trains, each with what it is."""
    names = {"autopar-rank-0": "rank", "autopar-rank-1": "rank", "autopar-rank-2": "loaders' server"}
    until_s = time.monotonic() + 120
    launcher = psutil.Process(pid)
    while time.monotonic() < until_s and launcher.status() != psutil.STATUS_ZOMBIE:
        with suppress(psutil.NoSuchProcess):
            found = {each: names.get(each.name(), "fork server") for each in launcher.children(recursive=True)}
            found |= {each: "loader" for each in found if each.name().startswith("autopar-load-")}
            # The last to come are loaders; then the ranks build their stages.
            if Counter(found.values()) >= Counter({"loader": 2, "rank": 2, "fork server": 1, "loaders' server": 1}):
                return {launcher: "launcher", **found}
        time.sleep(0.05)
    raise AssertionError("the run has not started")


def _shared_files(process: psutil.Process) -> list[str]:
    """Return the files in shared memory that a process has mapped, or open."""
    with suppress(OSError):
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        return sorted({line.split()[-1] for line in maps if "/dev/shm" in line})
    return []


def _is_locked(folder: Path) -> bool:
    import fcntl

    with suppress(OSError), (folder / "lock").open("rb+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(handle, fcntl.LOCK_UN)
    return False


if __name__ == "__main__":
    sys.exit(main())
