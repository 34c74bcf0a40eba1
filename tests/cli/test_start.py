"""The first minutes: a model file that runs as it is, and what is found here."""

import json
import runpy
from pathlib import Path

import pytest

from autopar.api import surroundings
from autopar.capture import load
from calls import Run, refused, well


@pytest.mark.usefixtures("quick")
def test_a_model_file_is_written_and_is_profiled_and_planned_as_it_is(run: Run) -> None:
    _, said = well(run, "init")
    assert "Written: model.py; `autopar profile model.py` measures its model" in said
    well(run, "profile", "model.py", "--batch", "16")
    well(run, "plan", "--gpus", "2", "--min-stages", "2")
    Path("model.py").write_text("mine")
    refused(run, 2, "model.py exists; pass --overwrite to replace it", "init")
    well(run, "init", "--overwrite")
    # What is commented out is what a reader may uncomment.
    text = Path("model.py").read_text()
    Path("model.py").write_text("\n".join(line.removeprefix("# ") for line in text.splitlines()))
    found = runpy.run_path("model.py")
    assert {"model", "dataset", "loss", "optimizer", "scheduler", "collate"} <= found.keys()
    user = load("model.py")
    assert {"loss", "optimizer", "scheduler", "collate"} <= user.functions.keys()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("optimiser(parameters)", "optimizer"), ("datasets()", "dataset"), ("schedular(optimizer)", "scheduler")],
)
def test_a_function_that_is_nearly_called_as_one_that_is_missing_is_refused(run: Run, name: str, meant: str) -> None:
    text = "import torch\ndef model(): return torch.nn.Linear(2, 2)\n"
    Path("net.py").write_text(f"{text}def {name}: return None\n")
    called = name.partition("(")[0]
    said = f"net.py:3: nothing calls {called}(); did you mean {meant}()? Rename it, or call it _{called}()"
    refused(run, 4, said, "profile", "net.py")
    for harmless in (f"def _{name}: return None", f"def {called}(a, b, c): return None", f"{called} = 3"):
        Path("net.py").write_text(f"{text}{harmless}\n")
        assert load("net.py").functions == {}


def test_what_is_found_here_is_said_and_what_is_wrong_with_its_remedy(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = well(run, "env", "--json")
    found = json.loads(out)
    assert found["problems"] == []
    assert {"autopar", "Python", "torch", "GPUs", "processors", "memory", "captured models"} <= found["entries"].keys()
    assert "nothing is wrong" in said
    monkeypatch.setattr(surroundings, "version", lambda name: "0.0.1" if name == "pandas" else "99.0")
    monkeypatch.setattr(surroundings, "_DRIVER", Path("profile.json"))
    monkeypatch.setenv("AUTOPAR_CACHE", str(Path("profile.json").resolve()))
    code, _, said = run("env")
    words = " ".join(said.split())
    assert code == 2
    assert "wrong: pandas is 0.0.1, and autopar needs >=2.2; pip install 'pandas>=2.2'" in words
    assert "wrong: this machine has NVIDIA GPUs, and torch is built for CPUs" in words
