"""docs/howto/export.md: the commands on Llama 3 write the files that it shows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from page_runs import command_lines
from pages import read_page
from paths import ROOT

PAGE = read_page(ROOT / "docs" / "howto" / "export.md")
SHOWN = "is written by the commands"
MINUTES = "takes minutes"


@pytest.mark.slow
def test_the_commands_of_the_page_write_the_files_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for block in PAGE.blocks:
        if block.mark == "file":
            Path(block.value).parent.mkdir()
            Path(block.value).write_text(block.text)
    (commands,) = (block for block in PAGE.blocks if block.value == MINUTES)
    lines = [words for _, words in command_lines(commands)]
    for words in lines:
        code, _, err = command(*words)
        assert code == 0, err
    shown = [block.text for block in PAGE.blocks if block.value == SHOWN]
    # Beside the profile, its cluster, the plan and the model's folder, all that is there is shown.
    written = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file() and path.suffix != ".json"}
    assert len(shown) == len(written) == len(lines) - 2
    assert sorted(shown) == sorted(written.values())
    text = PAGE.path.read_text()
    assert all(f"`{name}`:" in text for name in written)
