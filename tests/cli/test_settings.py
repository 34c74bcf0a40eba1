"""Options from pyproject.toml: what is typed wins, what is taken is said, and what has no place there is refused."""

import json
from pathlib import Path

import pytest

from calls import Run, refused, well

SETTINGS = """\
[build-system]
gpus = 1

[tool.autopar]
gpus = 2
micro-batches = 4

[tool.autopar.plan]
min-stages = 2
exact = true
pin = ["wte,h.0 same stage"]
"""


def _planned(run: Run, *words: str) -> tuple[dict[str, int], str]:
    out, err = well(run, "plan", "--json", *words)
    return json.loads(out), err


def test_settings_stand_for_what_is_not_typed_and_are_said(run: Run) -> None:
    Path("pyproject.toml").write_text(SETTINGS)
    found, said = _planned(run)
    assert found["micro_batches"] == 4
    assert len(found["stages"]) >= 2  # type: ignore[arg-type]
    assert all(each in said for each in ("--micro-batches 4", "--gpus 2", "--min-stages 2", "--exact"))
    assert "--pin 'wte,h.0 same stage'" in said
    found, said = _planned(run, "--micro-batches", "2", "--gpus", "1", "--min-stages", "1")
    assert found["micro_batches"] == 2
    assert len(found["stages"]) == 1  # type: ignore[arg-type]
    assert "pyproject.toml: --micro" not in said
    assert run("plan", "--quiet") == (0, "", "")
    # Of a command that has only one of them.
    assert "pyproject.toml" not in well(run, "show", "profile.json")[1]
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert "pyproject.toml" not in _planned(run)[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpu = 2", "pyproject.toml:3: no option is called 'gpu'; did you mean 'gpus'?"),
        ("'micro_batches' = 2", "pyproject.toml:3: no option is called 'micro_batches'; did you mean 'micro-batches'?"),
        ("plan.gap = []", "pyproject.toml: [tool.autopar.plan]: --gap is text or a number; found a list of 0"),
        ("gpus = [2]", "pyproject.toml:3: --gpus is text or a number; found a list of 1"),
        ("exact = 1", "pyproject.toml:3: --exact is true or false; found 1"),
        ("plan = 2", "pyproject.toml:3: plan is a command; write its options below [tool.autopar.plan]"),
        ("[tool.autopar.pln]\ngpus = 2", "pyproject.toml:3: no option is called 'pln'; did you mean 'plan'?"),
        ("[tool.autopar.plan]\nsteps = 2", "pyproject.toml:4: no option is called 'steps'"),
        ("[tool.autopar.cluster.probe]\nranks = 2\nrank = 3", "pyproject.toml:5: no option is called 'rank'"),
        ("gpus = 'two'", "pyproject.toml: Invalid value for '--gpus'"),
    ],
)
def test_what_is_no_option_is_refused_with_its_line(run: Run, line: str, said: str) -> None:
    Path("pyproject.toml").write_text(f"\n[tool.autopar]\n{line}\n")
    refused(run, 2, said, "plan")


def test_a_file_names_no_code_and_no_data_and_trusts_nothing(run: Run) -> None:
    named = {"--data", "--weights", "--program", "--save", "--checkpoint", "--calibrate-with", "--output", "--trace"}
    for name in (*named, "--accept-changes", "--accept-loss", "--overwrite"):
        value = "true" if name in ("--accept-changes", "--accept-loss", "--overwrite") else "'x'"
        Path("pyproject.toml").write_text(f"[tool.autopar]\n{name[2:]} = {value}\n")
        refused(run, 2, f"pyproject.toml:2: {name} is not taken from a file, which may be somebody else's", "plan")
    Path("pyproject.toml").write_text("[tool.autopar]\ntrust-paths = true\n")
    refused(run, 2, "pyproject.toml:2: no option is called 'trust-paths'", "plan")
    Path("pyproject.toml").write_text("[tool.autopar\n")
    refused(run, 4, "pyproject.toml: not TOML: ", "plan")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("tool = 3", 4, "pyproject.toml: tool is a table; found 3"),
        ("[tool]\nautopar = [1, 2]", 4, "pyproject.toml: autopar is a table; found a list of 2"),
        (f"[tool.autopar]\ngpus = {'9' * 5000}", 4, "pyproject.toml: not TOML: "),
        (f"[tool.autopar]\ngpus = 0x{'f' * 5000}", 2, "pyproject.toml:2: --gpus is text or a number; found a huge nu"),
        (
            f"[tool.autopar]\npin = [0x{'f' * 5000}]",
            2,
            "pyproject.toml:2: --pin is text or a number; found a list of 1",
        ),
        (f"[tool.x]\ny = {'[' * 3000}{']' * 3000}", 4, "pyproject.toml: not TOML: nested too deeply"),
        (f"[tool.x{'.y' * 3000}]\nz = 1", 4, "pyproject.toml: not TOML: nested too deeply"),
    ],
)
def test_what_is_no_table_and_numbers_and_nests_without_end_are_refused(
    run: Run, text: str, code: int, said: str
) -> None:
    Path("pyproject.toml").write_text(f"{text}\n")
    refused(run, code, said, "plan")
