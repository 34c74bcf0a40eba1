"""Is what was captured found again where nothing has changed, and nowhere else?

    python benchmarks/cached.py --changes 200 --tears 1000 --json benchmarks/results/cached.json

A model reads all that a capture may depend on (tests/harness/cached_models.py): globals, attributes, tensors, helpers,
configurations, files, the environment. Its graph is kept. Then one, two or three things of it change at random, and it
is recalled: it must be captured anew. After every change it is put back, and must be found. A kept entry is damaged,
cut, replaced or signed by another: it must not be believed. The exit code is 0 if all this is so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from autopar.cache import VARIABLE, Cache
from autopar.errors import AutoparError
from machine import Watch

HARNESS = Path(__file__).parents[1] / "tests" / "harness"
sys.path.insert(0, str(HARNESS))

from cached_models import CHANGES, STATE, recalled, restored, tear, write  # noqa: E402


def main() -> int:
    arguments = _arguments()
    random, watch = Random(arguments.seed), Watch()
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "model", Path(name) / "cache"
        folder.mkdir()
        os.environ[VARIABLE] = str(cache)
        write(folder)
        recalled(folder)
        outcomes = Counter(_changed(folder, cache, random) for _ in range(arguments.changes))
        torn = Counter(_torn(cache, random) for _ in range(arguments.tears))
    told = {"seed": arguments.seed, "changes": dict(outcomes), "tears": dict(torn)}
    watch.record(told, arguments.json)
    return bool(outcomes["served another"] or outcomes["not found again"] or torn["believed"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--tears", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _changed(folder: Path, cache: Path, random: Random) -> str:
    """Change some things, and recall the model; return what became of it."""
    chosen = random.sample([*CHANGES, *STATE], random.choice([1, 1, 1, 2, 3]))
    shutil.copytree(cache, cache.with_name("before"))
    found = False
    with restored():
        for change in (each for each in chosen if each in CHANGES):
            with contextlib.suppress(FileNotFoundError):
                CHANGES[change](folder)
        # What is refused was not found, either.
        with contextlib.suppress(AutoparError, NameError, AttributeError):
            found = recalled(folder, "\n".join(STATE[each] for each in chosen if each in STATE))[0]
    write(folder)
    shutil.rmtree(cache)
    cache.with_name("before").rename(cache)
    if found:
        sys.stderr.write(f"served another: {chosen}\n")
        return "served another"
    return "captured anew" if recalled(folder)[0] else "not found again"


def _torn(cache: Path, random: Random) -> str:
    """Damage the entry, and look for it; put it back."""
    kept = Cache(cache)
    entry = random.choice(kept.entries())
    folder = kept.folder_of(entry.key)
    shutil.copytree(folder, cache.parent / "whole")
    how = tear(folder, random)
    found = kept.sound(entry.key)
    shutil.rmtree(folder, ignore_errors=True)
    (cache.parent / "whole").rename(folder)
    if found is not None:
        sys.stderr.write(f"believed: {how}\n")
    return "noticed" if found is None else "believed"


if __name__ == "__main__":
    sys.exit(main())
