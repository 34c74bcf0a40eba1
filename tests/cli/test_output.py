"""Standard output holds a command's result, and nothing that other code prints; progress is a bar, lines or none."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.cli import output
from autopar.cli.output import check_output, quietly, screen
from autopar.errors import UsageError
from paths import ROOT

SCRIPT = """
import os
from autopar.cli.output import results_only

with results_only():
    os.write(1, b"a library\\n")
    os.system("echo a program")
    print("the result")
print("afterwards")
"""


@pytest.mark.reliability(45)
def test_what_libraries_print_and_long_phases_show_stay_off_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "the result\nafterwards\n"
    assert done.stderr == "a library\na program\n"
    assert "searching families" in _on_a_terminal(SLOW_PHASES.format(0.2, "input()"), "searching families")
    assert _on_a_terminal(SLOW_PHASES.format(600.0, "")).strip() == "done"
    # Nor does it in a pipe.
    slow = [sys.executable, "-c", SLOW_PHASES.format(0.2, "time.sleep(0.5)")]
    assert subprocess.run(slow, cwd=ROOT, capture_output=True, text=True).stderr == "done\n"
    with quietly(), output.phases() as say, output.steps_progress(2) as step, output.slow_phases("x") as slow:
        for each in (say, slow):
            each("a phase", 0.5)
        step(0, 1.0)
        screen().print("a note")
    assert capfd.readouterr() == ("", "")


def test_a_command_that_forks_ranks_has_a_bar_without_a_thread() -> None:
    for forks in (True, False):
        found = _on_a_terminal(FORKING.format(forks))
        assert "training: 1f1b" in found
        assert f"{1 if forks else 2} threads" in found


FORKING = """
import sys, threading
from autopar.cli import output
with output.phases(forks={}) as say:
    say("training: 1f1b", 0.5)
    count = threading.active_count()
print(count, "threads", file=sys.stderr)
"""
SLOW_PHASES = """
import sys, time
from autopar.cli import output
output.SLOW_S = {}
with output.slow_phases("beginning") as say:
    say("searching families", 0.5)
    {}
print("done", file=sys.stderr)
"""


def _on_a_terminal(script: str, awaited: str = "") -> str:
    """Return what a script writes to a terminal of its own; when it has written what is awaited, Return is pressed."""
    leader, follower = pty.openpty()
    try:
        command = [sys.executable, "-c", script]
        running = subprocess.Popen(command, cwd=ROOT, stdin=follower, stdout=follower, stderr=follower)
        os.close(follower)
        found, deadline = b"", time.monotonic() + 60
        while time.monotonic() < deadline and select.select([leader], [], [], 60)[0]:
            try:
                found += os.read(leader, 65536)
            except OSError:
                break
            if awaited and awaited in found.decode(errors="replace"):
                os.write(leader, b"\n")
                awaited = ""
        assert running.wait(60) == 0
    finally:
        os.close(leader)
    return found.decode()


def test_elsewhere_a_line_comes_every_two_seconds_and_with_the_last_step_and_for_every_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with output.steps_progress(40) as step:
        for index in range(40):
            now_s = 100.0 + 0.25 * index
            step(index, 1 / (index + 1))
    lines = [f"step {done}/40: loss {1 / done:.4f}" for done in (1, 9, 17, 25, 33, 40)]
    assert capsys.readouterr().err.splitlines() == ["starting ranks", *lines]
    with output.phases() as say:
        for what, share in (("measuring", 0.1), ("measuring", 0.6), ("linking", 0.9), ("measuring", 1.0)):
            say(what, share)
    assert capsys.readouterr().err == "measuring\nlinking\nmeasuring\n"
    told = [("timing: warming up", 0.0), ("timing: forwards", 0.1), ("timing: forwards", 0.4), ("timing: halves", 0.9)]
    with output.phases(sums_up=True) as say:
        for at_s, (what, share) in zip((0.0, 1.0, 4.0, 7.0, 8.0, 10.5), [*told, ("linking", 0.0)] * 2, strict=False):
            now_s = 200.0 + at_s
            say(what, share)
    said = ["timing", "timing: forwards (40% done, about 6 s left)", "timing: halves (90% done, about 1 s left)"]
    assert capsys.readouterr().err.splitlines() == [
        *said,
        "linking",
        "timing",
        "took 10.5 s: timing 8 s, linking 2.5 s",
    ]


def test_what_a_command_reads_or_writes_otherwise_is_not_its_output(tmp_path: Path) -> None:
    own, link = tmp_path / "config.json", tmp_path / "link.json"
    own.touch()
    link.symlink_to(own)
    for path, how, said in (
        (own, {"inputs": (own,)}, "is read by"),
        (link, {"inputs": (own,)}, "is read by"),
        (own, {"inputs": (tmp_path,)}, "is read by"),
        (own, {"others": (link,)}, "is written by"),
        (tmp_path, {}, "is a folder"),
    ):
        with pytest.raises(UsageError, match=said):
            check_output(path, None, overwrite=True, **how)
    check_output(own, None, overwrite=True, inputs=(tmp_path / "other.json",))
    check_output(own, own, overwrite=False)
    with pytest.raises(UsageError, match="pass --overwrite"):
        check_output(own, None, overwrite=False)
