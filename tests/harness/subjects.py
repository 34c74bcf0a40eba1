"""The captured model of the tests of estimates: capturing it takes longer than they do."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from autopar.capture import load
from autopar.options.profile import ProfileOptions
from autopar.profiler.subject import Subject, prepare
from paths import EXAMPLES


@cache
def gpt_subject(blocks: int = 12) -> Subject:
    """Return the example's GPT with so many blocks, to be computed in bf16; nothing may move or train it."""
    text, sizes = (EXAMPLES / "gpt.py").read_text(), "BLOCKS, WIDTH, HEADS, CONTEXT, BYTES = "
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt.py"
        path.write_text(text.replace(f"{sizes}12,", f"{sizes}{blocks},"))
        return replace(prepare(load(str(path)), ProfileOptions(batch=4)), precision="bf16")


def written_runs(folder: Path, *lines: str) -> Path:
    """Write a file of measured runs."""
    path = folder / "runs.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
