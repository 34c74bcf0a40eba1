"""Pages run: every block in order, in a folder of the page's own; a fault is told with the page's file and line."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from typer.exceptions import TyperException

from autopar.cache import VARIABLE
from command_lines import parse
from page_blocks import Block, Page, PageError
from paths import EXAMPLES, HARNESS, ROOT
from profiled import RECORDED, write_profiled

_LAUNCHERS = ("torchrun", "srun", "mpirun", "python", "python3")
_SEPARATORS = ("|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>")

# What a shell would have to see: a line that changes it, and characters that mean something to it.
_OF_SHELLS = re.compile(r"^\s*(cd|export|source|set) |<<", re.MULTILINE)
_SPECIAL = re.compile(r"[|&;<>$`*?(){}]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")

# Of outputs that pages show: any number stands for any other, ``...`` for lines left out.
_TIMES, _SIZES = r"(?:us|ms|s|min|h)", r"(?:[kKMGTP]i?B|B|bytes)"
_NUMBER = re.compile(rf"(?<!\w)[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?: ?(?:({_TIMES})|({_SIZES}))(?:/s)?(?!\w))?")
_COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_BUSY = re.compile(r"(?m)^autopar: rank \d+ \(stage \d+\) computes .* times as long as planned, .*\n?")
"""What a run may say on a machine that has other work."""
_LEFT_OUT = "..."
_SOON = ("--budget", "1")
"""How long a profile is measured, in seconds, where that is not what a page is about."""


class MarkedRun(NamedTuple):
    """A block that is marked not to run, and was run."""

    line: int
    reason: str
    seconds: float


def run_page(
    page: Page, folder: Path, reasons: tuple[str, ...] = (), processes: ModuleType = subprocess, recorded: bool = False
) -> list[MarkedRun]:
    """Run a page's blocks in a folder of its own; return those that are marked for one of the reasons, which run, too.

    Python is started by ``processes``: :mod:`subprocess`, or what does the same in less time. If ``recorded``, a
    profile that a page asks for without a word is one that was recorded, and others are measured within a second.

    Raises:
        PageError: a block fails, or prints something else than the page shows.
    """
    if page.folder:
        for file in sorted((ROOT / page.folder).glob("*.py")):
            shutil.copy(file, folder)
    marked = []
    with closing(PageRun(page, folder, processes, recorded)) as run:
        for block in page.blocks:
            is_asked = block.mark == "not run" and block.value in reasons
            begin = time.monotonic()
            run.block(replace(block, mark="", value="") if is_asked else block)
            if is_asked:
                marked.append(MarkedRun(block.line, block.value, round(time.monotonic() - begin, 1)))
    return marked


class PageRun:
    """A page's folder, and the process of its Python blocks, which is started for the first of them."""

    def __init__(self, page: Page, folder: Path, processes: ModuleType, recorded: bool) -> None:
        self.path, self.folder, self.processes, self.recorded = page.path, folder, processes, recorded
        self._fault = partial(PageError, page.path)
        self.process: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def block(self, block: Block) -> None:
        """Run, parse or write a block, and compare its output.

        Raises:
            PageError: it fails, or prints something else.
        """
        if block.mark == "file":
            (self.folder / block.value).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.value).write_text(block.text)
        elif block.mark == "not run":
            self._parse(block)
        elif block.language in ("bash", "python"):
            printed = self._bash(block) if block.language == "bash" else self._python(block)
            if block.output is not None and (found := difference(block.output.text, printed)) is not None:
                raise self._fault(block.output.line + found[0], f"{found[1]}\n--- all that it prints:\n{printed}")
        else:
            self._read(block)

    def _bash(self, block: Block) -> str:
        printed = ""
        for line, text, words in commands_of(block):
            if words is not None and self.recorded and _write_recorded(words, self.folder):
                continue
            if words is None:
                failed_at, done = self._shell(line, text)
            else:
                command = [
                    sys.executable,
                    "-m",
                    "autopar",
                    *words,
                    *(_SOON if self.recorded and _measures(words) else ()),
                ]
                failed_at, done = line, self.processes.run(command, **self._options())
            printed += done.stdout
            if words is not None and not done.returncode and not done.stdout:
                _remember(words, self.folder)
            if done.returncode:
                self._check_ending(block, failed_at, True, f"exit code {done.returncode}:\n{printed}")
                return printed
        self._check_ending(block, block.line, False, "")
        return printed

    def _shell(self, first: int, text: str) -> tuple[int, Any]:
        """Run lines by one shell, which ends at the first that fails; return that one's line, and how it ended."""
        report = self.folder.with_name(f"{self.folder.name}.line")
        report.unlink(missing_ok=True)
        begin = f"set -e; trap 'echo $LINENO > {shlex.quote(str(report))}' ERR"
        script = "\n" * (first - 2) + f"{begin}\n{text}"
        done = subprocess.run(["bash", "-c", script], **self._options())
        return int(report.read_text()) if report.exists() else first, done

    def _options(self) -> dict[str, Any]:
        outputs = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"cwd": self.folder, "env": environment(), **outputs}

    def _check_ending(self, block: Block, line: int, has_failed: bool, said: str) -> None:
        if has_failed and block.mark != "fails":
            raise self._fault(line, f"fails: {said}")
        if not has_failed and block.mark == "fails":
            raise self._fault(block.line, "is marked to fail, and does not")

    def _python(self, block: Block) -> str:
        """Run a block in the page's process; return what it prints, and of an error that is expected its last line."""
        if self.process is None:
            command = [sys.executable, str(HARNESS / "page_process.py")]
            self.process = self.processes.Popen(command, **self._options() | {"stdin": subprocess.PIPE, "stderr": None})
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"text": block.text, "name": f"<{self.path.name}>", "line": block.line}
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        reply = self.process.stdout.readline()
        if not reply:
            raise self._fault(block.line, f"ends the process: exit code {self.process.wait()}")
        result = json.loads(reply)
        self._check_ending(block, result.get("line", block.line), result["error"] is not None, result.get("trace", ""))
        return str(result["output"]) + (result["error"] or "")

    def _parse(self, block: Block) -> None:
        """Compile Python; parse what a shell would run, and the command lines of autopar in it."""
        if block.language == "python":
            try:
                compile("\n" * (block.line - 1) + block.text, self.path.name, "exec")
            except SyntaxError as error:
                raise self._fault(error.lineno or block.line, str(error)) from error
        elif block.language == "bash":
            done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
            if done.returncode:
                raise self._fault(block.line, done.stderr)
            for line, words in command_lines(block):
                try:
                    parse(words)
                except TyperException as error:
                    raise self._fault(line, f"{shlex.join(words)}: {error.format_message()}") from error

    def _read(self, block: Block) -> None:
        """Read a block that is shown only; its language must be one that is known."""
        readers = {"json": json.loads, "toml": tomllib.loads, "yaml": str, "csv": str, "math": str}
        if block.language not in readers:
            raise self._fault(block.line, f"is of no known language: {block.language!r}")
        try:
            readers[block.language](block.text)
        except ValueError as error:
            raise self._fault(block.line, f"is no {block.language}: {error}") from error


