"""Pages: how the documentation is written, in figures: words, blocks of code, and how it speaks to you.

    python benchmarks/pages.py [--json pages.json]
    python benchmarks/pages.py --run docs/start.md "takes minutes" --record benchmarks/results/page_start.json

Counted are the pages that are written by hand: README.md and `docs/` without `docs/reference/`. `words` are those
outside of blocks of code, `all` those that `wc -w` counts. The other figures are of the prose alone, without code,
tables and headings. They are examples to steer by, and no gates.

`--run` runs a page as the tests do, and with it the blocks that are marked with the reasons that are named: where there
are such hosts, GPUs or minutes. The record says when that was.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from machine import Watch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "harness")]

from page_blocks import blocks_of, read_page  # noqa: E402
from page_runs import run_page  # noqa: E402
from paths import ROOT  # noqa: E402

_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LEFT_OUT = re.compile(r"^(?: {4,}\S.*|\||#|!\[|<!--.*-->)")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[A-Z`\[*(\"])")


class Figures(NamedTuple):
    """A page's figures."""

    words: int
    """Outside of blocks of code."""
    all_words: int
    blocks: int
    prose: int
    """Words of the prose."""
    what: int
    you: int
    sentences: tuple[int, ...]
    """Words of each."""

    def row(self) -> dict[str, float]:
        """Return what is printed."""
        per_1000 = 1000 / max(self.prose, 1)
        return {
            "words": self.words,
            "all": self.all_words,
            "blocks": self.blocks,
            "what": round(self.what * per_1000, 1),
            "you": round(self.you * per_1000, 1),
            "sentence": statistics.median(self.sentences) if self.sentences else 0,
        }


def figures(path: Path) -> Figures:
    """Count a page."""
    text = path.read_text()
    paragraphs = prose(text)
    plain = " ".join(paragraphs)
    counts = (len(re.findall(rf"\b{word}\b", plain, re.IGNORECASE)) for word in ("what", "you"))
    sentences = tuple(len(each.split()) for part in paragraphs for each in _SENTENCE_END.split(part) if each.strip())
    words = len(_CODE.sub("", text).split())
    return Figures(words, len(text.split()), len(blocks_of(path)), len(plain.split()), *counts, sentences)


def prose(text: str) -> list[str]:
    """Return a page's paragraphs and items, each on one line.

    >>> prose("# Title\\n\\nOne\\nline.\\n\\n- An item.\\n- Another.\\n\\n```bash\\nls\\n```\\n")
    ['One line.', 'An item.', 'Another.']
    """
    found = [""]
    for line in _CODE.sub("", text).splitlines():
        if _LEFT_OUT.match(line) or not line.strip():
            found.append("")
        elif item := re.match(r"\s*(?:[-*]|\d+\.) ", line):
            found.append(line[item.end() :])
        else:
            found[-1] = f"{found[-1]} {line.strip()}".strip()
    return [each for each in found if each]


def together(pages: list[Figures]) -> Figures:
    """Return the figures of pages as if they were one."""
    columns = list(zip(*pages, strict=True))
    return Figures(*(sum(column) for column in columns[:-1]), tuple(each for column in columns[-1] for each in column))


def main() -> None:
    """Print every page's figures, and those of all; or run a page's marked blocks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--run", nargs="+", metavar=("PAGE", "REASON"), help="run a page, with marked blocks")
    parser.add_argument("--record", type=Path, help="write to this file which blocks --run has run")
    asked = parser.parse_args()
    if asked.run is not None:
        _run(Path(asked.run[0]), tuple(asked.run[1:]), asked.record)
    else:
        _print_figures(asked.json)


def _print_figures(output: Path | None) -> None:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    counted = {
        path.relative_to(ROOT).as_posix(): figures(path)
        for path in paths
        if not path.is_relative_to(ROOT / "docs" / "reference")
    }
    rows = {name: each.row() for name, each in {**counted, "in all": together(list(counted.values()))}.items()}
    columns = {"words": 8, "all": 8, "blocks": 8, "what": 8, "you": 8, "sentence": 10}
    sys.stdout.write(f"{'':36}{''.join(f'{name:>{width}}' for name, width in columns.items())}\n")
    for name, row in rows.items():
        sys.stdout.write(f"{name:36}{''.join(f'{row[key]:{width}}' for key, width in columns.items())}\n")
    sys.stdout.write("what, you: in 1,000 words; sentence: median of words\n")
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n")


def _run(path: Path, reasons: tuple[str, ...], record: Path | None) -> None:
    """Run a page in a fresh folder, and record which of its marked blocks ran, for how long."""
    watch, page = Watch(), read_page(path.resolve())
    with TemporaryDirectory() as folder:
        marked = run_page(page, Path(folder), reasons)
    name = page.path.relative_to(ROOT).as_posix()
    watch.record({"page": name, "marked_blocks_run": [each._asdict() for each in marked]}, record)


if __name__ == "__main__":
    main()
