"""Execute the notebooks of this folder, and hold the copies beside them to what they give: ``execute.py [NAME ...]``.

A notebook is text in percent format, ``NAME.py``. ``NAME.ipynb`` beside it has its outputs, for who only reads; with
``--write``, it is written, and the picture to which README links. It is to have the source of the text, executed
without an error, and outputs of the kinds that executing the text gives now. Times and pictures in them may differ.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import resource
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "docs" / "images" / "notebooks"
MOST_OUTPUT, MOST_ALL = 200_000, 2_000_000
"""Bytes of an output, and of all copies."""
_COLOURS = 64
_NEEDS_KERNEL = "application/vnd.jupyter.widget-view+json"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(source: Path) -> NotebookNode:
    """Return a notebook with its outputs, but for those that only a kernel can show; pictures have few colours."""
    notebook = jupytext.read(source)
    where = {"metadata": {"path": str(source.parent)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where, record_timing=False).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = [_small(each) for each in cell.outputs if _NEEDS_KERNEL not in each.get("data", {})]
    notebook.metadata = nbformat.from_dict(_METADATA)
    return notebook


def _small(output: NotebookNode) -> NotebookNode:
    data = output.get("data", {})
    if "image/png" in data:
        content = io.BytesIO()
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
        picture.convert("RGB").quantize(_COLOURS).save(content, "png", optimize=True)
        data["image/png"] = base64.b64encode(content.getvalue()).decode()
    return output


def faults(kept: NotebookNode, fresh: NotebookNode) -> Iterator[str]:
    """Yield what is wrong with a copy, given what executing its text gives now."""
    pairs = enumerate(zip_longest(kept.cells, fresh.cells))
    changed = next((number for number, (old, new) in pairs if _source(old) != _source(new)), None)
    if changed is not None:
        yield f"cell {changed}: the source is not that of the text"
        return
    for number, (old, new) in enumerate(zip(kept.cells, fresh.cells, strict=True)):
        if old.cell_type == "code":
            yield from (f"cell {number}: {fault}" for fault in _faults_of_cell(old, new))


def _source(cell: NotebookNode | None) -> tuple[str, str] | None:
    return None if cell is None else (cell.cell_type, cell.source)


def _faults_of_cell(old: NotebookNode, new: NotebookNode) -> Iterator[str]:
    if old.execution_count is None:
        yield "was not executed"
        return
    for output in old.outputs:
        size = len(json.dumps(output))
        if output.output_type == "error":
            yield f"ends with an error: {output.ename}: {output.evalue}"
        if output.get("name") == "stderr":
            yield f"writes to stderr: {output.text[:200].strip()}"
        if size > MOST_OUTPUT:
            yield f"has an output of {size:,} bytes, of at most {MOST_OUTPUT:,}"
    shown, expected = ("; ".join(map(_kind, cell.outputs)) or "nothing" for cell in (old, new))
    if shown != expected:
        yield f"shows {shown}, and executed now, {expected}"


def _kind(output: NotebookNode) -> str:
    """Return what an output is: its types, and the head of a table."""
    if output.output_type in ("stream", "error"):
        return output.get("name", "an error")
    heads = re.findall(r"<thead>(.*?)</thead>", output.data.get("text/html", ""), re.DOTALL)
    names = [name.strip() for head in heads for name in re.findall(r"<th[^>]*>(.*?)</th>", head, re.DOTALL)]
    return " ".join((*sorted(output.data), *(name for name in names if name)))


def check(name: str, *, write: bool) -> Iterator[str]:
    """Execute one notebook, write its copy if asked, and yield what is wrong with the copy."""
    path, begun_s = HERE / f"{name}.ipynb", _seconds()
    fresh = executed(HERE / f"{name}.py")
    print(f"{name}: {_seconds() - begun_s:.0f} processor seconds")
    if write:
        nbformat.write(fresh, path)
        _write_picture(fresh, IMAGES / f"{name}.png")
    if not path.exists():
        yield f"{path.name} is not there"
        return
    yield from (f"{path.name}, {fault}" for fault in faults(nbformat.read(path, 4), fresh))


def _write_picture(notebook: NotebookNode, path: Path) -> None:
    """Write what the cell that is tagged `picture` shows."""
    tagged = (cell for cell in notebook.cells if "picture" in cell.metadata.get("tags", []))
    drawn = (each.data["image/png"] for cell in tagged for each in cell.outputs if "image/png" in each.get("data", {}))
    path.write_bytes(base64.b64decode(next(drawn)))


def _seconds() -> float:
    """Return the processor seconds of all kernels that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Execute the named notebooks, or all; return whether something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write the copies with outputs")
    asked = parser.parse_args()
    names = asked.names or sorted(path.stem for path in HERE.glob("*.py") if path.name != Path(__file__).name)
    wrong = [fault for name in names for fault in check(name, write=asked.write)]
    size = sum(path.stat().st_size for path in HERE.glob("*.ipynb"))
    if size > MOST_ALL:
        wrong.append(f"all copies have {size:,} bytes, of at most {MOST_ALL:,}")
    for fault in wrong:
        print(f"notebooks/{fault}; mend the text, and run `python notebooks/execute.py --write`")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
