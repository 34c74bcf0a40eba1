"""How well is a step predicted? The demo, several times: predicted against measured step of a two-stage pipeline.

    python benchmarks/demo.py --runs 5 --json benchmarks/results/demo.json

Each run profiles, plans and trains anew. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from autopar.formats.plan import Plan
from autopar.formats.report import Report
from machine import Watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch = Watch()
    rows = []
    for number in range(arguments.runs):
        rows.append(_run())
        sys.stderr.write(f"run {number + 1}: {rows[-1]}\n")
    watch.record({"runs": rows}, arguments.json)


def _run() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autopar", "demo", "--folder", folder]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        plan, report = Plan.load(Path(folder) / "plan.json"), Report.load(Path(folder) / "report.json")
    return {
        "stages": len(plan.stages),
        "micro_batches": plan.micro_batches,
        "predicted_s": round(report.predicted_step_s, 4),
        "step_s_median": round(report.step_s.median, 4),
        "step_s_p10": round(report.step_s.p10, 4),
        "step_s_p90": round(report.step_s.p90, 4),
        "error": round(report.error, 4),
        "loss_first": round(report.loss[0], 3),
        "loss_last": round(report.loss[-1], 3),
    }


if __name__ == "__main__":
    main()