_profiles: dict[tuple[str, ...], dict[str, bytes]] = {}
"""What command lines wrote that profiled an example without a word."""


def _remember(words: list[str], folder: Path) -> None:
    if "profile" in words[:2] and (EXAMPLES / words[words.index("profile") + 1]).is_file():
        _profiles[*words] = {name: (folder / name).read_bytes() for name in ("profile.json", "cluster.json")}


def _write_recorded(words: list[str], folder: Path) -> bool:
    """Write what a command line that says nothing would measure or estimate; return whether it was done before."""
    if (folder / "profile.json").exists():
        return False
    for name, text in _profiles.get(tuple(words), {}).items():
        (folder / name).write_bytes(text)
    for name, (model, batch) in RECORDED.items():
        asked = ["profile", model.name, "--batch", str(batch)]
        if words in (["--quiet", *asked], [*asked, "--quiet"]):
            write_profiled(folder, name)
    return (folder / "profile.json").exists()


def _measures(words: list[str]) -> bool:
    return "profile" in words[:2] and not {"--device", "--budget"}.intersection(words)


def commands_of(block: Block) -> Iterator[tuple[int, str, list[str] | None]]:
    """Yield a block's parts in order: the page's line, the text, and the words of a call of autopar without a shell.

    Lines between such calls are one part.
    """
    if _OF_SHELLS.search(block.text):
        yield block.line, block.text, None
        return
    line, first, rest = block.line, block.line, ""
    for raw in re.sub(r"\\\n", lambda _: "\\\x00", block.text).splitlines():
        text = raw.replace("\x00", "\n") + "\n"
        plain = raw.replace("\\\x00", " ")
        words = shlex.split(plain, comments=True) if plain.startswith("autopar ") else []
        if words and not _SPECIAL.search(_QUOTED.sub("", plain.partition(" #")[0])):
            if rest:
                yield first, rest, None
            yield line, text, words[1:]
            rest = ""
        else:
            first, rest = line if not rest else first, rest + text
        line += text.count("\n")
    if rest:
        yield first, rest, None


