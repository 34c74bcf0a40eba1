"""A folder with a model and its recorded profile (tests/data/record.py): what it takes to plan and to run."""

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

from autopar.formats.profile import Layer, Profile
from paths import EXAMPLES, MODELS, ROOT

DATA = ROOT / "tests" / "data"


class Recorded(NamedTuple):
    """What a recorded profile is of."""

    model: Path
    batch: int


RECORDED = {
    "mlp-64": Recorded(EXAMPLES / "mlp.py", 64),
    "mlp-16": Recorded(EXAMPLES / "mlp.py", 16),
    "gpt-4": Recorded(EXAMPLES / "gpt.py", 4),
    "tanh_chain": Recorded(MODELS / "tanh_chain.py", 8),
    "narrow_gpt": Recorded(MODELS / "narrow_gpt.py", 8),
}


def write_profiled(folder: Path, name: str, old: str = "", new: str = "") -> None:
    """Write a model's file, profile.json and cluster.json into a folder.

    A text of the file may be replaced by another that changes no layer.
    """
    model, profile = RECORDED[name].model, Profile.load(DATA / f"{name}.json")
    text = model.read_text()
    assert old in text
    text = text.replace(old, new, 1) if old else text
    (folder / model.name).write_text(text)
    source = profile.model.model_copy(update={"sha256": hashlib.sha256(text.encode()).hexdigest()})
    profile.model_copy(update={"model": source}).save(folder / "profile.json")
    shutil.copy(DATA / "cluster.json", folder)


def times_as_long(profile: Profile, factor: float) -> Profile:
    """Return a profile in which all that a step takes is so many times as long."""

    def longer(layer: Layer) -> Layer:
        costs = tuple(
            each.model_copy(update={"forward_s": factor * each.forward_s, "backward_s": factor * each.backward_s})
            for each in layer.costs
        )
        return layer.model_copy(update={"costs": costs, "update_s": factor * layer.update_s})

    layers = tuple(longer(layer) for layer in profile.layers)
    return profile.model_copy(update={"layers": layers, "step_overhead_s": factor * profile.step_overhead_s})
