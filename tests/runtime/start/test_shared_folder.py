"""The folder that all hosts must see."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from autopar.errors import FileError
from autopar.ranks.context import RankContext
from autopar.runtime.start.saving import check_shared


class Talking:
    """A rank that is a thread; ranks gather through a list that they share."""

    def __init__(self, rank: int, said: list[str], turn: threading.Barrier) -> None:
        self.rank, self._said, self._turn = rank, said, turn

    def gather(self, text: str) -> list[str]:
        self._said[self.rank] = text
        self._turn.wait()
        heard = list(self._said)
        self._turn.wait()
        return heard


def checked(folders: list[Path]) -> list[str]:
    said, turn = [""] * len(folders), threading.Barrier(len(folders))

    def one(rank: int) -> str:
        try:
            check_shared(cast(RankContext, Talking(rank, said, turn)), folders[rank])
        except FileError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as threads:
        return list(threads.map(one, range(len(folders))))


def test_a_folder_of_one_host_alone_is_refused_on_all_ranks(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    own.mkdir()
    assert checked([shared] * 3) == [""] * 3
    assert list(shared.iterdir()) == []
    refused = checked([shared, shared, own])
    assert all("rank 2 on " in said and "sees another than rank 0" in said for said in refused)
    assert list(shared.iterdir()) == list(own.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert all("cannot be written on " in said for said in checked([tmp_path / "file"] * 2))
