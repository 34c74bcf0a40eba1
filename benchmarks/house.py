"""House: how the product's code is divided, in figures that tell whether a stranger finds the way.

    python benchmarks/house.py --json benchmarks/results/house.json [--list]

Counted is what git tracks of `autopar/`, `planner/`, `profiler/` and `runtime/`; `--list` names what stands behind the
counts. The figures are examples to steer by, and no gates. Run it beside the tests' own figures: `make coverage`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import grimp

from machine import Watch

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("tests", "benchmarks", "examples", "notebooks", "conftest.py")
LONG_FILE, LONG_FUNCTION, TOO_LONG_FUNCTION, COMPLEX, TESTED = 600, 35, 60, 10, 60
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)

IRREGULAR = frozenset(
    (
        "given",
        "held",
        "drawn",
        "said",
        "asked",
        "known",
        "kept",
        "found",
        "made",
        "taken",
        "told",
        "sent",
        "shown",
        "seen",
        "met",
        "written",
        "chosen",
        "begun",
        "built",
        "left",
        "spent",
        "lost",
        "dealt",
        "grown",
        "bound",
        "laid",
        "hidden",
        "fed",
        "led",
    )
)
NO_PARTICIPLES = frozenset(("seed", "need", "speed", "embed", "feed", "exceed", "red"))
EVERYWHERE = {
    "teams": r"(?i)team|tensor_parallel|\bpart_of",
    "policies": r"(?i)polic(y|ies)|\bflush|\"sync\"",
    "turns": r"\bin turn\b|\bturns\b|turning|turn_count|row_starts|round-robin",
}
"""What tells that a file knows of what few should know of."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Defined = Function | ast.ClassDef | ast.Module


class File(NamedTuple):
    """A product file."""

    path: Path
    """From the root."""
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """How many lines there are, empty ones and comments included."""
        return self.text.count("\n")

    @property
    def module(self) -> str:
        """Its name below ``autopar``: that of the tree, where the three folders are moved in."""
        parts = list(self.path.with_suffix("").parts)
        return ".".join(each for each in ["autopar", *parts[parts[0] == "autopar" :]] if each != "__init__")

    def docstrings(self) -> set[int]:
        """Return the lines of docstrings, those of fields included."""
        bodies = (each.body for each in ast.walk(self.tree) if isinstance(each, Defined))
        texts = (each for body in bodies for each in body if _is_text(each))
        return set(chain.from_iterable(range(each.lineno, (each.end_lineno or each.lineno) + 1) for each in texts))

    def code(self) -> set[int]:
        """Return the lines with code: neither empty, nor of comments or docstrings alone."""
        found: set[int] = set()
        for token in tokenize.tokenize(BytesIO(self.text.encode()).readline):
            if token.type not in LAYOUT and token.type != tokenize.ENDMARKER:
                found.update(range(token.start[0], token.end[0] + 1))
        return found - self.docstrings()

    def statements(self) -> int:
        """Return how many statements there are, without docstrings."""
        return sum(isinstance(each, ast.stmt) and not _is_text(each) for each in ast.walk(self.tree))

    def annotations(self) -> set[int]:
        """Return the lines with types of parameters, of what is returned, and of variables."""
        found = set()
        for each in ast.walk(self.tree):
            own = each.returns if isinstance(each, Function) else getattr(each, "annotation", None)
            if own is not None:
                found.add(own.lineno)
        return found

    def errors(self) -> set[int]:
        """Return the lines with texts of errors, where these are raised."""
        raised = (each for each in ast.walk(self.tree) if isinstance(each, ast.Raise))
        texts = (each for one in raised for each in ast.walk(one) if _is_string(each))
        return {each.lineno for each in texts}

    def imports(self) -> set[int]:
        """Return the lines of imports."""
        found = (each for each in ast.walk(self.tree) if isinstance(each, ast.Import | ast.ImportFrom))
        return set(chain.from_iterable(range(each.lineno, (each.end_lineno or each.lineno) + 1) for each in found))

    def functions(self) -> Iterator[tuple[Function, int]]:
        """Yield every function with its lines, from ``def`` to the last."""
        for each in ast.walk(self.tree):
            if isinstance(each, Function):
                yield each, (each.end_lineno or each.lineno) - each.lineno + 1


