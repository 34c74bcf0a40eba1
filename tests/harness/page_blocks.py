"""Pages of the documentation, as their blocks of code: which there are, and what is marked above each.

- ```` ```bash ````: commands, which run in the page's own folder. `<!-- not run: REASON -->` above: those of `autopar`
  are only parsed. `<!-- fails -->` above: the block ends with an error, which its output shows.
- ```` ```python ````: runs in one process a page. `<!-- not run: REASON -->` above: it is only compiled.
- `<!-- file: NAME -->` above any block: it is written to that file.
- ```` ```text ```` right after a block: what that block prints. Any number stands for any other, a line `...` for lines
  that are left out. A text that is no output has `<!-- not run: REASON -->` above.
- A page whose first line is `<!-- folder: examples -->` has the examples in its folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from paths import ROOT

REWRITTEN = ("README.md", "docs/start.md", "docs/concepts.md", "docs/howto/*.md", "docs/design/*.md")
"""The pages whose blocks run. Those that lie elsewhere were written before blocks did."""

_FENCE = re.compile(r"^```(\w*)\s*$")
_MARK = re.compile(r"^<!-- (file|not run|fails|folder)(?:: (.+?))? -->$")
OUTPUT = "text"


@dataclass(frozen=True)
class Block:
    """A block of code."""

    line: int
    """Of the page, of the block's first line; the first is 1."""
    language: str
    text: str
    mark: str = ""
    """``file``, ``not run`` or ``fails``."""
    value: str = ""
    """Of the mark: the file's name, or why the block does not run."""
    output: Block | None = None


@dataclass(frozen=True)
class Page:
    """A page, read."""

    path: Path
    blocks: tuple[Block, ...]
    folder: str = ""
    """Of the repository, whose files the page's own folder has."""


class PageError(Exception):
    """A fault of a page: its file, line, and what is wrong."""

    def __init__(self, path: Path, line: int, message: str) -> None:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        super().__init__(f"{name}:{line}: {message}")


def pages() -> list[Path]:
    """Return the pages whose blocks run."""
    return sorted(path for pattern in REWRITTEN for path in ROOT.glob(pattern))


def read_page(path: Path) -> Page:
    """Read a page.

    Raises:
        PageError: a block does not end, or an output belongs to no block.
    """
    lines = path.read_text().splitlines()
    first = _MARK.match(lines[0]) if lines else None
    folder = first[2] if first is not None and first[1] == "folder" else ""
    return Page(path, tuple(_with_outputs(path, blocks_of(path), lines)), folder)


def blocks_of(path: Path) -> list[Block]:
    """Return all blocks of a page in their order, outputs among them.

    Raises:
        PageError: a block does not end.
    """
    lines, found = path.read_text().splitlines(), list[Block]()
    start, language = 0, ""
    for index, line in enumerate(lines):
        fence = _FENCE.match(line)
        if not start and fence is not None:
            start, language = index + 1, fence[1]
        elif start and line.rstrip() == "```":
            mark = _MARK.match(lines[start - 2]) if start > 1 else None
            text = "".join(f"{each}\n" for each in lines[start:index])
            found.append(Block(start + 1, language, text, *(mark.groups("") if mark is not None else ("", ""))))
            start = 0
    if start:
        raise PageError(path, start, "the block does not end")
    return found


def _with_outputs(path: Path, blocks: list[Block], lines: list[str]) -> list[Block]:
    """Return the blocks that are no outputs, each with its own."""
    found = list[Block]()
    for block in blocks:
        behind = found[-1].line + found[-1].text.count("\n") if found else 0
        if block.language != OUTPUT or block.mark:
            found.append(block)
        elif found and found[-1].output is None and not any(line.strip() for line in lines[behind : block.line - 2]):
            found[-1] = replace(found[-1], output=block)
        else:
            raise PageError(path, block.line, "this text is the output of no block; put it right after one")
    return found
