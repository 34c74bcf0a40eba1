"""Whatever a capture depends on makes it another one: files, the environment, and what is there in the process."""

import contextlib
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from cached_models import CHANGES, STATE, recalled, restored, write


@pytest.mark.parametrize("change", [*CHANGES, *STATE])
@pytest.mark.some(12)
def test_a_graph_of_something_else_is_not_found(change: str, folder: Path) -> None:
    recalled(folder)
    with restored():
        if change in CHANGES:
            CHANGES[change](folder)
        # What is refused was not found, either.
        with contextlib.suppress(AutoparError):
            assert not recalled(folder, STATE.get(change, ""))[0]
    write(folder)
    assert recalled(folder)[0] == (change not in CHANGES or "forward" not in change)