def _is_text(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and _is_string(statement.value)


def _is_string(expression: ast.AST) -> bool:
    return isinstance(expression, ast.Constant) and isinstance(expression.value, str)


def product() -> list[File]:
    """Return all product files."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    paths = (Path(each) for each in listed if Path(each).parts[0] not in OUTSIDE)
    texts = ((path, (ROOT / path).read_text()) for path in paths)
    return [File(path, text, ast.parse(text)) for path, text in texts]


def sizes(files: Sequence[File]) -> dict[str, Any]:
    """Return how many files and lines there are."""
    folders = Counter(str(each.path.parent) for each in files)
    return {
        "files": len(files),
        "lines": sum(each.lines for each in files),
        "code_lines": sum(len(each.code()) for each in files),
        "import_lines": sum(len(each.imports()) for each in files),
        "planner_lines": sum(each.lines for each in files if each.path.parts[0] == "planner"),
        "most_files_in_a_folder": max(folders.values()),
        "files_by_folder": dict(folders.most_common()),
    }


def prose(files: Sequence[File]) -> dict[str, float]:
    """Return how much of the lines says what the code is for, and how dense the code is."""
    lines = sum(each.lines for each in files)
    code = [line for each in files for line in _lines_of(each, each.code())]
    return {
        "raises": sum(isinstance(each, ast.Raise) for file in files for each in ast.walk(file.tree)),
        "docstring_share": round(sum(len(each.docstrings()) for each in files) / lines, 4),
        "annotation_share": round(sum(len(each.annotations()) for each in files) / lines, 4),
        "error_text_share": round(sum(len(each.errors()) for each in files) / lines, 4),
        "mean_line_length": round(statistics.mean(len(line) for line in code), 2),
        "statements_per_code_line": round(sum(each.statements() for each in files) / len(code), 4),
    }


def _lines_of(file: File, numbers: set[int]) -> list[str]:
    lines = file.text.split("\n")
    return [lines[number - 1] for number in sorted(numbers)]


def functions(files: Sequence[File]) -> dict[str, Any]:
    """Return how long files and functions are, and how many are complex; ``(lines, name)`` of the long ones."""
    every = sorted(
        (length, f"{file.path}:{each.lineno} {each.name}") for file in files for each, length in file.functions()
    )
    lengths = [length for length, _ in every]
    return {
        "longest_file": max(each.lines for each in files),
        "files_over_600": [str(each.path) for each in files if each.lines > LONG_FILE],
        "function_median": statistics.median(lengths),
        "function_of_nine_in_ten": lengths[int(0.9 * (len(lengths) - 1))],
        "functions_over_35": [name for length, name in every if length > LONG_FUNCTION],
        "functions_over_60": [name for length, name in every if length > TOO_LONG_FUNCTION],
        "functions_complex": _complex(files),
    }


def _complex(files: Sequence[File]) -> list[str]:
    rule = ["--select", "C901", "--config", f"lint.mccabe.max-complexity={COMPLEX}", "--output-format", "json"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--exit-zero", *rule]
    checked = subprocess.run(
        [*command, *(str(each.path) for each in files)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    named = ((Path(each["filename"]).relative_to(ROOT), each) for each in json.loads(checked.stdout))
    return sorted(f"{path}:{each['location']['row']} {each['message']}" for path, each in named)


def names(files: Sequence[File]) -> dict[str, Any]:
    """Return the classes whose names, underscores apart, stand in several files; and public names without users.

    A public name is one of a module's functions, classes and constants, and its users are other files of the product.
    """
    homes: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for each in file.tree.body:
            if isinstance(each, ast.ClassDef):
                homes[each.name.strip("_")].add(str(file.path))
    public = [(file, name) for file in files for name in _defined(file) if not name.startswith("_")]
    users: dict[str, set[Path]] = defaultdict(set)
    for file in files:
        for name in _mentioned(file):
            users[name].add(file.path)
    return {
        "class_names_in_several_files": {name: sorted(own) for name, own in sorted(homes.items()) if len(own) > 1},
        "public_names": len(public),
        "public_without_users": [f"{file.path} {name}" for file, name in public if not users[name] - {file.path}],
    }


def _defined(file: File) -> Iterator[str]:
    """Yield a module's own names."""
    for each in file.tree.body:
        if isinstance(each, Function | ast.ClassDef):
            yield each.name
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        yield from (one.id for one in targets if isinstance(one, ast.Name) and one.id != "__all__")


def _mentioned(file: File) -> Iterator[str]:
    """Yield every name that a module uses or imports, and those that it lists as texts."""
    for each in ast.walk(file.tree):
        for field in ("id", "attr", "name", "value"):
            found = getattr(each, field, None)
            if isinstance(found, str) and found.isidentifier():
                yield found


def participles(files: Sequence[File]) -> dict[str, Any]:
    """Return the functions, classes, parameters and fields that are called by a bare participle.

    Fields of formats are keys of files, parameters of commands are flags, and parameters of the API are arguments.
    """
    found = []
    for file in files:
        keys = file.path.parts[:2] in (("autopar", "formats"), ("autopar", "interop"))
        flags = file.path.parts[:2] in (("autopar", "cli"), ("autopar", "api"))
        for each in ast.walk(file.tree):
            own = [each] if isinstance(each, Function | ast.ClassDef) else []
            named = [one.name for one in own]
            if isinstance(each, ast.arg) and not flags:
                named = [each.arg]
            elif isinstance(each, ast.ClassDef) and not keys:
                targets = (one.target for one in each.body if isinstance(one, ast.AnnAssign))
                named += [one.id for one in targets if isinstance(one, ast.Name)]
            found += [f"{file.path}:{each.lineno} {name}" for name in named if _participle(name)]  # type: ignore[attr-defined]
    return {"named_by_participles": found}


def _participle(name: str) -> bool:
    word = name.strip("_").lower()
    return "_" not in word and word not in NO_PARTICIPLES and (word in IRREGULAR or word.endswith("ed"))


def naming(files: Sequence[File]) -> dict[str, Any]:
    """Return the files that name what few should know of."""
    return {
        f"files_naming_{what}": [str(each.path) for each in files if re.search(words, each.text)]
        for what, words in EVERYWHERE.items()
    }


def arrows(files: Sequence[File]) -> dict[str, Any]:
    """Return what the graph of imports tells: modules that one other imports, and circles."""
    graph = grimp.build_graph("autopar")
    every = {each.module for each in files}
    importers = {each: graph.find_modules_that_directly_import(each) & every for each in every}
    inner = [each.module for each in files if each.path.stem not in ("__init__", "__main__")]
    once = sorted(each for each in inner if len(importers[each]) == 1)
    return {
        "modules": len(inner),
        "modules_with_one_importer": once,
        "share_with_one_importer": round(len(once) / len(inner), 4),
        "circles": _circles(importers),
    }


def _circles(importers: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other."""
    import networkx as nx

    found = nx.DiGraph((each, other) for each, own in importers.items() for other in own)
    return sorted(sorted(each) for each in nx.strongly_connected_components(found) if len(each) > 1)


def tests(files: Sequence[File]) -> dict[str, Any]:
    """Return the modules of some length whose test is not where the tree says, and tests that import tests."""
    large = [each for each in files if each.lines > TESTED and each.path.stem not in ("__init__", "__main__")]
    without = [str(each.path) for each in large if not (ROOT / _test_of(each)).exists()]
    every = sorted((ROOT / "tests").rglob("test_*.py"))
    known = {each.stem for each in every}
    importing = re.compile(r"^(?:from|import) (?:[\w.]*\.)?(test_\w+)", re.MULTILINE)
    crossed = [each for each in every if known & set(importing.findall(each.read_text()))]
    return {
        "modules_over_60_lines": len(large),
        "without_test_file": without,
        "share_with_test_file": round(1 - len(without) / len(large), 4),
        "tests_that_import_tests": [str(each.relative_to(ROOT)) for each in crossed],
        "test_lines": sum(each.read_text().count("\n") for each in (ROOT / "tests").rglob("*.py")),
    }


def _test_of(file: File) -> Path:
    """Where a module's test stands."""
    _, *rooms, name = file.module.split(".")
    return Path("tests", *rooms, f"test_{name}.py")


def starts() -> dict[str, float]:
    """Return the least processor seconds, of five, of starting the command line and the library."""
    shown = "import sys; sys.argv = ['autopar', '--help']; from autopar.cli import main; main()"
    return {
        "help_processor_s": min(_started(shown) for _ in range(5)),
        "import_processor_s": min(_started("import autopar; autopar.plan") for _ in range(5)),
    }


def _started(script: str) -> float:
    timed = f"import os, sys\ntry: {script}\nexcept SystemExit: pass\nsys.stderr.write(str(sum(os.times()[:2])))"
    run = subprocess.run([sys.executable, "-c", timed], cwd=ROOT, check=True, capture_output=True, text=True)
    return round(float(run.stderr), 2)


def counted(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with lists as their lengths."""
    return {name: len(each) if isinstance(each, list | dict) else each for name, each in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="name what is counted")
    arguments = parser.parse_args()
    watch, files = Watch(), product()
    found = [
        sizes(files),
        prose(files),
        functions(files),
        names(files),
        participles(files),
        naming(files),
        arrows(files),
        tests(files),
        starts(),
    ]
    every = dict(chain.from_iterable(each.items() for each in found))
    watch.record(every if arguments.list else counted(every), arguments.json)


if __name__ == "__main__":
    main()
