"""Pages: how the documentation is written, in figures: words, blocks of code, and how it speaks to you.

    python benchmarks/pages.py [--json pages.json]

Counted are the pages that are written by hand: README.md and `docs/` without `docs/reference/`. `words` are those
outside of blocks of code, `all` those that `wc -w` counts. The other figures are of the prose alone, without code, tables
and headings. They are examples to steer by, and no gates.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "harness")]

from pages import blocks_of  # noqa: E402
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
    """Print every page's figures, and those of all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    asked = parser.parse_args()
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    counted = {
        path.relative_to(ROOT).as_posix(): figures(path)
        for path in paths
        if not path.is_relative_to(ROOT / "docs" / "reference")
    }
    rows = {name: each.row() for name, each in {**counted, "in all": together(list(counted.values()))}.items()}
    sys.stdout.write(
        f"{'':36}{'words':>8}{'all':>8}{'blocks':>8}   per 1,000: {'what':>6}{'you':>6}   median sentence\n"
    )
    for name, row in rows.items():
        figure = f"{name:36}{row['words']:8}{row['all']:8}{row['blocks']:8}{row['what']:20}{row['you']:6}{row['sentence']:18}"
        sys.stdout.write(f"{figure}\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
