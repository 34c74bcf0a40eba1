"""When checkpoints are due; and saving, with every system call failing in its turn, or the process killed there."""

import itertools
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from autopar.errors import FileError
from autopar.formats.checkpoint import RankPart
from autopar.formats.report import CheckpointTimes
from autopar.runtime.checkpoint.folder import MANIFEST, CheckpointFolder, CheckpointReader, read_manifest, read_verified
from autopar.runtime.checkpoint.state import HeldPiece, held_pieces
from autopar.runtime.checkpoint.writer import Cadence, CheckpointWriter, SaveSettings
from checkpoint_pairs import PLAN, RUN
from failing_calls import Calls, counted, full, killed, meeting
from odd_errors import ODD_ERRORS, odd_error
from threads import in_ranks


class Ranks:
    """Two ranks, of one parameter each, that save into a folder."""

    def __init__(self, folder: Path, token: str, known: tuple[int, ...] = ()) -> None:
        folder.mkdir(exist_ok=True)
        self.values = [torch.zeros(200) for _ in range(2)]
        settings, contexts = SaveSettings(folder, token, RUN, PLAN, (), known), meeting(2)
        states: list[Any] = [SimpleNamespace(look=partial(self._look, rank)) for rank in range(2)]
        files = [f"stage-{rank:05d}-replica-00000.safetensors" for rank in range(2)]
        self.writers = [
            CheckpointWriter(contexts[rank], states[rank], settings, files[rank], dict, {}) for rank in range(2)
        ]

    def _look(self, rank: int) -> tuple[list[HeldPiece], RankPart]:
        return held_pieces("parameter", f"w{rank}", self.values[rank]), RankPart()

    def save(self, step: int, *, conclude: bool = True) -> None:
        def of_rank(rank: int) -> None:
            self.values[rank].fill_(float(step))
            self.writers[rank].save(step)
            # What training changes afterwards is not saved.
            self.values[rank].fill_(-1.0)
            if conclude:
                self.writers[rank].conclude()

        in_ranks(2, lambda rank, transport: of_rank(rank))


def values(folder: Path) -> tuple[int, list[float]]:
    newest, _ = CheckpointFolder(folder).newest()
    assert newest is not None
    with CheckpointReader(newest.folder, newest.manifest) as reader:
        tensors = [reader.read(each) for each in newest.manifest.tensors if each.kind == "parameter"]
    assert all(len(set(tensor.tolist())) == 1 for tensor in tensors)
    assert len(tensors) == 2
    return newest.manifest.step, [float(tensor[0]) for tensor in tensors]


def remains(folder: Path) -> list[Path]:
    """Return what a run that begins has left of others that ended while they wrote."""
    with CheckpointFolder(folder).lock():
        return [each for each in folder.iterdir() if each.name.endswith((".new", ".old", ".gone"))]


