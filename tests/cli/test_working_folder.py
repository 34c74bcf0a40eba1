"""No command, and no process that one starts, runs what lies in the working folder but for the model's own files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launched import torchrun
from paths import ROOT
from strays import lay, marks

MODEL = """
import torch
from helper import ACT

def model():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), ACT(), torch.nn.Linear(8, 3))

def dataset():
    from zoo.data import samples
    return samples()

def loss(output, batch):
    return (output - batch[1]).square().mean()
"""
FILES = {
    "model.py": MODEL,
    "helper.py": "import torch\nACT = torch.nn.Tanh\n",
    "zoo/data.py": "import torch\ndef samples():\n    return [(torch.ones(6), torch.ones(3)) for _ in range(32)]\n",
}
COMMANDS = """\
profile mine/model.py --batch 8 --ranks 2 --budget 1
plan --gpus 2 --stages 0:1,1-2:1 --micro-batches 2 --schedule 1f1b
simulate
show plan.json
export torch -o order.csv
rehearse --steps 1
run --steps 2 --checkpoint kept --every 1
checkpoint verify kept
verify --steps 1
cluster probe --quick --largest 64KiB --ranks 2 -o probed.json
cache list
"""
ALL = f"""
import sys
from autopar.cli import main
for line in {COMMANDS!r}.splitlines():
    sys.argv = ["autopar", *line.split()]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{{line}}: {{end.code}}")
"""
NAMES = {"torch", "numpy", "autopar", "cuda", "triton", "apex", "sitecustomize", "usercustomize", "pydantic", "rich"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder in which, as beside the model in it, there are strays of all names of Python's, and of others."""
    own = {path.stem for path in (ROOT / "autopar").iterdir() if path.stem.isidentifier() and path.stem[0] != "_"}
    (tmp_path / "mine" / "zoo").mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / "mine" / name).write_text(text)
    names = sys.stdlib_module_names | NAMES | own
    lay(tmp_path, names)
    lay(tmp_path / "mine", names - {"torch"})
    (tmp_path / "site.pth").write_text(f"import os; open({str(tmp_path / 'RAN')!r}, 'a').write('site.pth')\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_commands_and_what_they_start_run_the_model_s_files_alone(folder: Path) -> None:
    """Forked from no process that has imported anything: where Python looks is what is tested."""
    launched = [*torchrun(2, is_warm=False), "-m", "autopar", "worker", "plan.json", "--steps", "1"]
    for command, more in (([sys.executable, "-P", "-c", ALL], {}), (launched, {"PYTHONSAFEPATH": "1"})):
        told = {**os.environ, **more}
        done = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        assert not marks(folder)
