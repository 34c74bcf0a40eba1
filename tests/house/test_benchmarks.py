"""Benchmarks that name what is in the tree name what is there, and the one that wants a GPU is rehearsed without."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import constants
import gpu
import gpu_graphs
import gpu_kernels
from paths import ROOT


def test_a_constant_that_is_given_other_values_is_one_of_the_searchs() -> None:
    for family, line in constants.LINES.items():
        for module in line.modules:
            found = vars(importlib.import_module(constants.SEARCH + module))
            assert all(name in found for values in line.others for name in values), family


def _fails(folder: Path, rehearses: bool) -> dict[str, object]:
    raise ValueError("no such kernel")


def _sleeps(folder: Path, rehearses: bool) -> dict[str, object]:
    # A process of its own ends with the part.
    subprocess.Popen(["sleep", "60"], start_new_session=False)
    time.sleep(60)
    return {}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_part_that_fails_dies_or_takes_too_long_is_recorded_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        "fails": gpu.Part(_fails, 20.0),
        "dies": gpu.Part(lambda *_: os._exit(3), 20.0),
        "sleeps": gpu.Part(_sleeps, 0.5),
        "works": gpu.Part(lambda folder, rehearses: {"folder": folder.name, "rehearsed": rehearses}, 20.0),
    }
    found = gpu.run_parts(parts, tmp_path, rehearses=True, most_s=60.0)
    assert "no such kernel" in found["fails"]["failure"]
    assert found["dies"]["failure"].startswith("ended with 3")
    assert found["sleeps"]["failure"].startswith("took more than 0.5 s")
    assert (found["works"]["folder"], found["works"]["rehearsed"]) == ("works", True)
    monkeypatch.setattr(gpu, "LEAST_S", 99.0)
    left = gpu.run_parts(parts, tmp_path, rehearses=True, most_s=60.0)
    assert [each["failure"] for each in left.values()] == ["not begun: 60 s were over"] * len(parts)


def test_constants_and_graphs_are_rehearsed_on_the_cpu() -> None:
    device = torch.device("cpu")
    found = gpu_kernels.constants(device, tiny=True)
    assert all(each["flops_per_s"] > 0 for each in found["products"])
    assert (found["forward_launch_s"], found["update_bytes_per_s"] > 0) == (None, True)
    raced = gpu_graphs.raced(gpu.MODELS / "tiny_blocks.py", 2, 4, device, steps=1)
    assert raced["weights_apart"] == dict.fromkeys(gpu_graphs.WAYS, 0.0)
    assert not raced["captured"]


@pytest.mark.slow
def test_what_wants_a_gpu_is_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--json", str(tmp_path / "gpu.json")]
    # Kernels and graphs are rehearsed above.
    asked = ["--only", "tests,executor,gpt2"]
    done = subprocess.run([*command, *asked], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    causes = {each["cause"] for each in parts["gpt2"]["causes"]}
    assert {"forwards", "backwards", "updates"} <= causes
    assert parts["gpt2"]["plain_step_s"] > 0
    assert "skipped" in parts["tests"]["summary"][0]
