"""Does every reader give an object or one clean line, whatever a file holds?

    python benchmarks/broken_files.py --cases 100000 --seed 0 --json benchmarks/results/broken_files.json

Takes a good file of every kind that autopar reads, and breaks it: bytes are cut off, doubled, flipped or put in;
values are taken out, given twice, moved, or become others: of another type, numbers of thousands of digits, deep nests,
escapes, surrogates, control characters, names of a megabyte. What a reader makes of it is an object that can be used,
or one line of at most 500 letters beside the file's path, of letters that a terminal shows, with exit code 2 or 4;
everything else is *bad*. `--large` gives it megabytes of the nests and lists that take longest to refuse, and measures
processor time and memory. `--case N` shows one.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, printable
from machine import Watch
from readers.files import READERS, good_files, pieces_of
from readers.mutate import broken

LONGEST = 500
KINDS = tuple(READERS)


def main() -> None:
    arguments = _arguments()
    if arguments.refuse is not None:
        _refuse(Path(arguments.refuse[0]), arguments.refuse[1])
    elif arguments.large:
        sys.exit(_large(arguments))
    elif arguments.case is not None:
        sys.exit(_one(arguments))
    else:
        sys.exit(_all(arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--case", type=int)
    parser.add_argument("--large", action="store_true", help="measure refusing megabytes")
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--refuse", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _all(arguments: argparse.Namespace) -> int:
    watch, outcomes, bad = Watch(), Counter[str](), list[dict[str, Any]]()
    good = good_files()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.cases):
            kind, content = _content(arguments, good, number)
            outcome, said = _read(kind, content, Path(folder))
            outcomes[outcome] += 1
            if outcome == "bad":
                bad.append({"case": number, "kind": kind, "said": said[:LONGEST]})
                sys.stderr.write(f"case {number} ({kind}): {printable(said)[:LONGEST]}\n")
    watch.record({"seed": arguments.seed, "cases": arguments.cases, "outcomes": outcomes, "bad": bad}, arguments.json)
    return int(bool(bad))


def _one(arguments: argparse.Namespace) -> int:
    kind, content = _content(arguments, good_files(), arguments.case)
    with tempfile.TemporaryDirectory() as folder:
        outcome, said = _read(kind, content, Path(folder))
    sys.stdout.write(f"{kind}: {content[:2000]!r}\n{outcome}: {said[:2000]!r}\n")
    return int(outcome == "bad")


def _content(arguments: argparse.Namespace, good: dict[str, bytes], number: int) -> tuple[str, bytes]:
    chance = random.Random(f"{arguments.seed}/{number}")
    kind = arguments.only or chance.choice(KINDS)
    return kind, broken(chance, good[kind])


def _read(kind: str, content: bytes, folder: Path) -> tuple[str, str]:
    """Return ``object``, ``refused`` or ``bad``, and what was said."""
    path = folder / READERS[kind].file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            READERS[kind].read(path)
    except AutoparError as error:
        said = str(error)
        beside = len(said) - len(str(path)) * said.count(str(path))
        clean = ("\n" not in said and printable(said) == said) or _is_printed_clean(said)
        good = error.exit_code in (2, 4) and beside <= LONGEST and clean
        return ("refused" if good else "bad"), f"{error.exit_code}: {said}"
    except BaseException as error:
        return "bad", f"{type(error).__name__}: {error}"
    return "object", ""


def _is_printed_clean(said: str) -> bool:
    """Tell whether the command line's way of printing makes one clean line of it."""
    line = printable(said)
    line.encode()
    return line.isprintable()


