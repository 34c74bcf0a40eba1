"""Execute the notebooks of this folder, and write them with their outputs: ``execute.py FOLDER [NAME ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def execute(source: Path, folder: Path) -> Path:
    """Run one notebook, kept as text in percent format, and return the ``.ipynb`` written."""
    notebook = jupytext.read(source)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    target = folder / f"{source.stem}.ipynb"
    jupytext.write(notebook, target)
    return target


def main(arguments: list[str]) -> None:
    """Execute the named notebooks, or all."""
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    names = arguments[1:] or sorted(path.stem for path in HERE.glob("*.py") if path.name != Path(__file__).name)
    for name in names:
        print(execute(HERE / f"{name}.py", folder))


if __name__ == "__main__":
    main(sys.argv[1:])
