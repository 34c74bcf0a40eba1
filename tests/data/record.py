"""Record what `autopar profile` writes of the models that tests of commands plan and run, with the machine's links.

    python tests/data/record.py mlp-64       one, or without a name all of them

`tests/data/test_record.py` says where a model's file or the format of profiles has changed since.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

DATA = Path(__file__).resolve().parent
sys.path.insert(0, str(DATA.parent / "harness"))

from profiled import RECORDED  # noqa: E402


def record(name: str) -> None:
    """Profile a model in a folder of its own, and keep what was written."""
    model, batch = RECORDED[name]
    with TemporaryDirectory() as folder:
        shutil.copy(model, folder)
        command = [sys.executable, "-m", "autopar", "profile", model.name, "--batch", str(batch), "--device", "cpu"]
        subprocess.run(command, cwd=folder, check=True)
        shutil.copy(Path(folder, "profile.json"), DATA / f"{name}.json")
        shutil.copy(Path(folder, "cluster.json"), DATA)


if __name__ == "__main__":
    for each in sys.argv[1:] or RECORDED:
        record(each)
