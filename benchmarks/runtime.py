"""How fast does autopar train, beside torch's own pipelining, DDP, FSDP2, one process, and the best that could be?

    python benchmarks/runtime.py --case real --json benchmarks/results/runtime-real.json

All contestants of a case share one process group and make a step each in turn, round after round. `real` computes: a
transformer of twelve blocks on two ranks of one thread each. `emulated` has eight ranks whose layers sleep; everything
around them is real. `delayed` is that with messages that arrive later by 0.3 of a forward. `unequal` has stages of one
and two replicas. `cuda` computes on a GPU: one rank of autopar, given its mini-batches or loading them, beside the
plain loop; `all` leaves it out where there is no GPU. Its steps run in goes of five, after which the GPU is waited for.

Rows give a step's median, 10th and 90th percentile; the median ratio, over rounds, to the ideal of the schedule (its
program, simulated with what the layers take in the same run and messages that take nothing), to one process, and to
its counterpart of torch; the processor seconds of a step over all ranks, and of one forward or backward; and the step
that the simulator predicts over the links measured before, with the median error of all rounds. What the layers take
is measured in every round: for the ideal, the same sleeps in all ranks at once; for the prediction, autopar's training
of one stage in each of them (`alone`), without messages; in `real`, one process, and a profile that every rank makes.
`autopar 1f1b` has the depth that is predicted to be quickest, as plans do; PA and PB are fixed ones. Wants an otherwise
idle machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import cuda_case
import emulated_cases
import real_case
from machine import Watch

FOLDER = Path(__file__).parent
CASES: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "real": real_case.rows,
    "emulated": emulated_cases.emulated_rows,
    "delayed": emulated_cases.delayed_rows,
    "unequal": emulated_cases.unequal_rows,
    "cuda": cuda_case.rows,
}
COLUMNS = (
    "contestant",
    "step_s_median",
    "step_s_p10",
    "step_s_p90",
    "over_ideal",
    "over_single",
    "over_torch",
    "cpu_s",
    "cpu_ms_per_action",
    "predicted_s",
    "error",
)


def main() -> None:
    arguments = _arguments()
    chosen = _chosen(arguments.case)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    watch = Watch()
    rows = [row for case in chosen for row in CASES[case](arguments)]
    _print(rows)
    watch.record({"steps": arguments.steps, "rows": rows}, arguments.json)


def _chosen(case: str) -> list[str]:
    chosen = list(CASES) if case == "all" else [case]
    if "cuda" in chosen and not torch.cuda.is_available():
        missing = "cuda: this machine, or this build of torch, has no CUDA device"
        if case == "cuda":
            sys.exit(missing)
        sys.stderr.write(f"{missing}; left out\n")
        chosen.remove("cuda")
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--steps", type=int, default=15, help="rounds that count")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before them")
    parser.add_argument("--only", default="", help="contestants whose names contain one of these words, by commas")
    parser.add_argument("--bare", action="store_true", help="of `real`: leave out what a step is held against")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _print(rows: list[dict[str, Any]]) -> None:
    widths = {"contestant": max(len(str(row["contestant"])) for row in rows)}
    case = ""
    for row in rows:
        if row["case"] != case:
            case = row["case"]
            sys.stderr.write(f"\n{case}\n" + "  ".join(f"{name:>{widths.get(name, 10)}}" for name in COLUMNS) + "\n")
        sys.stderr.write("  ".join(f"{_cell(row, name):>{widths.get(name, len(name))}}" for name in COLUMNS) + "\n")


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
