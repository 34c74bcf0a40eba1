"""What is printed on a terminal of some width."""

import io
from collections.abc import Callable

from rich.console import Console


def shown(show: Callable[[Console], None], width: int = 200) -> list[str]:
    """Return every line that is printed, with single spaces between its words."""
    stream = io.StringIO()
    show(Console(file=stream, width=width))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]
