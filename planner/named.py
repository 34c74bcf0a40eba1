"""Named: which layer of a profile a user means, by its index or its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from autopar.errors import UsageError


def position(name: str, names: Sequence[str]) -> int | None:
    """Return the index of a layer, None where there is none. A number is an index, even of layers named by numbers.

    A layer that joins modules is meant by each of them.

    >>> position("h", ["wte", "h"]), position("0", ["wte", "h"]), position("head", ["wte", "h"])
    (1, 0, None)
    >>> position("head", ["wte", "norm+head"])
    1
    """
    if re.fullmatch(r"\d{1,9}", name):
        return int(name) if int(name) < len(names) else None
    if name in names:
        return names.index(name)
    return next((index for index, each in enumerate(names) if name in each.split("+")), None)


def unknown(where: str, name: str, names: Sequence[str]) -> UsageError:
    """Return the error that no layer is meant by ``name``."""
    if re.fullmatch(r"\d+", name):
        return UsageError(f"{where} names layer {name}; the profile has layers 0..{len(names) - 1}")
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    return UsageError(f"{where}: no layer is called {name!r}; nearest: {', '.join(near)}")
