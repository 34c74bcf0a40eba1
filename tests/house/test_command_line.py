"""The face of autopar: help is quick and light, and errors have their exit codes."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from autopar.cli import app
from paths import ROOT
from random_problems import gpt_profile, local_cluster
from suite import warm


def _python(script: str, *options: str, cwd: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
    return subprocess.run([sys.executable, *options, "-c", script], cwd=cwd, capture_output=True, text=True, **more)


def test_help_and_commands_that_read_files_import_nothing_heavy(tmp_path: Path) -> None:
    # -S leaves site-packages' .pth files, and with them the editable install, out; the libraries are put back by path.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    script = f"import sys; sys.path += {libraries!r}; import runpy; sys.argv = ['autopar', '--help']"
    found = _python(f"{script}; runpy.run_module('autopar', run_name='__main__')", "-S")
    assert found.returncode == 0, found.stderr
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f" {name} " in found.stdout
    gpt_profile(blocks=3).save(tmp_path / "profile.json")
    local_cluster(2).save(tmp_path / "cluster.json")
    line = "forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1"
    (tmp_path / "graph.txt").write_text(f"node1 -- x -- {line}\n")
    done = _python(LIGHTLY, cwd=tmp_path, input=LIGHT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^autopar 0\.\S*, .*torch 2\.", done.stdout, re.MULTILINE)
    script = "print(dir(autopar) == sorted(autopar.__all__), 'torch' in sys.modules, len(sys.modules))"
    same, torch, count = _python(f"import autopar, sys; {script}").stdout.split()
    assert (same, torch) == ("True", "False")
    assert int(count) < 100


LIGHT = """\
--help
--version
plan --help
plan --gpus 2
simulate
compare --gpus 2
show plan.json
show profile.json
cluster list
import pipedream graph.txt -o imported.json
"""
LIGHTLY = """
import sys
from autopar.cli import main

for line in sys.stdin.read().splitlines():
    sys.argv = ["autopar", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, line
    # What reads graphs of other systems has networkx read them.
    graphs = {"networkx"} if line.startswith("import pipedream") else set()
    heavy = {"torch", "pandas", "matplotlib", "networkx", "pulp", "highspy"} & set(sys.modules) - graphs
    assert not heavy, f"{line} imports {heavy}"
import autopar, autopar.api.exports
for each in autopar.api.exports.TARGETS:
    autopar.export("plan.json", each, nearest=True)
assert "torch" not in sys.modules
"""


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
    found = warm.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == code
    assert found.stderr.startswith(said)
    assert found.stderr.count("\n") == 1
