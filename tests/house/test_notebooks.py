"""Notebooks use the public API alone; a copy that is not what its text gives is told, with its cell."""

import ast
import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import nbformat
import pandas as pd
import pytest
from nbformat import NotebookNode, v4

import autopar
from paths import ROOT

FOLDER = ROOT / "notebooks"
TEXTS = sorted(path for path in FOLDER.glob("*.py") if path.name != "execute.py")
MODULES = {"autopar", *("copy", "io", "threading", "time"), *("IPython", "ipywidgets", "matplotlib", "pandas", "torch")}


def _faults(text: str) -> Iterator[str]:
    """Yield what a notebook's text uses beside documented names of `import autopar`, and of known libraries."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            froms = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules = froms or [alias.name for alias in node.names]
            yield from (each for each in modules if each.partition(".")[0] not in MODULES)
            yield from (each for each in modules if each.startswith("autopar."))
            names = [alias.name for alias in node.names] if froms else []
            yield from (name for name in names if froms == ["autopar"] and name not in autopar.__all__)
            yield from (name for name in names if name.startswith("_"))
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            of_autopar = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "autopar"
            if (name.startswith("_") and name != "__init__") or (of_autopar and name not in autopar.__all__):
                yield name


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_notebook_uses_documented_names_alone_and_has_a_copy_that_pages_link(path: Path) -> None:
    assert list(_faults(path.read_text())) == []
    assert path.with_suffix(".ipynb").exists()
    for page, link in ((ROOT / "README.md", "notebooks/"), (FOLDER / "README.md", "")):
        assert f"({link}{path.stem}.ipynb)" in page.read_text()


def _notebook() -> NotebookNode:
    """Return an executed notebook with a text, a printed line, a picture, and a table."""
    table = "<table><thead><tr><th>stage</th><th>peak</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>"
    outputs = [
        v4.new_output("stream", name="stdout", text="0.21 s"),
        v4.new_output("display_data", {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}),
        v4.new_output("execute_result", {"text/html": table, "text/plain": "stage"}, execution_count=1),
    ]
    code = v4.new_code_cell("plan.plot()", execution_count=1, outputs=outputs)
    return v4.new_notebook(cells=[v4.new_markdown_cell("# A plan"), code])


def _put(name: str, value: Any) -> Callable[[NotebookNode], object]:  # noqa: ANN401
    return lambda notebook: setattr(notebook.cells[1], name, value)


def _add(*output: Any, **more: Any) -> Callable[[NotebookNode], object]:  # noqa: ANN401
    return lambda notebook: notebook.cells[1].outputs.append(v4.new_output(*output, **more))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda notebook: None, ""),
        (lambda notebook: notebook.cells[1].outputs[0].update(text="4.5 s"), ""),
        (lambda notebook: notebook.cells[0].update(source="# Plans"), "cell 0: the source is not that of the text"),
        (lambda notebook: notebook.cells.pop(), "cell 1: the source is not that of the text"),
        (lambda notebook: notebook.cells.append(v4.new_code_cell("1")), "cell 2: the source is not that of the text"),
        (_put("cell_type", "markdown"), "cell 1: the source is not that of the text"),
        (_put("execution_count", None), "cell 1: was not executed"),
        (_put("outputs", []), "cell 1: shows nothing, and executed now, stdout; image/png text/plain; text/html"),
        (_add("error", ename="KeyError", evalue="'x'"), "cell 1: ends with an error: KeyError: 'x'"),
        (_add("stream", name="stderr", text="a warning"), "cell 1: writes to stderr: a warning"),
        (_add("display_data", {"text/plain": "x" * 200_001}), "cell 1: has an output of 200,"),
        (
            lambda notebook: notebook.cells[1].outputs[2].data.update({"text/html": "<thead><th>rank</th></thead>"}),
            "text/html text/plain rank, and executed now, stdout; image/png text/plain; text/html",
        ),
    ],
)
def test_a_copy_that_is_not_what_its_text_gives_is_told(change: Callable[[NotebookNode], object], said: str) -> None:
    faults = runpy.run_path(str(FOLDER / "execute.py"))["faults"]
    kept = _notebook()
    change(kept)
    found = list(faults(kept, _notebook()))
    assert bool(found) == bool(said)
    assert said in "".join(found[:1])


def test_copies_are_valid_and_have_pictures_and_nothing_that_needs_a_kernel() -> None:
    for path in TEXTS:
        notebook = nbformat.read(path.with_suffix(".ipynb"), 4)
        nbformat.validate(notebook)
        shown = [kind for cell in notebook.cells for each in cell.get("outputs", []) for kind in each.get("data", {})]
        assert shown.count("image/png") >= 3
        assert not [kind for kind in shown if "widget" in kind]


def test_the_recorded_losses_are_those_of_the_benchmark() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "loss_curves.json").read_text())
    expected = {
        (row["model"], row["policy"], row["micro_batches"], 500 * at // len(row["curves"][0])): round(median(each), 4)
        for row in record["rows"]
        for at, each in enumerate(zip(*row["curves"], strict=True), 1)
    }
    kept = pd.read_csv(FOLDER / "data" / "loss_curves.csv", comment="#")
    assert {tuple(row[:4]): row[4] for row in kept.itertuples(index=False)} == expected
