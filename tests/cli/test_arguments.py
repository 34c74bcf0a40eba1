"""Arguments in texts become flags on the command line, and there only; a shell is offered what options take."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import typer

import autopar
from autopar.cli import app
from autopar.cli.arguments import ARGUMENTS, as_flags, plan_with_flags
from autopar.errors import InfeasibleError, UsageError
from autopar.formats.prediction import Alternative
from autopar.planner import PlanOptions
from calls import Run, refused
from paths import ROOT
from played import small_plan
from random_problems import gpt_profile, local_cluster

Command: TypeAlias = Any  # typer's own, whose classes it does not export


def _options(command: Command) -> Iterator[str]:
    for each in getattr(command, "commands", {}).values():
        yield from _options(each)
    for parameter in command.params:
        yield from parameter.opts


def test_every_argument_that_errors_name_is_an_option_and_no_text_names_a_flag() -> None:
    flags = set(_options(typer.main.get_command(app)))
    assert {as_flags(f"`{name}`") for name in ARGUMENTS} <= flags
    # Of the search's own, nothing can be typed.
    assert {field.name for field in fields(PlanOptions)} - ARGUMENTS.keys() == {"max_candidates"}
    flags = set(_options(typer.main.get_command(app)))
    folders = (ROOT / "autopar", *(ROOT / each for each in ("planner", "profiler", "runtime")))
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    files = {path for path in files if not {"cli", "examples"} & set(path.relative_to(ROOT).parts)}
    # What pages show to be typed.
    files.remove(ROOT / "autopar" / "report" / "commands.py")
    assert len(files) > 200
    named = [
        f"{path.relative_to(ROOT)}:{line} {flag}"
        for path in sorted(files)
        for line, text in _texts(path)
        for flag in re.findall(r"--[a-z][a-z-]*", TYPED.sub("", text))
        if flag in flags and flag not in OTHERS
    ]
    assert named == []


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, without docstrings; of those with values in them, the whole."""
    tree = ast.parse(path.read_text())
    told = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for each in ast.walk(tree):
        if isinstance(each, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "" for part in each.values]
            told.update(map(id, each.values))
            yield each.lineno, "".join(map(str, parts))
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in told:
            yield each.lineno, each.value


# Flags of launchers, of nvidia-smi, and of the tool as a whole.
OTHERS = ("--nproc-per-node", "--master-port", "--distribution", "--query-gpu", "--id", "--format", "--trust-paths")
# Commands as they are typed, and a note of the tables of `autopar profile`.
TYPED = re.compile(r"`autopar [^`]*`|\(--sequence\)")


@pytest.mark.parametrize(
    ("options", "said", "typed"),
    [
        ({"gpus": 0}, "`gpus` must be at least 1, found 0", "--gpus must be at least 1, found 0"),
        ({"gpus": 2, "micro_batches": 5}, "`micro_batches=5` does not divide", "--micro-batches 5 does not divide"),
        ({"gpus": 2, "forbid_cut": ("h 9",)}, "`forbid_cut='h 9'`: no layer", "--forbid-cut 'h 9': no layer"),
        ({"gpus": 2, "pin": ("0",)}, "`pin='0'`", "--pin 0"),
    ],
)
def test_errors_name_arguments_in_python_and_flags_typed(
    options: dict[str, Any], said: str, typed: str, run: Run
) -> None:
    profile = gpt_profile(blocks=4)
    profile.save("profile.json")
    with pytest.raises(UsageError, match=re.escape(said)):
        autopar.plan(profile, local_cluster(2), **options)
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value[0] if isinstance(value, tuple) else value)]
    refused(run, 2, typed, "plan", *words)


def test_remedies_are_typed_as_said_and_what_is_no_argument_stays(run: Run) -> None:
    profile, cluster = gpt_profile(blocks=2), local_cluster(2)
    profile.save("profile.json")
    with pytest.raises(InfeasibleError) as caught:
        autopar.plan(profile, cluster, gpus=2, memory_bytes="1MiB")
    (remedy,) = re.findall(r"with `(memory_bytes='\w+')`", str(caught.value))
    text = ast.literal_eval(remedy.partition("=")[2])
    autopar.plan(profile, cluster, gpus=2, memory_bytes=text)
    refused(run, 3, f"with --memory {text}", "plan", "--gpus", "2", "--memory", "1MiB")
    for text in ("`autopar plan`", "`gpus=4, colour=2`", "`model.py`", "`x = 1`", "gpus=4", "`f(gpus=4)`", "`"):
        assert as_flags(text) == text
    others = Alternative(name="x", infeasible="`gpus=2`"), Alternative(name="y", step_s=1.0, excluded="`use_all`")
    changes = {"notes": ("pass `seed=3`",), "alternatives": others}
    found = plan_with_flags(small_plan((1, 1), 2).model_copy(update=changes))
    assert found.notes == ("pass --seed 3",)
    assert (found.alternatives[0].infeasible, found.alternatives[1].excluded) == ("--gpus 2", "--use-all")


@pytest.mark.parametrize("value", ["16GiB", "a b", "it's", "", "$HOME", "a,b same stage", "--gpus", "\\"])
def test_a_shell_takes_every_value_as_it_was_meant(value: str) -> None:
    words = shlex.split(as_flags(f"`gpus=4, memory_bytes={value!r}, exact=True`"))
    assert words == ["--gpus", "4", "--memory", value, "--exact"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("autopar pl", "plan"),
        ("autopar plan --schedule zb", "zb-h1 zb-h2 zb-v"),
        ("autopar plan --schedule Inter", "Interleaved1F1B"),
        ("autopar plan --shard g", "gradients"),
        ("autopar plan --objective t", "throughput"),
        ("autopar plan --cluster 8xH100+", "8xH100+8xA100-80G:200Gbps"),
        ("autopar profile --device A100", "A100-SXM-80G A100-SXM-40G"),
        ("autopar import pi", "pipedream"),
        # Files are the shell's to offer.
        ("autopar show pl", ""),
    ],
)
def test_a_shell_offers_what_options_take(
    line: str, offered: str, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    _, out, err = command()
    assert (out.split(), err) == (offered.split(), "")
