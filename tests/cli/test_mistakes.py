"""The mistakes of a first hour: each is answered in one line, with a line in it that works when it is typed."""

import re
import shlex
from pathlib import Path

import pytest

from calls import Run, well
from command_lines import parse
from random_problems import gpt_profile, local_cluster

ANSWERS = {
    # Commands
    "pln --gpus 2": "plan --gpus 2",
    "PLAN --gpus 2": "plan --gpus 2",
    "shwo plan.json": "show plan.json",
    "train --help": "run --help",
    "measure --help": "profile --help",
    "resume --help": "run --help",
    "clusters list": "cluster list",
    "cluster lsit": "cluster list",
    "cluster ls": "cluster list",
    "chekpoint --help": "checkpoint --help",
    "--verison": "--version",
    "--quite plan --gpus 2": "--quiet plan --gpus 2",
    # Options
    "plan --gpu 2": "plan --gpus 2",
    "plan --gpu=2": "plan --gpus=2",
    "plan -gpus 2": "plan --gpus 2",
    "plan gpus 2": "plan --gpus 2",
    "plan --gpus": "plan --help",
    "plan --gpus two": "plan --help",
    "plan --memry 1GiB --gpus 2": "plan --memory 1GiB --gpus 2",
    "plan --micro-batch 4": "plan --micro-batches 4",
    "plan --micro_batches 4": "plan --micro-batches 4",
    "plan --gpus 2 --min-stage 2": "plan --gpus 2 --min-stages 2",
    "plan --gpus 2 --jsn": "plan --gpus 2 --json",
    "simulate --trac t.json": "simulate --trace t.json",
    "show profile.json --pgn a.png": "show profile.json --png a.png",
    "show": "show --help",
    "profile": "profile --help",
    # Values
    "plan --schedule 1f1": "plan --schedule 1f1b",
    "plan --schedule GPIP": "plan --schedule gpipe",
    "plan --shard optimiser": "plan --shard optimizer",
    "plan --recompute ful": "plan --recompute full",
    "plan --objective=stp": "plan --objective=step",
    "export torhc plan.json": "export torch plan.json",
    "import pipdream graph.txt": "import pipedream graph.txt",
    # Devices
    "cluster list H100": "cluster list 8xH100",
    "cluster list 8H100": "cluster list 8xH100",
    "cluster list 4xH10": "cluster list 4xH100-SXM",
    "profile net.py --device H10": "profile net.py --device H100-SXM",
    "profile net.py --device gpu": "profile net.py --device auto",
    "profile net.py --precision float16": "profile net.py --precision fp16",
    # Files
    "plan profle.json --gpus 2": "plan profile.json --gpus 2",
    "show profil.json": "show profile.json",
    "plan --cluster clustr.json": "plan --cluster cluster.json",
    "run profile.json": "plan profile.json",
    "plan cluster.json": "show cluster.json",
    "plan net.py": "profile net.py",
    "profile nets.py": "profile net.py",
    "profile net": "profile net.py",
    "profile elsewhere.py": "init elsewhere.py",
    "init mine": "init mine.py",
    "show profile.json --png b.jpg": "show profile.json --png b.png",
    "plan --gpus 2 -o nowhere/plan.json": "mkdir -p nowhere",
}
"""By mistake, what to type in its place."""
_TYPED = re.compile(r"\((?:type|try): (.*)\)$|`(autopar [^`]*|mkdir [^`]*)`")
_NOT_RUN = ("profile", "import")
"""What takes long, or other files: it is parsed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after the first hour."""
    return tmp_path_factory.mktemp("first")


@pytest.mark.parametrize("mistake", ANSWERS)
def test_a_mistake_is_answered_by_a_line_that_works(
    command: Run, monkeypatch: pytest.MonkeyPatch, folder: Path, mistake: str
) -> None:
    monkeypatch.chdir(folder)
    if not Path("plan.json").exists():
        gpt_profile(blocks=1).save("profile.json")
        well(command, "init", "net.py")
        well(command, "plan", "--gpus", "2")
        local_cluster(2).save("cluster.json")
    monkeypatch.setattr("sys.argv", ["autopar", *shlex.split(mistake)])
    code, out, err = command(*shlex.split(mistake))
    assert code in (2, 4)
    assert (out, err.count("\n")) == ("", 1)
    (*_, found) = _TYPED.finditer(err.strip())
    typed = shlex.split(found[1] or found[2])
    assert typed == shlex.split(ANSWERS[mistake] if typed[0] == "mkdir" else f"autopar {ANSWERS[mistake]}")
    if typed[0] == "mkdir":
        Path(typed[-1]).mkdir()
        typed = ["autopar", *shlex.split(mistake)]
    if typed[1] in _NOT_RUN and "--help" not in typed:
        assert parse(typed[1:]) == typed[1]
        return
    assert command(*typed[1:])[0] == 0


def test_help_and_version_are_words_too(command: Run) -> None:
    assert command("help") == command("--help")
    assert command("help", "plan") == command("plan", "--help")
    assert command("cluster", "help", "list") == command("cluster", "list", "--help")
    assert command("version") == command("--version")