LARGE: dict[str, Callable[[int], str]] = {
    "nests": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "nested objects": lambda size: '{"a":' * (size // 6) + "1" + "}" * (size // 6),
    "empty objects": lambda size: "[" + "{}," * (size // 3) + "{}]",
    "empty lists": lambda size: "[" + "[]," * (size // 3) + "[]]",
    "numbers": lambda size: "[" + "1," * (size // 2) + "1]",
    "keys": lambda size: "{" + ",".join(f'"{index}":1' for index in range(size // 12)) + "}",
    "digits": lambda size: "[" + ("9" * 5000 + ",") * (size // 5001) + "1]",
    "escapes": lambda size: '"' + "\\ud800" * (size // 6) + '"',
    "texts": lambda size: "[" + '"a",' * (size // 4) + '"a"]',
}
FORMATS = {"manifest": "checkpoint"}
PLACES = {
    "plan": "stages",
    "profile": "layers",
    "cluster": "links",
    "program": "ranks",
    "trace": "traceEvents",
    "manifest": "tensors",
}
TEXTS: dict[str, Callable[[int], str]] = {
    "tables": lambda size: "[[nodes]]\n" * (size // 10),
    "a dotted key": lambda size: "a" + ".a" * (size // 2) + " = 1\n",
    "a hexadecimal number": lambda size: f"count = 0x{'f' * size}\n",
    "calls": lambda size: "f(a=1)\n" * (size // 7),
    "signs": lambda size: "-" * size,
    "products": lambda size: "Et*9999|(t*9999|)*9999L" * (size // 23),
}
OF_TEXT = ("described cluster", "settings", "torchtitan, TOML", "torchtitan, Python", "Megatron's layout")
SMALLER = (0.009, 0.25, 1.0)
"""Megabytes of texts, too: what is larger is refused unread."""


def _large(arguments: argparse.Namespace) -> int:
    """Refuse megabytes in a process each; at most n + 2 processor seconds and 40 n + 250 MB for n."""
    watch, rows, most = Watch(), list[dict[str, Any]](), arguments.megabytes
    with tempfile.TemporaryDirectory() as folder:
        for kind, place in PLACES.items():
            head = '{"otherData": {"format": "autopar.trace", "version": 1, "origin": "measured"},'
            head = head if kind == "trace" else f'{{"format": "autopar.{FORMATS.get(kind, kind)}", "version": 1,'
            for name, make in LARGE.items():
                text = f'{head} "{place}": {make(most * 10**6)}}}'
                rows.append(_spent(kind, name, text, Path(folder)))
        rows += [_spent("manifest", "pieces", pieces_of(count), Path(folder)) for count in (1000, 10_000, 100_000)]
        for kind in OF_TEXT:
            for name, make in (TEXTS | LARGE).items():
                for megabytes in (*SMALLER, most):
                    text = make(int(megabytes * 10**6))
                    head = "module_fqns_per_model_part = " if name in LARGE and "TOML" in kind else ""
                    rows.append(_spent(kind, name, head + text, Path(folder)))
    watch.record({"rows": rows}, arguments.json)
    return int(not all(row["good"] for row in rows))


def _spent(kind: str, content: str, text: str, folder: Path) -> dict[str, Any]:
    """Return what a process of its own takes to read a file."""
    path = folder / READERS[kind].file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    command = [sys.executable, __file__, "--refuse", str(path), kind]
    spent = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    megabytes = path.stat().st_size / 1e6
    spent["good"] = spent["cpu_s"] <= megabytes + 2 and spent["memory_mb"] <= 40 * megabytes + 250
    found = {"kind": kind, "content": content, "file_mb": round(megabytes, 2), **spent}
    sys.stderr.write(f"{found}\n")
    return found


def _refuse(path: Path, kind: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    began_s, said = time.process_time(), "read"
    try:
        READERS[kind].read(path)
    except AutoparError as error:
        said = str(error).replace(f"{path.parent}/", "")[:LONGEST]
    spent_s = time.process_time() - began_s
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss
    sys.stdout.write(json.dumps({"cpu_s": round(spent_s, 2), "memory_mb": round(most / 1e3, 1), "said": said}))


if __name__ == "__main__":
    main()
