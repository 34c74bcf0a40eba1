"""What every command has: an example in its help that can be typed, `--quiet`, and completion."""

from __future__ import annotations

import os
import pty
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import typer

from autopar.cli import app, progress
from autopar.cli.output import quietly, screen
from paths import ROOT
from random_problems import gpt_profile, local_cluster

Command: TypeAlias = Any  # typer's own, whose classes it does not export
GROUP: Command = typer.main.get_command(app)
Run = Callable[..., tuple[int, str, str]]


def _commands(group: Command = GROUP, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    yield words, group
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*words, name))


COMMANDS = dict(_commands())


def _examples(command: Command) -> list[str]:
    return [line for line in (command.epilog or "").split("\n\n") if line.startswith("autopar")]


def _parsed(words: list[str]) -> str:
    """Parse a command line as autopar does, and return the path of the command that would run."""
    context, command, path = GROUP.make_context("autopar", words), GROUP, list[str]()
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        path.append(name)
        context = command.make_context(name, rest, parent=context)
    return " ".join(path)


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
            assert _parsed(arguments).startswith(" ".join(words))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_ends_with_the_examples(words: tuple[str, ...], command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command(*words, "--help")
    assert code == 0
    assert all(line in out for line in _examples(COMMANDS[words]))


def test_every_command_can_be_quiet() -> None:
    for words, each in COMMANDS.items():
        if words != ("cluster",):
            assert any("--quiet" in parameter.opts for parameter in each.params), words


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    gpt_profile(blocks=4).save("profile.json")
    local_cluster(2).save("cluster.json")
    return tmp_path


@pytest.mark.parametrize("before", [True, False], ids=["of the tool", "of the command"])
def test_a_quiet_command_says_only_its_result_and_errors(files: Path, command: Run, before: bool) -> None:
    def call(*words: str) -> tuple[int, str, str]:
        return command("--quiet", *words) if before else command(*words, "--quiet")

    code, out, err = call("plan", "--gpus", "2", "--json")
    assert (code, err) == (0, "")
    assert out == (files / "plan.json").read_text()
    for words in (("compare",), ("simulate",), ("show", "plan.json"), ("show", "profile.json"), ("cluster", "list")):
        assert call(*words) == (0, "", ""), words
    code, out, err = call("plan", "--gpus", "2", "--memory", "1MiB")
    assert (code, out, err.count("\n")) == (3, "", 1)
    # It does not last.
    assert "Planners" in command("compare")[2]


def test_version_names_autopar_and_torch_without_importing_torch() -> None:
    script = (
        "import sys; sys.argv = ['autopar', '--version']\n"
        "from autopar.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    first, second = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")[:2]
    assert first.startswith("autopar 0.")
    assert ", torch 2." in first
    assert second == "0 False"


def _completed(line: str) -> list[str]:
    words = shlex.split(line)
    settings = {"_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    script = "import sys; sys.argv = ['autopar']; from autopar.cli import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **settings}
    )
    assert found.stderr == ""
    return found.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("autopar pl", ["plan"]),
        ("autopar plan --schedule zb", ["zb-h1", "zb-h2", "zb-v"]),
        ("autopar plan --schedule Inter", ["Interleaved1F1B"]),
        ("autopar plan --shard g", ["gradients"]),
        ("autopar plan --objective t", ["throughput"]),
        ("autopar plan --cluster 8xH100+", ["8xH100+8xA100-80G:200Gbps"]),
        ("autopar profile --device A100", ["A100-SXM-80G", "A100-SXM-40G"]),
        ("autopar import pi", ["pipedream", "piper"]),
        # Files are the shell's to offer.
        ("autopar show pl", []),
    ],
)
def test_a_shell_is_offered_what_options_take(line: str, offered: list[str]) -> None:
    assert _completed(line) == offered


def test_completion_is_of_the_name_that_is_typed(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which shell asks is otherwise looked up among the processes that started this one.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, _ = command("--show-completion", "bash")
    assert code == 0
    assert "_AUTOPAR_COMPLETE=complete_bash" in out
    assert "complete -o default -F _autopar_completion autopar" in out


SLOW = """
import sys, time
from autopar.cli import progress
progress.SLOW_S = 0.2
with progress.slow_phases("beginning") as say:
    say("searching families", 0.5)
    time.sleep({})
print("done", file=sys.stderr)
"""


def _on_a_terminal(script: str) -> str:
    """Return what a script writes to a terminal of its own."""
    leader, follower = pty.openpty()
    try:
        running = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdin=follower, stdout=follower, stderr=follower
        )
        os.close(follower)
        found, deadline = b"", time.monotonic() + 60
        while time.monotonic() < deadline and select.select([leader], [], [], 60)[0]:
            try:
                found += os.read(leader, 65536)
            except OSError:
                break
        assert running.wait(60) == 0
    finally:
        os.close(leader)
    return found.decode()


def test_what_takes_long_shows_on_a_terminal_how_far_it_is_and_what_is_quick_does_not() -> None:
    assert "searching families" in _on_a_terminal(SLOW.format(1.0))
    assert _on_a_terminal(SLOW.format(0.0)).strip() == "done"


def test_in_a_pipe_planning_shows_no_progress() -> None:
    found = subprocess.run([sys.executable, "-c", SLOW.format(0.5)], cwd=ROOT, capture_output=True, text=True)
    assert found.stderr == "done\n"


def test_a_quiet_bar_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    with quietly(), progress.phases() as say, progress.steps_progress(2) as step, progress.slow_phases("x") as slow:
        for each in (say, slow):
            each("a phase", 0.5)
        step(0, 1.0)
        screen().print("a note")
    assert capfd.readouterr() == ("", "")
