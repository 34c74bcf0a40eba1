"""What does `autopar plan` take beyond planning: the interpreter's start, reading, writing, the report on the terminal?

    python benchmarks/command.py --json benchmarks/results/command.json

Processor seconds of the whole command, and of the planner's call alone in another process, in turn; medians of both,
and their difference. Without `--profile` and `--cluster`, the notebook's.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import Watch

DATA = Path(__file__).parent.parent / "notebooks" / "data"
PLANNING = """
import sys, time
from pathlib import Path
from autopar.formats.profile import Profile
from autopar.hardware.clusters import read_cluster
from autopar.planner import PlanOptions, plan
profile, cluster = Profile.load(sys.argv[1]), read_cluster(sys.argv[2])
begun = time.process_time()
plan(profile, cluster, PlanOptions(gpus=int(sys.argv[3])))
print(time.process_time() - begun)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile", default=str(DATA / "gpt.profile.json"))
    parser.add_argument("--cluster", default=str(DATA / "gpt.cluster.json"), help="a file")
    parser.add_argument("--gpus", nargs="+", default=["1", "2", "8"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch = Watch()
    rows = [_row(arguments.profile, arguments.cluster, gpus, arguments.runs) for gpus in arguments.gpus]
    watch.record({"profile": Path(arguments.profile).name, "rows": rows}, arguments.json)


def _row(profile: str, cluster: str, gpus: str, runs: int) -> dict[str, object]:
    whole, planning = [], []
    for _ in range(runs):
        whole.append(_command_s(profile, cluster, gpus))
        planning.append(_planning_s(profile, cluster, gpus))
    command_s, planning_s = statistics.median(whole), statistics.median(planning)
    row = {"command_s": command_s, "planning_s": planning_s, "beyond_s": command_s - planning_s}
    sys.stderr.write(f"{gpus} devices: {row}\n")
    return {"gpus": int(gpus), **{name: round(seconds, 3) for name, seconds in row.items()}}


def _command_s(profile: str, cluster: str, gpus: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begun_s = _children_s()
        command = ["plan", profile, "--cluster", cluster, "--gpus", gpus, "-o", f"{folder}/plan.json"]
        subprocess.run([sys.executable, "-m", "autopar", *command], check=True, stderr=subprocess.DEVNULL)
        return _children_s() - begun_s


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _planning_s(profile: str, cluster: str, gpus: str) -> float:
    command = [sys.executable, "-c", PLANNING, profile, cluster, gpus]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