def command_lines(block: Block) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a block that call autopar, by itself or under a launcher: the page's line, and the words."""
    text = re.sub(r"\\\n", lambda _: "\\\x00", block.text)
    line = block.line
    for raw in text.splitlines():
        words = shlex.split(raw.replace("\\\x00", " "), comments=True)
        while words and re.match(r"^\w+=", words[0]):
            words = words[1:]
        if words and "autopar" in words and (words[0] == "autopar" or words[0] in _LAUNCHERS):
            rest = words[words.index("autopar") + 1 :]
            end = next((index for index, word in enumerate(rest) if word in _SEPARATORS), len(rest))
            yield line, rest[:end]
        line += 1 + raw.count("\x00")


def environment() -> dict[str, str]:
    """Return the environment of a page's commands: ``autopar`` is this repository's, and lines are 100 columns wide.

    What is captured is kept where this process has it. Where the machine is busy, threads of one process that wait for
    each other take its processors for nothing.
    """
    left_out = ("AUTOPAR_", "COV_", "PYTEST_")
    found = {key: value for key, value in os.environ.items() if key == VARIABLE or not key.startswith(left_out)}
    path = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])
    modules = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH")]))
    return {**found, "PATH": path, "PYTHONPATH": modules, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def difference(shown: str, printed: str) -> tuple[int, str] | None:
    """Return the first line of what is shown that was not printed, counted from 0, and why; None if there is none.

    >>> difference("step 1.5 ms\\n...\\ndone", "step 900 us\\nmore\\nand more\\ndone")
    >>> difference("step 1.5 ms\\ndone", "step 900 us\\nfailed")
    (1, "the page shows 'done', and the block prints 'failed'")

    A line that a busy machine adds is passed over:

    >>> difference("done", "autopar: rank 1 (stage 1) computes 1.4 times as long as planned, the others 0.5\\ndone")
    """
    lines = shown.splitlines()
    expected = [(number, _pattern(line)) for number, line in enumerate(lines) if line.strip()]
    plain = _BUSY.sub("", _COLOURS.sub("", printed).replace("\r", "\n"))
    found = [line for line in plain.splitlines() if line.strip()]
    patterns = [_pattern(line) for line in found]
    at, is_free = 0, False
    parts = [list(group) for _, group in groupby(expected, key=lambda each: each[1] == _LEFT_OUT)]
    for part in parts:
        if part[0][1] == _LEFT_OUT:
            is_free = True
            continue
        start, agreed = _place(part, patterns, at, is_free, is_last=part is parts[-1])
        if agreed < len(part):
            number, at = part[agreed][0], start + agreed
            instead = repr(found[at].strip()) if at < len(found) else "nothing more"
            return number, f"the page shows {lines[number].strip()!r}, and the block prints {instead}"
        at, is_free = start + agreed, False
    if at < len(found) and not is_free:
        return max(len(lines) - 1, 0), f"the block prints another line: {found[at]!r}"
    return None


def _place(part: list[tuple[int, str]], lines: list[str], at: int, is_free: bool, is_last: bool) -> tuple[int, int]:
    """Find the lines of a part from a place on, or, where lines before it are left out, anywhere behind that.

    Returns where most of them agree, and how many do.
    """
    last = max(at, len(lines) - len(part))
    starts = range(last if is_last else at, last + 1) if is_free else [at]
    pairs = {start: zip(part, lines[start:], strict=False) for start in starts}
    agree = {start: sum(1 for _ in takewhile(lambda pair: pair[0][1] == pair[1], own)) for start, own in pairs.items()}
    start = max(agree, key=lambda each: (agree[each], -each))
    return start, agree[start]


def _pattern(line: str) -> str:
    """Return a line in which numbers, spaces and rules are alike, whatever their size.

    >>> _pattern("  3 x   17.5 ms, 2 GiB ────")
    '# x #s, #B ─'
    """
    plain = re.sub(r"─+|━+", "─", " ".join(line.split()))
    return _NUMBER.sub(lambda found: "#s" if found[1] else "#B" if found[2] else "#", plain)
