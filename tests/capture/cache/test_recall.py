"""What is captured once is found again where nothing has changed that it depends on, and nowhere else."""

import contextlib
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from autopar.cache import Cache
from autopar.capture.cache.recall import capture_to_keep
from autopar.capture.layers.check import check_gradients
from autopar.capture.model.source import load
from autopar.errors import AutoparError
from cached_models import CHANGES, STATE, recalled, restored, tear, write


def test_a_graph_that_is_found_computes_what_the_model_does_wherever_the_file_lies(folder: Path) -> None:
    assert not recalled(folder)[0]
    found, graph, net = recalled(folder)
    user = load(str(folder / "model.py"))
    check_gradients(net, graph, user.load_batch(user.dataset(), range(4)), user.loss)
    assert found
    assert graph.names_read is not None
    assert "FACTOR" in graph.names_read
    moved = shutil.copytree(folder, folder.parent / "moved")
    assert [recalled(moved)[0] for _ in range(2)] == [False, True]  # scale.txt is another file.
    assert not recalled(folder, seed=1)[0]


def test_changed_code_is_captured_again_and_said_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for change, said in (("configuration", False), ("helper", True)):
        recalled(folder)
        capsys.readouterr()
        CHANGES[change](folder)
        recalled(folder)
        assert ("has changed since it was captured" in capsys.readouterr().err) == said
    recalled(folder, seed=1)
    assert "has changed" not in capsys.readouterr().err


def test_what_is_torn_is_captured_again(folder: Path) -> None:
    random = Random(0)
    for _ in range(4):
        recalled(folder)
        (kept,) = (folder.parent / "cache" / "captured").iterdir()
        tear(kept, random)
        assert not recalled(folder)[0]
    assert recalled(folder)[0]


def test_listed_layers_are_not_kept_and_profiled_ones_only_when_they_are_right(folder: Path) -> None:
    text = (folder / "model.py").read_text()
    (folder / "model.py").write_text(f"{text}\ndef layers(model):\n    return [model]\n")
    assert not any(recalled(folder)[0] for _ in range(2))
    assert Cache(folder.parent / "cache").entries() == []


def test_a_kept_graph_has_the_parameters_of_the_model_it_is_found_for(folder: Path) -> None:
    recalled(folder)
    found, graph, _ = recalled(folder, "net.first.weight.data.fill_(3.0)")
    assert found
    assert torch.equal(graph.parameter("first.weight"), torch.full((6, 4), 3.0))


def test_a_script_s_own_tensors_are_read_where_they_are(folder: Path) -> None:
    for table, expected in (("TABLE", [False, False]), ("4.0", [False, True])):
        (folder / "model.py").write_text((folder / "model.py").read_text().replace("+ TABLE", f"+ {table}"))
        found = []
        for _ in expected:
            user = load(str(folder / "model.py"))
            capture = capture_to_keep(user, user.build(0), recalls=True)
            capture.keep()
            found.append(capture.found)
        assert found == expected


@pytest.mark.parametrize("change", [*CHANGES, *STATE])
@pytest.mark.some(5)
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
