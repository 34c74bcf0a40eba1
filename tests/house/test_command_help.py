"""What every command has: an example in its help that can be typed, and `--quiet`; and completion by its name."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from calls import Run
from command_lines import Command, commands, parse
from random_problems import gpt_profile, local_cluster
from suite import warm

COMMANDS = dict(commands())


def _examples(command: Command) -> list[str]:
    return [line for line in (command.epilog or "").split("\n\n") if line.startswith("autopar")]


def test_every_command_has_an_example_and_each_is_a_command_line_of_its_own() -> None:
    assert ("cluster", "probe") in COMMANDS
    for words, command in COMMANDS.items():
        shown = _examples(command)
        assert shown, words
        for line in shown:
            # Lines of help have 80 columns, of which a margin takes two.
            assert len(line) <= 78
            program, *arguments = shlex.split(line)
            assert program == "autopar"
            assert parse(arguments).startswith(" ".join(words))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_ends_with_the_examples(words: tuple[str, ...], command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command(*words, "--help")
    assert code == 0
    assert all(line in out for line in _examples(COMMANDS[words]))


def test_every_command_can_be_quiet() -> None:
    for words, each in COMMANDS.items():
        if words not in (("cluster",), ("checkpoint",), ("cache",)):
            assert any("--quiet" in parameter.opts for parameter in each.params), words


def test_a_quiet_command_says_only_its_result_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    gpt_profile(blocks=2).save("profile.json")
    local_cluster(2).save("cluster.json")
    code, out, err = command("--quiet", "plan", "--gpus", "2", "--json")
    assert (code, err) == (0, "")
    assert out == Path("plan.json").read_text()
    shown = (("compare",), ("simulate",), ("show", "plan.json"), ("show", "profile.json"), ("cluster", "list"))
    for number, words in enumerate(shown):
        # The word is the tool's or the command's.
        assert command(*(("--quiet", *words) if number % 2 else (*words, "--quiet"))) == (0, "", ""), words
    code, out, err = command("plan", "--gpus", "2", "--memory", "1MiB", "--quiet")
    assert (code, out, err.count("\n")) == (3, "", 1)
    # It does not last.
    assert "Planners" in command("compare")[2]


def test_completion_is_of_the_name_that_is_typed() -> None:
    # Which shell asks is otherwise looked up among the processes that started this one.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "autopar", "--show-completion", "bash"]
    out = warm.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "_AUTOPAR_COMPLETE=complete_bash" in out
    assert "complete -o default -F _autopar_completion autopar" in out
