"""SECURITY.md: what it names is there, and nothing of autopar can unpickle."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()
MODULES = ("pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "multiprocessing", "torch.multiprocessing")
CALLS = re.compile(r"torch\.(load|save)|dist\.\w*_object\w*|torch\.export\.(load|save)|(np|numpy)\.load|.*read_pickle")


def unpicklers(path: Path) -> Iterator[str]:
    """Yield what a file of code imports or calls that can make objects of bytes."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name for name in names if name in MODULES)
        if isinstance(node, ast.Call) and CALLS.fullmatch(ast.unparse(node.func)):
            yield ast.unparse(node.func)


@pytest.mark.reliability(21)
def test_nothing_can_unpickle_and_files_that_the_page_names_are_there() -> None:
    files = [file for part in ("autopar", "planner", "profiler", "runtime") for file in (ROOT / part).rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix(): sorted(unpicklers(file)) for file in files}
    assert {name: calls for name, calls in found.items() if calls} == {}
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", PAGE) + re.findall(r"\]\((docs/[\w/]+\.md)", PAGE)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert len(PAGE.splitlines()) < 120