@pytest.mark.reliability(16)
def test_sound_checkpoints_are_kept_and_cadences_count_from_the_first_step(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "0" * 16)
    for step in (3, 5, 9, 12):
        ranks.save(step)
        assert values(tmp_path) == (step, [step, step])
    assert CheckpointFolder(tmp_path).steps() == [9, 12]
    assert {each.name for each in tmp_path.iterdir()} == {"step-9", "step-12"}
    assert {each.name for each in (tmp_path / "step-12").iterdir()} == {
        "manifest.json", "stage-00000-replica-00000.safetensors", "stage-00001-replica-00000.safetensors",
    }  # fmt: skip
    assert [saved.step for saved in ranks.writers[1].results] == [3, 5, 9, 12]
    # The next save waits for the one before.
    ranks.save(13, conclude=False)
    ranks.save(14)
    assert values(tmp_path) == (14, [14, 14])
    assert CheckpointFolder(tmp_path).steps() == [13, 14]
    # All ranks have waited as long as the one that waited longest.
    ranks.save(15, conclude=False)
    for rank, writer in enumerate(ranks.writers):
        writer._pause_s = 40.0 + rank
    in_ranks(2, lambda rank, transport: ranks.writers[rank].conclude())
    assert [writer.results[-1].pause_s for writer in ranks.writers] == [41.0, 41.0]
    # What lies in other memory by now is read there.
    ranks.values[0] = ranks.values[0].clone()
    ranks.save(16)
    assert values(tmp_path) == (16, [16, 16])
    assert saved(Cadence(4, 0, float), 13, 1.0, 1.0) == [4, 8, 12]
    assert saved(Cadence(4, 6, float), 13, 1.0, 1.0, first=6) == [8, 12]
    # What is copied has the form of what is there now, and memory that is kept.
    pieces, others = (held_pieces("parameter", "w", torch.zeros(size)) for size in (3, 4))
    copy = ranks.writers[0]._copy
    assert copy(pieces)[0] is copy(pieces)[0]
    assert copy(others)[0].tensor.shape == (4,)
    # By itself, ranks go by what the slowest takes.
    assert saved(Cadence("auto", 0, lambda number: 10 * number), 1000, 1.0, 1.0)[:3] == [5, 39, 73]
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "c", Path("/proc/self/c"), Path("/sys/kernel/c")):
        with (
            pytest.raises(FileError, match=f"{folder}: checkpoints cannot be written there"),
            CheckpointFolder(folder).lock(),
        ):
            pass


def _calls(folder: Path) -> int:
    calls = Calls(None, full)
    ranks = Ranks(folder, "0" * 16)
    ranks.save(1)
    with counted(calls):
        ranks.save(2)
    return calls.count


@pytest.mark.slow
@pytest.mark.reliability(15)
def test_whatever_call_fails_training_goes_on_and_a_sound_checkpoint_is_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    count = _calls(tmp_path / "all")
    assert count > 30
    for at in range(count + 4):
        folder, called = tmp_path / str(at), list[str]()
        ranks = Ranks(folder, "0" * 16)
        ranks.save(1)

        def fail(name: str, called: list[str] = called) -> None:
            called.append(name)
            full(name)

        with counted(Calls(at, fail)):
            ranks.save(2)
        step, found = values(folder)
        assert found == [step, step]
        failed = ranks.writers[0].results[-1].failure
        assert [writer.results[-1].failure for writer in ranks.writers] == [failed, failed]
        # Folders that are there already, or that cannot be flushed, are no failure.
        assert failed is not None or set(called) <= {"mkdir", "open", "fsync", "close"}
        if failed is not None:
            assert step == 1 or "step-2" in os.listdir(folder)
            assert "No space left" in failed
            assert "step 2 was not written" in capfd.readouterr().err
        else:
            assert step == 2
        # The next one is written as if nothing had been.
        ranks.save(3)
        assert values(folder) == (3, [3, 3])
        assert not remains(folder)


