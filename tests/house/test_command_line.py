"""The face of autopar: help is quick and light, and errors have their exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from autopar.cli import app
from paths import ROOT


def _python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)


def test_help_lists_every_command_from_an_uninstalled_checkout() -> None:
    # -S leaves site-packages' .pth files, and with them the editable install, out; the libraries are put back by path.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    script = f"import sys; sys.path += {libraries!r}; import runpy; sys.argv = ['autopar', '--help']"
    found = _python("-S", "-c", f"{script}; runpy.run_module('autopar', run_name='__main__')")
    assert found.returncode == 0, found.stderr
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f" {name} " in found.stdout


def test_help_imports_neither_torch_nor_pandas_nor_matplotlib() -> None:
    script = (
        "import sys; sys.argv = ['autopar', '--help']\n"
        "from autopar.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    assert _python("-c", script).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("OSError(28, 'No space left on device', '/tmp/x')", 4, "autopar: /tmp/x: No space left on device\n"),
        ("ZeroDivisionError('a\\nb')", 1, "autopar: ZeroDivisionError: a b; this is a fault of autopar; please report"),
        ("KeyboardInterrupt()", 130, "autopar: interrupted\n"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "autopar: ended by SIGTERM\n"),
        ("os.kill(os.getpid(), signal.SIGHUP)", 129, "autopar: ended by SIGHUP\n"),
        # What clean-up makes of it, in a library whose state was half changed, is no failure.
        ("raises(RecursionError('maximum recursion depth exceeded'), signal.SIGINT)", 130, "autopar: interrupted\n"),
        ("raises(CaptureError('cannot be captured'), signal.SIGTERM)", 143, "autopar: ended by SIGTERM\n"),
    ],
)
def test_whatever_ends_a_command_is_one_line_without_a_traceback(raised: str, code: int, said: str) -> None:
    fails = raised if raised.startswith(("os.", "raises")) else f"raise {raised}"
    script = (
        "import os, signal, sys\n"
        "from autopar.cli import app, main\n"
        "from autopar.errors import CaptureError\n"
        "def raises(error, number):\n"
        "    try: os.kill(os.getpid(), number)\n"
        "    finally: raise error\n"
        f"def fail() -> None:\n    {fails}\n    raise AssertionError\n"
        "app.command('fail')(fail)\n"
        "sys.argv = ['autopar', 'fail']\n"
        "main()"
    )
    found = _python("-c", script)
    assert found.returncode == code
    assert found.stderr.startswith(said)
    assert found.stderr.count("\n") == 1


def test_an_unknown_command_is_a_usage_error() -> None:
    found = _python("-m", "autopar", "conquer")
    assert found.returncode == 2
    assert "conquer" in found.stderr


def test_the_modules_names_are_listed_without_importing_anything_heavy() -> None:
    script = (
        "import autopar, sys; print(dir(autopar) == sorted(autopar.__all__), 'torch' in sys.modules, len(sys.modules))"
    )
    same, torch, count = _python("-c", script).stdout.split()
    assert (same, torch) == ("True", "False")
    assert int(count) < 100
