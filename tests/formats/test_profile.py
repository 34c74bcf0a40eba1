"""Profiles: what crosses a cut, which layers belong together, and files whose parts do not agree."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import networkx
import pytest

from autopar.errors import FileError
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, SavedStorage, Tensor
from random_problems import random_profile


def _layer(name: str, seconds: float) -> Layer:
    costs = tuple(
        Cost(
            micro_batch=rows,
            forward_s=seconds * rows,
            backward_s=2 * seconds * rows,
            saved=(SavedStorage(storage=f"{name}.a", bytes=10 * rows), SavedStorage(storage=f"{name}.b", bytes=rows)),
            peak_bytes=20 * rows,
            output_bytes=4 * rows,
        )
        for rows in (1, 4)
    )
    sizes = {"parameters_bytes": 8, "trainable_bytes": 8, "gradient_bytes": 8, "optimizer_bytes": 16}
    return Layer(name=name, modules=(name,), costs=costs, **sizes)


def _profile() -> Profile:
    """Three layers a, b, c with a skip from a to c."""

    def tensor(name: str, producer: str | None, consumers: tuple[str, ...], count: int) -> Tensor:
        return Tensor(
            name=name, producer=producer, consumers=consumers, bytes_per_sample=count, dtype="float32", gradient=True
        )

    return Profile(
        model=ModelSource(source="model.py", sha256="0" * 64),
        batch=4,
        device=DeviceKind(type="cpu", name="cpu", memory_bytes=2**30),
        precision="fp32",
        layers=(_layer("a", 1.0), _layer("b", 2.0), _layer("c", 3.0)),
        tensors=(
            tensor("input", None, ("a", "c"), 1000),
            tensor("x", "a", ("b", "c"), 100),
            tensor("y", "b", ("c",), 10),
        ),
        noise=Noise(median_spread=0.0, max_spread=0.0),
    )


def test_a_cut_is_charged_with_every_tensor_that_crosses_it_and_with_no_model_input() -> None:
    crossing = _profile().to_frame()["crossing_bytes_per_sample"].xs(1, level="micro_batch")
    assert crossing.to_dict() == {"a": 100, "b": 110, "c": 0}


def test_layers_hold_one_row_per_measured_size() -> None:
    table = _profile().to_frame()
    assert len(table) == 6
    assert table.loc[("b", 4), "backward_s"] == 16.0
    assert table.loc[("b", 4), "saved_bytes"] == 44


@pytest.mark.parametrize("seed", range(30))
def test_what_crosses_each_cut_and_what_hangs_together_agree_with_a_count_over_all_pairs(seed: int) -> None:
    profile, draw = random_profile(seed, most_layers=9, skips=0.2), random.Random(seed)
    profile = profile.model_copy(update={"tensors": tuple(t for t in profile.tensors if draw.random() < 0.8)})
    names = [layer.name for layer in profile.layers]
    made = [tensor for tensor in profile.tensors if tensor.producer is not None]
    for cut, crossing in enumerate(profile.crossing_bytes()):
        ahead = set(names[: cut + 1])
        assert crossing == sum(t.bytes_per_sample for t in made if t.producer in ahead and not ahead >= {*t.consumers})
    graph = networkx.Graph()
    graph.add_nodes_from(names)
    graph.add_edges_from((tensor.producer, consumer) for tensor in made for consumer in tensor.consumers)
    graph.add_edges_from(pair for tied in profile.tied for pair in pairwise(tied.layers))
    joined = networkx.node_connected_component(graph, names[-1])
    assert profile.disconnected_layers() == tuple(name for name in names if name not in joined)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"producer": "b"', '"producer": "d"', r"\$\.tensors\[2\]\.producer: no layer is called 'd'"),
        (
            '"producer": "b"',
            '"producer": "c"',
            r"\$\.tensors\[2\]\.consumers: 'c' does not come after the producer 'c'",
        ),
        ('"name": "y"', '"name": "x"', r"\$\.tensors\[2\]\.name: tensor 'x' is given twice"),
        ('"name": "b"', '"name": "a"', r"\$\.layers\[.\]\.name: layer 'a' is given twice"),
        ('"micro_batch": 4', '"micro_batch": 1', r"\$\.layers\[0\]\.costs: micro-batch sizes must ascend .* \[1, 1\]"),
    ],
)
def test_a_profile_whose_parts_do_not_agree_is_refused_with_its_path(old: str, new: str, message: str) -> None:
    text = _profile().dumps()
    assert Profile.parse(text, Path("profile.json")) == _profile()
    assert old in text
    with pytest.raises(FileError, match=message):
        Profile.parse(text.replace(old, new), Path("profile.json"))
