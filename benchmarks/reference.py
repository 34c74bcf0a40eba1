"""Write the pages of docs/reference/ from options, signatures, records and docstrings.

    python benchmarks/reference.py

`tests/house/test_reference.py` compares the pages with what this writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from reference_pages.commands import commands_page
from reference_pages.exports import exports_page
from reference_pages.faults import faults_page
from reference_pages.files import files_page
from reference_pages.model_files import model_file_page
from reference_pages.python_api import python_page
from reference_pages.schedules import schedules_page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "exports.md": exports_page,
    "faults.md": faults_page,
    "files.md": files_page,
    "model_file.md": model_file_page,
    "python.md": python_page,
    "schedules.md": schedules_page,
}


def write_pages(folder: Path = FOLDER) -> None:
    """Write every page into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in PAGES.items():
        (folder / name).write_text(text())
        sys.stderr.write(f"Written: {folder / name}\n")


if __name__ == "__main__":
    write_pages()
