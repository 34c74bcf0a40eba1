"""docs/exports_llama.md: its commands write the files that it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paths import ROOT

PAGE = (ROOT / "docs" / "exports_llama.md").read_text()


@pytest.mark.slow
def test_the_commands_of_the_page_write_the_files_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    configuration = json.loads(PAGE.partition("```json\n")[2].partition("```")[0])
    Path("llama/config.json").write_text(json.dumps(configuration))
    for line in dict.fromkeys(re.findall("^    autopar (.*)$", PAGE, re.MULTILINE)):
        code, _, err = command(*line.split(), *(["--overwrite"] if line.startswith("export") else []))
        assert code == 0, err
    shown = re.findall("^`([^`\n]+)`:\n\n```[a-z]+\n(.*?\n)```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(shown) == 10
    for name, text in shown:
        assert Path(name).read_text() == text, name
