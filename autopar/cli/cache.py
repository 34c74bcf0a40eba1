"""Commands about captured graphs that are kept: ``autopar cache list`` and ``autopar cache clear``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

from autopar.cache import Cache, cache_folder
from autopar.cli.arguments import add, group, json_option
from autopar.cli.output import say, screen

captured = group("List the captured models that are kept for later runs, or clear them away.", "autopar cache list")


def list_captured(
    as_json: Annotated[bool, json_option("what is kept")] = False,
) -> None:
    """List the captured models that `run`, `worker`, `verify` and `rehearse` need not capture again."""
    found = Cache(cache_folder()).entries()
    if as_json:
        sys.stdout.write(json.dumps([asdict(entry) for entry in found], indent=1) + "\n")
        return
    from autopar.report.inputs import render_captured
    from autopar.report.table import print_parts

    print_parts(render_captured(found, cache_folder()), screen())


def clear_captured() -> None:
    """Clear the captured models away; the next run captures its model again."""
    from autopar.report.table import size

    say(screen(), f"Cleared: {size(Cache(cache_folder()).clear())} in {cache_folder()}")


add(captured, "list", list_captured, "autopar cache list", "autopar cache list --json")
add(captured, "clear", clear_captured, "autopar cache clear")
