"""How long does a run take to its first forward, and a second `verify` or `rehearse`, of a model that was profiled?

    python benchmarks/starting.py --repeats 3 --json benchmarks/results/starting.json

The example GPT and Transformers' GPT-2 (124 million parameters, 64 tokens) are profiled, and planned in two stages. A
run is ended by a fault as a rank begins its first forward; its seconds of processors are those of all its processes,
and hold what saying so takes. Medians; each command is a fresh process, with one thread a rank. `--cold` clears away
what was captured before each command, for comparison. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from autopar.cache import VARIABLE
from machine import Watch

GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def model():
    return GPT2LMHeadModel(GPT2Config())

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        ids = torch.randint(0, 50257, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}

def dataset():
    return Tokens()

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)
"""
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
COMMANDS = {
    "run to its first forward": ["run", "plan.json", "--steps", "1", "--overwrite", "--inject-fault", "exit@0:0:F0"],
    "verify": ["verify", "plan.json", "--steps", "1"],
    "rehearse": ["rehearse", "plan.json"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="capture the model in every command")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, rows = Watch(), list[dict[str, Any]]()
    for name, text in {"example GPT": EXAMPLE.read_text(encoding="utf-8"), "GPT-2": GPT2}.items():
        with tempfile.TemporaryDirectory() as folder:
            rows += _rows(name, text, Path(folder), arguments)
        watch.record({"repeats": arguments.repeats, "cold": arguments.cold, "rows": rows}, arguments.json)


def _rows(name: str, text: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    (folder / "model.py").write_text(text, encoding="utf-8")
    rows = [{"model": name, "command": "profile", **_timed(["profile", "model.py", "--batch", "4"], folder)}]
    _timed(["plan", "--gpus", "2", "--stages", "0-6:1,7-13:1", "--micro-batches", "2"], folder)
    for what, command in COMMANDS.items():
        _timed(command, folder)
        every = []
        for _ in range(arguments.repeats):
            if arguments.cold:
                shutil.rmtree(folder / "cache")
            every.append(_timed(command, folder))
        row = {key: round(median(each[key] for each in every), 2) for key in every[0]}
        rows.append({"model": name, "command": what, **row})
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


def _timed(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command; return its seconds, and those of the processors that it and all its processes took."""
    environment = {**os.environ, VARIABLE: str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "--quiet", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode and "exit@0:0:F0" not in command:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processors_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": time.perf_counter() - began_s, "processors_s": processors_s}


if __name__ == "__main__":
    main()
