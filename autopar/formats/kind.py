"""Kind: which of autopar's files a file is."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import FileError
from autopar.formats.document import parse_json, read_text, shown

KINDS = ("profile", "cluster", "plan", "program", "report", "trace")


def kind_of(path: str | Path) -> str:
    """Return which of :data:`KINDS` a file says it is.

    Raises:
        FileError: the file is missing, not JSON, or none of autopar's.
    """
    path = Path(path)
    content = parse_json(read_text(path, "autopar"), path)
    at, holder = "$", content
    if isinstance(content, dict) and "traceEvents" in content:
        at, holder = "$.otherData", content.get("otherData")
    found = holder.get("format") if isinstance(holder, dict) else None
    for kind in KINDS:
        if found == f"autopar.{kind}":
            return kind
    expected = ", ".join(f'"autopar.{kind}"' for kind in KINDS)
    raise FileError(f"{path}: {at}.format: expected one of {expected}, found {shown(found)}")
