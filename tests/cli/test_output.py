"""Standard output holds a command's result, and nothing that other code prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
def test_what_libraries_and_programs_print_goes_to_standard_error() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "the result\nafterwards\n"
    assert done.stderr == "a library\na program\n"
