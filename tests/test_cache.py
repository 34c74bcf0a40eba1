"""Captured graphs are kept in a folder of the user's alone; what is torn or forged is not believed."""

import json
import shutil
from pathlib import Path
from random import Random

import pytest

from autopar import cache as caching
from autopar.cache import VARIABLE, Cache, Entry, cache_folder, users_cache
from autopar.errors import FileError
from cached_models import tear


def kept(folder: Path, key: str = "k", size: int = 100) -> Cache:
    """Return a cache that keeps an entry of two files."""
    cache = Cache(folder)

    def write(made: Path) -> None:
        made.mkdir()
        (made / "layers.json").write_bytes(b"x" * size)
        (made / "constants.safetensors").write_bytes(bytes(range(50)))

    assert cache.keep(
        Entry(key, "model.py", "a" * 64, {"helper.py": "b"}, float(ord(key)), 3, {"f": "c"}, {"V": "d"}), write
    )
    return cache


def test_what_is_kept_is_found_listed_and_cleared(tmp_path: Path) -> None:
    cache = kept(tmp_path / "cache")
    entry = cache.sound("k")
    assert entry is not None
    assert cache.entries() == [entry]
    assert cache.sound("other") is None
    assert (entry.model, entry.layers, entry.files, entry.environment) == ("model.py", 3, {"f": "c"}, {"V": "d"})
    assert entry.bytes == 150
    assert entry.contents.keys() == {"layers.json", "constants.safetensors"}
    assert cache.knows("a" * 64, {"helper.py": "b"})
    assert not cache.knows("a" * 64, {})
    assert not cache.knows("b" * 64, {"helper.py": "b"})
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert cache.clear() > 150
    assert cache.entries() == []


@pytest.mark.parametrize("seed", range(40))
def test_what_is_torn_is_not_sound(seed: int, tmp_path: Path) -> None:
    cache, random = kept(tmp_path / "cache"), Random(seed)
    before = {path.name: path.read_bytes() for path in cache.folder_of("k").iterdir()}
    how = tear(cache.folder_of("k"), random)
    assert cache.sound("k") is None, how
    for name, content in before.items():
        (cache.folder_of("k") / name).write_bytes(content)
    assert cache.sound("k") is not None


def test_what_was_signed_elsewhere_or_under_another_name_is_not_believed(tmp_path: Path) -> None:
    cache, other = kept(tmp_path / "one"), kept(tmp_path / "other", "z")
    shutil.copytree(other.folder_of("z"), cache.folder_of("z"))
    shutil.copytree(cache.folder_of("k"), cache.folder_of("another"))
    assert cache.sound("z") is None
    assert cache.sound("another") is None
    content = json.loads((cache.folder_of("k") / "entry.json").read_text())
    (cache.folder_of("k") / "entry.json").write_text(json.dumps(content | {"layers": 4}))
    assert cache.sound("k") is None


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_reach_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path / "cache").folder.chmod(mode)
    with pytest.raises(FileError, match="chmod 700"):
        Cache(tmp_path / "cache")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    assert users_cache() is None
    assert "chmod 700" in capsys.readouterr().err
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(FileError, match="belongs to another user"):
        Cache(tmp_path / "cache")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "_used_s", lambda folder: {"a": 3, "b": 1, "c": 2, "d": 0}[folder.name])
    monkeypatch.setattr(caching, "MOST_BYTES", 4000)
    for key in "abcd":
        cache = kept(tmp_path / "cache", key, 1000)
    assert [entry.key for entry in cache.entries()] == ["d", "a"]


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert Cache(tmp_path / "file" / "cache").keep(Entry("k", "m", "s", {}, 0.0, 1), Path.mkdir) is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "autopar"
