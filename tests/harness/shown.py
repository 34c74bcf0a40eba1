"""What is printed on a terminal of some width."""

import io
from collections.abc import Iterable

from rich.console import Console

from autopar.report.table import Part, print_parts


def shown(parts: Iterable[Part], width: int = 200) -> list[str]:
    """Return every line that is printed, with single spaces between its words."""
    stream = io.StringIO()
    print_parts(parts, Console(file=stream, width=width))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]
