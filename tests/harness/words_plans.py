"""Plans of a small model in a working folder, as users have them: the model's file and plan.json beside each other."""

import shutil
from pathlib import Path

from autopar.capture.layers.export import capture
from autopar.capture.model.source import load
from autopar.formats.plan import Plan
from dictated import dictate
from paths import MODELS


def copy_model(folder: Path) -> None:
    shutil.copy(MODELS / "words.py", folder)


def save_plan(folder: Path, widths: list[int], name: str = "words", rows: int = 4, **how: object) -> Plan:
    """Dictate a plan of two micro-batches for the model ``name`` of the working folder, and write it there."""
    model = load(f"{name}.py")
    plan = dictate(capture(model, model.build(0)), model, widths, 2, rows, **how)  # type: ignore[arg-type]
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"source": f"{name}.py"})})
    plan.save(folder / "plan.json")
    return plan
