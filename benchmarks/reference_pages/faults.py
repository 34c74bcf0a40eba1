"""Faults: every fault and bad input that is tried, and the tests that show it, by the numbers that tests bear."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from reference_pages.text import page, table

TESTS = Path(__file__).resolve().parents[2] / "tests"
_INTRODUCTION = """
A test that shows a case bears the mark `@pytest.mark.reliability(NUMBER)`, and is named here, below `tests/`. Exit
codes are in brackets. `pytest -m reliability` runs all of them on CPUs; [GPUs](../howto/gpus.md#not-tried-yet) has
commands for some of them there.
"""
CASES: dict[int, tuple[str, str]] = {
    1: (
        "A rank is killed in a forward",
        "Named with stage, step and action; all ranks end (5); `--resume` goes on from the last one, bit for bit",
    ),
    2: (
        "A rank is killed in a backward",
        "The same",
    ),
    3: (
        "A rank is killed in a reduction",
        "The same; the step that was under way is trained again",
    ),
    4: (
        "Killed while a checkpoint is saved",
        "The one before is whole; what was begun is removed by the next run",
    ),
    5: (
        "Killed between a checkpoint's last write and its name",
        "There is no pointer: the name is what makes it one. The old or the new is there, whole",
    ),
    6: (
        "A rank is stopped",
        "Named after `--timeout` (5), and not those that wait for it",
    ),
    7: (
        "A rank is slow",
        "Said while the run goes on, with both ratios, and a `plan` line to type; again when it ends",
    ),
    8: (
        "A crash in native code",
        "The signal, and where in Python each thread was",
    ),
    9: (
        "The user's forward raises",
        "Rank, stage, step, action and all that the error says in one line; the traceback, once, with `--debug`",
    ),
    10: (
        "One rank raises before a collective",
        "It is named; the others, who wait for it, end",
    ),
    11: (
        "The loss is not a number",
        "No rank steps; step, micro-batch and the first stage that gave such are named; nothing is saved (5)",
    ),
    12: (
        "A gradient is infinite or not a number",
        "The same, with the parameter, and the last stage that has such",
    ),
    13: (
        "Out of memory",
        "What was asked for, held and planned, and a `plan` line for what fits",
    ),
    14: (
        "The kernel ends a rank for want of memory",
        'Killed by SIGKILL, "the system may have run out of memory"',
    ),
    15: (
        "The disk is full",
        "Said in stderr and report; training goes on; the checkpoint before stays, and no parts of the new one; at the "
        "end of a run, that its last step is in none",
    ),
    16: (
        "An output's folder is missing, or cannot be written",
        "Refused before the first step (4)",
    ),
    17: (
        "A file of a checkpoint is cut short, or missing",
        "Named; the checkpoint before is taken, which is said",
    ),
    18: (
        "A bit of one is flipped",
        "The same, by SHA-256",
    ),
    19: (
        "A manifest is missing or damaged",
        "The same",
    ),
    20: (
        "No checkpoint is sound",
        "Refused (4); never begun anew. One that holds more infinities or NaN than step 0 is said, and left out",
    ),
    21: (
        "A pickle in place of weights",
        "Refused, and not loaded; ranks unpickle nothing while they train",
    ),
    22: (
        "Paths in files that lead elsewhere",
        "Refused: absolute ones, `..`, links out of the folder, links in a checkpoint",
    ),
    23: (
        "Going on with another plan",
        "Done, and said",
    ),
    24: (
        "Going on with another architecture",
        "Refused with what is missing, new, or of another shape (2); `--accept-changes` takes what fits",
    ),
    25: (
        "Going on with other ranks",
        "The same mini-batches of the same samples",
    ),
    26: (
        "Going on with another torch",
        "Said in the report",
    ),
    27: (
        "Ctrl-C, SIGTERM",
        "The step is finished, and saved if asked; 130, 143",
    ),
    28: (
        "A second one",
        "At once; no process and no file is left",
    ),
    29: (
        "The command, or a launcher's agent, is killed",
        "Its ranks end with it",
    ),
    30: (
        "Two runs on one host; a port is taken",
        "They do not meet; the port is named",
    ),
    31: (
        "What an earlier run has left",
        "Every run, and every attempt of a launcher, meets at a place of its own; leftovers are removed",
    ),
    32: (
        "Fewer GPUs than the plan needs",
        "Refused (2) with the options that help",
    ),
    33: (
        "A GPU with less memory than planned",
        "Refused before anything is put there (5), with a `plan` line",
    ),
    34: (
        "Gloo or NCCL for the other's tensors",
        "Refused with the backend that carries both (2)",
    ),
    35: (
        "Fewer samples than a mini-batch",
        "Refused (2 by `profile`, else 4)",
    ),
    36: (
        "An epoch's last mini-batch is not full",
        "Left out, or filled up (`--last pad`); said",
    ),
    37: (
        "Shapes that change between steps",
        "Refused with the tensor and both shapes (5)",
    ),
    38: (
        "Tied parameters on several stages",
        "Their gradients are summed; they stay equal",
    ),
    39: (
        "Skip connections over stages",
        "Travel directly",
    ),
    40: (
        "Outputs without gradient, integers, masks",
        "Sent as they are",
    ),
    41: (
        "Batch normalisation and buffers under replication",
        "By micro-batches and shares, or as asked (`--sync-batch-norm`, `--deferred-batch-norm`); what else "
        "writes buffers has one replica",
    ),
    42: (
        "Dropout",
        "Seeded by layer, step, micro-batch and share; cuts and schedules change nothing",
    ),
    43: (
        "Recomputation of layers with state",
        "Sees what the first forward saw; what cannot is refused",
    ),
    44: (
        "A model file that is missing, broken, or lacks something",
        "File, line and remedy (4)",
    ),
    45: (
        "One that exits, or prints",
        "Refused with its line; results alone go to standard output",
    ),
    46: (
        "No layers, one layer, fewer layers than stages",
        "Refused, or a plan of one stage",
    ),
    47: (
        "Layers of no time or no parameters",
        "Planned",
    ),
    48: (
        "Times that spread",
        "Their spread and repeats are in the profile; above 10 % it notes the layer",
    ),
    49: (
        "`--gpus` 0, -1, 7 for 5 layers",
        "Refused (2); planned",
    ),
    50: (
        "Nothing fits",
        "The stage, what it lacks, and what would help (3)",
    ),
    51: (
        "No solver, or one that fails or finds nothing",
        "The search's plan, and a note",
    ),
    52: (
        "Search and mixed-integer program disagree",
        "Tests hold them against each other; a run takes the better, and says what the solver denied",
    ),
    53: (
        "Files with NaN, infinity, doubled keys, booleans for numbers, deep nesting, a gigabyte",
        "Refused with the JSON path (4)",
    ),
    54: (
        "Plans with gaps, overlaps, a device twice, unknown keys, another version",
        "Refused with the path (4)",
    ),
    55: (
        "A profile or a plan of other devices, or one that has changed",
        "Refused with what to type; there is no `--force`: `--times-of` says whose times stand for others",
    ),
    56: (
        "Escapes and control characters in names",
        "Refused in files, shown escaped elsewhere",
    ),
    57: (
        "Not UTF-8; an output that is there, or cannot be written",
        "Refused; files are written whole or not at all; `--overwrite`",
    ),
    58: (
        "A `DataLoader` that forks; a bad `OMP_NUM_THREADS`",
        "Works; ranks take the plan's threads, whatever the environment says",
    ),
    59: (
        "Data that differ between ranks: a set's order, a folder's, a list that grows",
        "Refused before the first step (4), with the tensor or the numbers of samples, and two ranks",
    ),
}


def named_tests() -> dict[int, list[str]]:
    """Return the tests that bear a case's number, as pytest names them below ``tests/``."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for test in ast.parse(path.read_text()).body:
            for number in numbers_of(test) if isinstance(test, ast.FunctionDef) else ():
                found[number].append(f"{path.relative_to(TESTS).as_posix()}::{test.name}")
    return dict(sorted(found.items()))


def numbers_of(test: ast.FunctionDef) -> list[int]:
    """Return the numbers that a test bears."""
    marks = [each for each in test.decorator_list if isinstance(each, ast.Call)]
    return [
        ast.literal_eval(number)
        for mark in marks
        if ast.unparse(mark.func) == "pytest.mark.reliability"
        for number in mark.args
    ]


def faults_page() -> str:
    """Return the page of faults and bad inputs that are tried."""
    tests = named_tests()
    rows = [
        [str(number), case, does, ", ".join(f"`{name}`" for name in tests.get(number, ()))]
        for number, (case, does) in CASES.items()
    ]
    origin = "its list of cases and the marks of tests"
    return page(
        "Faults and bad inputs that are tried", origin, _INTRODUCTION, table(["", "case", "autopar", "tests"], rows)
    )
