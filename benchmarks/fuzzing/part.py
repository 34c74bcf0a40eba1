"""Part: a piece of a model file, and what autopar may say to it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ANY", "EVERY", "LINEAR", "ROWS", "Part", "by_name"]

ANY = "."
"""A pattern that every message matches."""
ROWS = ("vectors", "tokens")
EVERY = ("vectors", "tokens", "images")
"""Kinds of samples; those of ``ROWS`` have their features last."""

LINEAR = """
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
"""
"""The beginning of many blocks."""


@dataclass(frozen=True)
class Part:
    """Something that a model file may hold."""

    name: str
    text: str
    """Source lines; where they go depends on the kind of part."""
    refusal: str = ""
    """Pattern of the messages by which a case may be refused for it; empty: for none."""
    must: bool = False
    """Whether to train it is wrong, even where it equals the plain loop."""
    weight: float = 1.0
    """How often it is drawn, beside others of its kind."""
    data: tuple[str, ...] = EVERY
    """The kinds of samples that it works on."""
    replicas: bool = True
    """Whether the plain loop knows what replicas make of it; if not, its plans have none."""
    listed: bool | None = None
    """Whether it wants a file with ``layers()`` (or one without); None: either will do."""
    least_rows: int = 1
    """Samples that a share needs."""


def by_name(parts: tuple[Part, ...]) -> dict[str, Part]:
    """Return parts by their names."""
    found = {part.name: part for part in parts}
    assert len(found) == len(parts), "a name is given twice"
    return found
