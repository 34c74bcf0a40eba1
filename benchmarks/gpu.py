"""Everything that needs a GPU, in six minutes of one: tests, models, the executor, CUDA graphs, constants of estimates.

    benchmarks/gpu.sh WHEELS --json benchmarks/results/gpu.json
    python benchmarks/gpu.py --rehearse --only gpt2,kernels

Every part is a process of its own, with a limit of time; what fails or takes longer is recorded, and the next begins.
Where time runs out, parts that are left are named. ``--keep FOLDER`` leaves profiles, plans and what parts wrote; of
one that was late, also what its threads did. ``--rehearse`` runs all parts on the CPU with tiny sizes: graphs are not
captured then, and tests that want a GPU are skipped.

- ``kernels``: rates of products and copies, seconds of launches, and what share of the data sheet they are;
- ``gpt2`` and other models: profiled, planned for one GPU and trained, predicted beside measured by cause, and the
  plain loop beside them;
- ``executor``: autopar's training beside the plain loop, in turn (as `benchmarks/runtime.py --case cuda`);
- ``graphs``: the plain loop, with its blocks as CUDA graphs, and with the whole step as one;
- ``tests``: the tests that are skipped without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from machine import Watch

__all__ = ["PARTS", "Part", "run_parts"]

ROOT = Path(__file__).parents[1]
MODELS = Path(__file__).parent / "models"
TESTS = ("tests/runtime/test_cuda.py", "tests/profiler/test_device.py")
MINUTES, LEAST_S, TAIL, LATE = 6.0, 5.0, 2000, 0.97
SLOWER = 3.0
"""As long a rehearsal may take, whose processors may be busy with other work."""


class Part(NamedTuple):
    """Something that is measured."""

    run: Callable[[Path, bool], dict[str, Any]]
    """Of a folder of its own, and whether this is a rehearsal."""
    limit_s: float


def _kernels(folder: Path, rehearses: bool) -> dict[str, Any]:
    import gpu_kernels

    return gpu_kernels.constants(_device(rehearses), tiny=rehearses)


def _model(name: str, folder: Path, rehearses: bool) -> dict[str, Any]:
    import gpu_models

    return gpu_models.trained(name, folder, _device(rehearses).type, tiny=rehearses)


def _executor(folder: Path, rehearses: bool) -> dict[str, Any]:
    import cuda_case

    os.environ["PYTHONPATH"] = os.pathsep.join([str(MODELS.parent), os.environ.get("PYTHONPATH", "")])
    steps = argparse.Namespace(steps=1 if rehearses else 5, warm_up=1 if rehearses else 2, bare=True)
    paths = _sequential(rehearses=rehearses)
    return {name: cuda_case.rows(steps, _device(rehearses).type, path) for name, path in paths.items()}


def _graphs(folder: Path, rehearses: bool) -> dict[str, Any]:
    import gpu_graphs

    device, paths = _device(rehearses), _sequential(rehearses=rehearses)
    return {name: gpu_graphs.raced(path, 8, 4, device, 2 if rehearses else 15) for name, path in paths.items()}


def _sequential(*, rehearses: bool) -> dict[str, Path]:
    """Return models that are rows of blocks."""
    names = ("tiny_blocks",) if rehearses else ("narrow_transformer", "transformer")
    return {name: MODELS / f"{name}.py" for name in names}


def _tests(folder: Path, rehearses: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-rfEs", "--tb=short", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    found = {"summary": lines[-1:], "said": [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]}
    if done.returncode:
        raise RuntimeError(f"{found}\n{done.stdout[-TAIL:]}{done.stderr[-TAIL:]}")
    return found


def _device(rehearses: bool) -> Any:  # noqa: ANN401
    from autopar.profiler.device import choose

    return choose("cpu" if rehearses else "cuda")


_LIMITS = {"llama-1.2b": 120.0}
_NAMES = ("gpt2", "llama-1.2b", "vit-l", "bert-large", "resnet-50", "t5")
PARTS = {
    "kernels": Part(_kernels, 25.0),
    "gpt2": Part(partial(_model, "gpt2"), 80.0),
    "tests": Part(_tests, 90.0),
    "executor": Part(_executor, 60.0),
    "graphs": Part(_graphs, 30.0),
    **{name: Part(partial(_model, name), _LIMITS.get(name, 80.0)) for name in _NAMES[1:]},
}
"""In the order in which they run."""


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    names = [name for name in PARTS if arguments.only is None or name in arguments.only]
    _import(rehearses=arguments.rehearse)
    slower = SLOWER if arguments.rehearse else 1.0
    parts = {name: PARTS[name]._replace(limit_s=slower * PARTS[name].limit_s) for name in names}
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = run_parts(parts, folder, arguments.rehearse, slower * 60 * arguments.minutes)
    failed = [name for name, each in found.items() if "failure" in each]
    watch.record({"rehearsed": arguments.rehearse, "failed": failed, "parts": found}, arguments.json)
    sys.exit(1 if failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--only", type=_names, help=f"some of {','.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a folder that parts write into; default: none")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _names(text: str) -> Sequence[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    return names


def _import(*, rehearses: bool) -> None:
    """Import once what all parts want; no GPU is touched, which a process that is forked could then not use."""
    if rehearses:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("transformers", "autopar.api.calls", "autopar.profiler", "autopar.runtime.start.launch"):
        importlib.import_module(name)


def run_parts(parts: dict[str, Part], folder: Path, rehearses: bool, most_s: float) -> dict[str, Any]:
    """Run parts one after the other, each in a process of its own; return what each found, or why it did not."""
    deadline_s, found = time.monotonic() + most_s, dict[str, Any]()
    for name, part in parts.items():
        left_s = deadline_s - time.monotonic()
        if left_s < LEAST_S:
            found[name] = {"failure": f"not begun: {most_s:g} s were over"}
            continue
        own = folder / name
        own.mkdir(parents=True)
        sys.stderr.write(f"{name} ...\n")
        began = time.monotonic()
        found[name] = _run(part, own, rehearses, min(part.limit_s, left_s))
        found[name]["took_s"] = round(time.monotonic() - began, 1)
        sys.stderr.write(f"{name}: {found[name].get('failure', 'done')[-300:]} ({found[name]['took_s']} s)\n")
    return found


def _run(part: Part, folder: Path, rehearses: bool, limit_s: float) -> dict[str, Any]:
    process = multiprocessing.get_context("fork").Process(target=_in_process, args=(part, folder, rehearses, limit_s))
    process.start()
    process.join(limit_s)
    late = process.is_alive()
    # The part's own processes, too: it leads a group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    output = folder / "output.txt"
    said = _without_folders(output.read_text(errors="replace"))[-TAIL:] if output.exists() else ""
    if late:
        return {"failure": f"took more than {limit_s:.3g} s\n{said}"}
    result = folder / "result.json"
    if not result.exists():
        return {"failure": f"ended with {process.exitcode}\n{said}"}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _in_process(part: Part, folder: Path, rehearses: bool, limit_s: float) -> None:
    """Run a part with its output in a file; write what it found, or the error."""
    os.setsid()
    with (folder / "output.txt").open("wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    faulthandler.dump_traceback_later(LATE * limit_s)
    try:
        found = part.run(folder, rehearses)
    except BaseException:
        found = {"failure": _without_folders(traceback.format_exc())[-TAIL:]}
    written = folder / "result.part"
    written.write_text(json.dumps(found))
    written.rename(folder / "result.json")


def _without_folders(said: str) -> str:
    """Return what was said without where this machine has autopar and its packages."""
    found = said.replace(f"{ROOT}{os.sep}", "")
    return re.sub(r'(?<=")[^"]*/site-packages/', "", found)


if __name__ == "__main__":
    main()