@pytest.mark.parametrize("name", ODD_ERRORS)
@pytest.mark.reliability(15)
def test_why_a_checkpoint_was_not_written_is_said_whole(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for where in ("autopar.runtime.checkpoint.weights.write", "autopar.runtime.checkpoint.writer.merge"):
        ranks = Ranks(tmp_path, "0" * 16)
        with patch(where, side_effect=odd_error(name)):
            ranks.save(2)
        (failed,) = {writer.results[-1].failure for writer in ranks.writers}
        words = ODD_ERRORS[name][1]
        assert failed is not None
        assert failed.startswith("rank ")
        assert all(each in failed for each in words)
        CheckpointTimes(steps=(), failures=(failed,), pause_s=0.0, busy_s=0.0, buffers_bytes=())
        (line,) = capfd.readouterr().err.splitlines()
        assert (
            line == f"autopar: the checkpoint of step 2 was not written: {failed}; training goes on, there is none yet"
        )
    ranks.save(3)
    assert values(tmp_path) == (3, [3, 3])
    assert not remains(tmp_path)


def test_what_fails_at_every_step_is_said_once_and_counted_and_another_cause_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks, said = Ranks(tmp_path, "0" * 16), list[str]()
    for step in range(1, 26):
        # Every folder has its step in its name.
        cause = "no space at" if step != 20 else "not permitted at"
        with patch("autopar.runtime.checkpoint.weights.write", side_effect=OSError(f"{cause} step-{step}/a")):
            ranks.save(step)
        assert ranks.writers[0].results[-1].failure == f"rank 0: OSError: {cause} step-{step}/a"
        said += capfd.readouterr().err.splitlines()
    assert [re.findall(r"of step (\d+) was|(\d+) times by now", line) for line in said] == [
        [("1", "")],
        [("10", ""), ("", "10")],
        [("20", "")],
    ]


def _saves_and_is_killed(folder: Path, at: int, again: bool) -> int:
    """Save steps 1 and 2, or 1 twice, in a process that is killed at some call of the second; return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            ranks = Ranks(folder, "0" * 16)
            ranks.save(1)
            with counted(Calls(at, killed)):
                (Ranks(folder, "1" * 16, (1,)) if again else ranks).save(1 if again else 2)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.slow
@pytest.mark.reliability(4, 5)
def test_wherever_the_process_is_killed_the_old_set_or_the_new_is_there_whole(tmp_path: Path) -> None:
    seen = set[int]()
    for at in range(_calls(tmp_path / "all")):
        folder = tmp_path / str(at)
        _saves_and_is_killed(folder, at, again=False)
        step, found = values(folder)
        assert found == [step, step]
        seen.add(step)
        assert not remains(folder)
        again = Ranks(folder, "1" * 16, (step,))
        again.save(2 + step)
        assert values(folder)[0] == 2 + step
        assert len(CheckpointFolder(folder).steps()) == 2
    assert seen == {1, 2}


@pytest.mark.slow
@pytest.mark.reliability(5)
def test_wherever_a_checkpoint_that_is_written_again_is_killed_one_of_the_two_is_there(tmp_path: Path) -> None:
    for at in range(200):
        folder = tmp_path / str(at)
        ended = _saves_and_is_killed(folder, at, again=True)
        with CheckpointFolder(folder).lock():
            assert values(folder) == (1, [1, 1])
            assert len([each for each in folder.iterdir() if each.is_dir()]) == 1
        if not ended:
            break
    assert 20 < at < 199


@pytest.mark.reliability(18)
def test_a_thousand_bytes_of_pieces_flipped_in_turn_are_noticed_and_the_older_checkpoint_is_taken(
    tmp_path: Path,
) -> None:
    ranks = Ranks(tmp_path, "0" * 16)
    ranks.save(1)
    ranks.save(2)
    files = sorted((tmp_path / "step-2").glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    places = [(file, at) for file, size in zip(files, sizes, strict=True) for at in range(size)]
    assert len(places) >= 1000
    for file, at in places[:: max(1, len(places) // 1000)]:
        content = file.read_bytes()
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        newest, wrong = CheckpointFolder(tmp_path).newest()
        assert newest is not None
        assert newest.manifest.step == 1
        assert str(file) in wrong[0]
        file.write_bytes(content)
    assert read_verified(tmp_path / "step-2").step == 2


def _linked(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _of_another_step(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-1" / MANIFEST, path)


PIECES = "stage-00001-replica-00000.safetensors"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "pieces cut short": (PIECES, lambda path: os.truncate(path, path.stat().st_size - 1), "is damaged"),
    "empty pieces": (PIECES, lambda path: os.truncate(path, 0), "has 0 bytes"),
    "no pieces": (PIECES, Path.unlink, "No such file"),
    "a link in place of pieces": (PIECES, _linked, "not a regular file"),
    "a pipe in place of pieces": (PIECES, lambda path: [path.unlink(), os.mkfifo(path)], "not a regular file"),
    "no manifest": (MANIFEST, Path.unlink, "No such file"),
    "a manifest cut short": (MANIFEST, lambda path: os.truncate(path, path.stat().st_size // 2), "not JSON"),
    "a manifest of another step": (MANIFEST, _of_another_step, "its folder's name of another"),
    "a link in place of the manifest": (MANIFEST, _linked, "not a regular file"),
    "a folder in place of the manifest": (MANIFEST, lambda path: [path.unlink(), path.mkdir()], "not a regular file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.reliability(17, 19, 20, 22)
def test_what_is_wrong_with_the_newest_is_said_and_the_one_before_taken(damage: str, tmp_path: Path) -> None:
    name, harm, said = DAMAGES[damage]
    ranks = Ranks(tmp_path, "0" * 16)
    ranks.save(1)
    ranks.save(2)
    harm(tmp_path / "step-2" / name)
    newest, (wrong,) = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    assert newest.manifest.step == 1
    assert str(tmp_path / "step-2" / name) in wrong
    assert said in wrong
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(FileError, match="no checkpoint is sound"):
        CheckpointFolder(tmp_path).newest()


@pytest.mark.reliability(21)
def test_a_pickle_in_place_of_pieces_is_refused_and_not_loaded(tmp_path: Path) -> None:
    Ranks(tmp_path / "c", "0" * 16).save(1)
    file, place = tmp_path / "c" / "step-1" / PIECES, tmp_path / "c" / "step-1"
    payload = type("Touching", (), {"__reduce__": lambda _: (Path.touch, (tmp_path / "ran",))})()
    file.write_bytes(pickle.dumps(payload))
    manifest = read_manifest(place)
    size, digest = file.stat().st_size, sha256(file.read_bytes()).hexdigest()
    # Whoever made it has said so in the manifest.
    said = {"bytes": size, "sha256": digest}
    files = tuple(each.model_copy(update=said) if each.name == PIECES else each for each in manifest.files)
    forged = manifest.model_copy(update={"files": files}).with_digest()
    (place / MANIFEST).write_text(forged.dumps())
    assert read_verified(place) == forged
    with CheckpointReader(place, forged) as reader, pytest.raises(FileError, match="cannot read weights"):
        [reader.read(each) for each in forged.tensors]
    assert not (tmp_path / "ran").exists()


def saved(cadence: Cadence, steps: int, step_s: float, cost_s: float | None, first: int = 0) -> list[int]:
    """Return after which steps a checkpoint was due; ``cost_s`` is what each takes."""
    found: list[int] = []
    for done in range(first + 1, steps + 1):
        cadence.add(step_s)
        if cadence.due(done, lambda: cost_s if found else None):
            found.append(done)
    return found


@pytest.mark.parametrize(("step_s", "cost_s"), [(0.1, 0.03), (1.0, 0.001), (0.01, 0.5)])
def test_by_itself_it_takes_as_much_of_the_time_as_is_allowed(step_s: float, cost_s: float) -> None:
    steps = 20_000
    found = saved(Cadence("auto", 0, float), steps, step_s, cost_s)
    assert found[0] == 5
    share = len(found) * cost_s / (steps * step_s)
    assert share < 0.0301
    gaps = {after - before for before, after in itertools.pairwise(found)}
    assert len(gaps) == 1
    assert gaps == {max(5, -(-cost_s // (0.03 * step_s)))} or share > 0.028


def test_the_first_step_counts_for_no_cadence() -> None:
    cadence, due = Cadence("auto", 0, float), list[int]()
    for done, step_s in enumerate([100.0, *[1.0] * 5, *[3.0] * 4, *[1.0] * 20], start=1):
        cadence.add(step_s)
        if cadence.due(done, lambda: 0.29 if due else None):
            due.append(done)
    assert due == [5, 15, 25]
