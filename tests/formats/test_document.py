"""The file border: strict reading, atomic writing, byte-equal text."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.document import MAX_DEPTH, write_text

DEVICES, LINKS = [{"type": "cpu", "memory_bytes": 1024}], [{"level": "node", "latency_s": 0.0, "bytes_per_s": 1e9}]
GOOD = {"format": "autopar.cluster", "version": 1, "devices": DEVICES, "links": LINKS}


def _text(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def _refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        Cluster.load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def test_documents_are_the_same_to_the_byte_and_refused_at_once_however_nested(tmp_path: Path) -> None:
    link = Link(level="node", latency_s=1e-5, bytes_per_s=1e9 / 3)
    cluster = Cluster(name="größe", devices=(Device(type="cpu", memory_bytes=2**62),), links=(link,))
    cluster.save(tmp_path / "c.json")
    again = Cluster.load(tmp_path / "c.json")
    assert again == cluster
    assert again.dumps() == cluster.dumps() == (tmp_path / "c.json").read_text(encoding="utf-8")
    with pytest.raises(FileError) as caught:
        Cluster.parse(_text(links=[1] * 1000, devices=["x"] * 1000), Path("cluster.json"))
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() < 5
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        assert ": $: nested deeper" in _refusal(tmp_path, "[" * 100_000)
        assert ": not JSON: " not in _refusal(tmp_path, _text(version=2))
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_text(extra=1), ": $.extra: Extra inputs are not permitted"),
        (_text(devices=[{"type": "cpu", "memory_bytes": 1, "colour": 2}]), ": $.devices[0].colour: Extra"),
        (_text(devices=[{"type": "cpu", "memory_bytes": True}]), ": $.devices[0].memory_bytes: "),
        (_text(devices=[{"type": "cpu", "memory_bytes": 2**63}]), ": $.devices[0].memory_bytes: "),
        (_text(devices=[{"type": "a\nb", "memory_bytes": 1}]), ": $.devices[0].type: holds control characters"),
        (_text(devices=[{"memory_bytes": 1}]), ": $.devices[0].type: Field required"),
        (_text(devices=[]), ": $.devices: "),
        (_text(links=[{"level": "node", "latency_s": 0, "bytes_per_s": 0}]), ": $.links[0].bytes_per_s: "),
        (_text(format="autopar.plan"), ': $.format: expected "autopar.cluster", found "autopar.plan"'),
        (_text(version=2), ": $.version: this autopar reads version 1, found 2"),
        (_text(version=True), ": $.version: this autopar reads version 1, found true"),
        ("[]", ": $: expected an object"),
        ("{", ":1:2: not JSON: "),
        ("", ":1:1: not JSON: "),
        ('{"a": 1, "a": 2}', ": $.a: key is given twice"),
        ('{"a": [{"b": 1, "b": 1}]}', ": $.a[0].b: key is given twice"),
        ('{"a": NaN}', ": $.a: NaN is not a JSON number"),
        ('{"a": 1e999}', ": $.a: number is too large"),
        ('{"a": [0, ' + "9" * 5000 + "]}", ": $.a[1]: number is too large"),
        (_text(links=[{"level": "node", "latency_s": 1e300, "bytes_per_s": 1}]), ": $.links[0].latency_s: "),
        (_text(links=[{"level": "node", "latency_s": 0, "bytes_per_s": 1e-300}]), ": $.links[0].bytes_per_s: "),
        ("[" * 100_000, ": $: nested deeper"),
        ("[" * (MAX_DEPTH + 3) + "]" * (MAX_DEPTH + 3), "nested deeper"),
    ],
)
@pytest.mark.reliability(53, 54, 56)
def test_what_is_not_strictly_the_schema_is_refused_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    assert message in _refusal(tmp_path, text)


@pytest.mark.timeout(10)
@pytest.mark.reliability(53, 57)
def test_missing_and_binary_files_those_of_a_gigabyte_and_what_may_never_end_are_file_errors(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"{}\xff")
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 2**30)
    os.mkfifo(tmp_path / "pipe")
    for name, said in {
        "none": "no such cluster file",
        "": "cannot read",
        "binary": "not UTF-8 at byte 2",
        "long": r"1073741824 bytes is too large for a cluster \(at most 268435456\)",
        "pipe": "not a regular file",
        "/dev/zero": "not a regular file",
    }.items():
        with pytest.raises(FileError, match=said):
            Cluster.load(tmp_path / name)
    said = r"(cannot read )?.{,330}: (File name too long|no file has such a name|no such cluster file.*)"
    for name in ("y" * 2000, "y/" * 2000, "y/" * 3000, "y\0" * 2000, "\ud800" * 2000, "none/" + "y" * 2000):
        with pytest.raises(FileError) as raised:
            Cluster.load(Path(name))
        assert re.fullmatch(said, str(raised.value), re.DOTALL), name[:20]


@pytest.mark.reliability(57)
def test_a_failed_write_leaves_no_half_or_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"cannot write .*No space left on device"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["c.json"]


@pytest.mark.reliability(57)
def test_an_existing_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_text(path, "one", overwrite=False)
    with pytest.raises(UsageError, match="`overwrite=True`"):
        write_text(path, "two", overwrite=False)
    assert path.read_text() == "one"
    write_text(path, "two")
    assert path.read_text() == "two"
    with pytest.raises(FileError, match="cannot write"):
        write_text(tmp_path / "none" / "c.json", "x")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="not a regular file"):
            write_text(path, "x")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" + "[]," * 300_000 + "1]", "more lists, objects or values than a file of autopar has"),
        ("{" + ", ".join(f'"key {index}": 1' for index in range(30_000)) + "}", "more than 20,000 keys of an object"),
        ("[" + "9" * 5000 + ", }", "not JSON"),
    ],
)
def test_what_takes_long_to_refuse_is_refused_first(content: str, said: str) -> None:
    text = f'{{"format": "autopar.cluster", "version": 1, "links": {content}}}'
    with pytest.raises(FileError, match=said) as caught:
        Cluster.parse(text, Path("cluster.json"))
    assert len(str(caught.value)) < 300
