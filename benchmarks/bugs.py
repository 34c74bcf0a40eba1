"""Which bugs does the test suite find?

    python benchmarks/bugs.py
    python benchmarks/bugs.py --tier check --bug sum-of-stages-for-the-slowest --json build/bugs.json

`tests/bugs` keeps bugs as data: which words of a file become which, what is wrong then, and a test that finds it. Each
is put into a copy of the tree, where pytest runs the test that is named, then the tests beside the file, then the whole
tier, until one fails; what fails without the bug, too, finds nothing, and is left out. `--first-only` stops at the test
that is named. `--file` hunts those of another file, which need not name a test. A line per bug says which test found
it, and after how many seconds; the exit code is 0 if all are found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from machine import Watch

__all__ = ["BUGS", "Bug", "copied", "patched", "read_bugs"]

ROOT = Path(__file__).resolve().parents[1]
BUGS = tuple(sorted((ROOT / "tests" / "bugs").glob("*.toml")))
"""Files of bugs."""
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "autopar-demo")
"""What no test needs of a tree."""
LONGEST_S = 3600.0
"""That the tests of a tier may take."""
NO_TESTS, MISUSED = 5, 4
"""Exit codes of pytest."""
TIERS = ("core", "check")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Bug:
    """Words of a file that become others."""

    name: str
    says: str
    """What is wrong then."""
    file: str
    """From the tree's root on."""
    old: str
    """Occurs once in the file."""
    new: str
    found_by: str | None = None
    """The test that finds it."""
    fuzzed: int | None = None
    """The case of the fuzzer's seed 0 that finds it."""

    @property
    def room(self) -> str:
        """Where the tests beside the file are."""
        first, *others = Path(self.file).parts
        inside = Path(*others) if first == "autopar" else Path(self.file)
        if len(inside.parts) > 1:
            return str("tests" / inside.parent)
        return f"tests/test_{inside.name}"


def read_bugs(files: Iterable[Path] = BUGS) -> list[Bug]:
    """Read the bugs of some files, in their order."""
    return [Bug(**entry) for file in files for entry in tomllib.loads(file.read_text(encoding="utf-8"))["bug"]]


def copied(folder: Path) -> Path:
    """Copy the tree into a folder, with its tests; return the folder."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_OUT, dirs_exist_ok=True)
    return folder


def patched(bug: Bug, folder: Path) -> Path:
    """Copy the tree into a folder and put a bug into it; return the folder.

    Raises:
        ValueError: the words of the bug are not there, or more than once.
    """
    file = copied(folder) / bug.file
    text = file.read_text(encoding="utf-8")
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: {bug.file} has its old words {text.count(bug.old)} times; write them anew")
    file.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Find:
    """What became of a bug."""

    bug: str
    test: str | None
    """The one that failed."""
    among: str | None
    """Whether it is the one that the bug names, beside the file, or elsewhere in the tier."""
    seconds: float

    def __str__(self) -> str:
        said = f"not found, {self.seconds:g} s"
        if self.test is not None:
            said = f"found by {self.test} ({self.among}), {self.seconds:g} s"
        return f"{self.bug}: {said}"


class Hunter:
    """Runs tests of a tier in copies of the tree."""

    def __init__(self, options: list[str], *, first_only: bool, folder: Path) -> None:
        """Hunt with pytest's ``options``, in copies that lie in ``folder``."""
        self._options, self._first_only, self._folder = options, first_only, folder
        self._passes: dict[str, bool] = {}
        """Of tests in the tree without a bug."""

    def hunt(self, bug: Bug) -> Find:
        """Say which test finds a bug, if one does."""
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            root = patched(bug, Path(folder))
            for among, selection in self._selections(bug, root):
                test = self._first_failing(root, selection)
                if test is not None:
                    return Find(bug.name, test, among, round(time.monotonic() - began_s, 1))
        return Find(bug.name, None, None, round(time.monotonic() - began_s, 1))

    def _selections(self, bug: Bug, root: Path) -> Iterator[tuple[str, list[str]]]:
        """Yield what to run, the least first."""
        if bug.found_by is not None:
            yield "named", [bug.found_by]
        if self._first_only:
            return
        if (root / bug.room).exists():
            yield "beside the file", [bug.room]
        yield "elsewhere", []

    def _first_failing(self, root: Path, selection: list[str]) -> str | None:
        """Return the first test that fails, though it passes in the tree without a bug."""
        left_out: list[str] = []
        while (test := self._failing(root, selection, left_out)) is not None:
            if self._passes_without(test):
                return test
            left_out.append(test)
        return None

    def _passes_without(self, test: str) -> bool:
        if test not in self._passes:
            self._passes[test] = self._failing(self._clean, [test]) is None
        return self._passes[test]

    @cached_property
    def _clean(self) -> Path:
        """The tree without a bug."""
        return copied(Path(tempfile.mkdtemp(dir=self._folder)))

    def _failing(self, root: Path, selection: list[str], left_out: Iterable[str] = ()) -> str | None:
        """Run tests of a tree until one fails; return it."""
        command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", *self._options]
        command += [word for test in left_out for word in ("--deselect", test)] + selection
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        ran = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
        if ran.returncode == MISUSED:
            raise RuntimeError(f"{' '.join(command)}: {ran.stdout[-500:]}{ran.stderr[-500:]}")
        if ran.returncode in (0, NO_TESTS):
            return None
        said = FAILED.search(ran.stdout)
        # A process that dies does not say which test it was in.
        return said[1] if said else " ".join(selection)


def main() -> None:
    """Hunt all bugs that are asked for, one by one."""
    arguments = _arguments()
    bugs = read_bugs(arguments.file or BUGS)
    unknown = set(arguments.bug) - {bug.name for bug in bugs}
    if unknown:
        sys.exit(f"no bug is called {', '.join(sorted(unknown))}")
    watch, finds = Watch(), []
    options = ["--tier", arguments.tier]
    if arguments.date and arguments.tier == "check":
        options += ["--date", arguments.date]
    with tempfile.TemporaryDirectory() as folder:
        hunter = Hunter(options, first_only=arguments.first_only, folder=Path(folder))
        for bug in bugs:
            if not arguments.bug or bug.name in arguments.bug:
                finds.append(hunter.hunt(bug))
                sys.stderr.write(f"{finds[-1]}\n")
    _record(watch, arguments.tier, finds, arguments.json)
    sys.exit(0 if all(find.test for find in finds) else 1)


def _record(watch: Watch, tier: str, finds: list[Find], path: Path | None) -> None:
    missed = [find.bug for find in finds if find.test is None]
    found = len(finds) - len(missed)
    bugs = [asdict(find) for find in finds]
    watch.record({"tier": tier, "hunted": len(finds), "found": found, "missed": missed, "bugs": bugs}, path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tier", choices=TIERS, default="core", help="the tests to hunt with")
    parser.add_argument("--date", metavar="YYYY-MM-DD", help="whose share of the tests the tier check runs")
    parser.add_argument("--bug", action="append", default=[], metavar="NAME", help="the one to hunt; repeatable")
    parser.add_argument("--file", action="append", type=Path, help="of bugs, in place of tests/bugs; repeatable")
    parser.add_argument("--first-only", action="store_true", help="run only the tests that the bugs name")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
