"""Profiles: what they say of layers and boundaries; and cuts of parameters between the ranks of a team."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autopar.errors import FileError
from autopar.formats.cuts import ParameterCut
from autopar.formats.profile import DeviceCosts, Layer, LayerSplit, Profile, Tensor
from random_problems import cost, profile_of, random_profile


def _layer(name: str, seconds: float) -> Layer:
    costs = tuple(
        cost(rows, seconds * rows, 2 * seconds * rows, {f"{name}.a": 10 * rows, f"{name}.b": rows}, 20 * rows, 4 * rows)
        for rows in (1, 4)
    )
    sizes = {"parameters_bytes": 8, "trainable_bytes": 8, "gradient_bytes": 8, "optimizer_bytes": 16}
    return Layer(name=name, modules=(name,), costs=costs, **sizes)


def _profile() -> Profile:
    """Three layers a, b, c with a skip from a to c."""
    tensors = (("input", None, "ac", 1000), ("x", "a", "bc", 100), ("y", "b", "c", 10))
    shape: dict[str, Any] = {"dtype": "float32", "gradient": True}
    layers = [_layer("a", 1.0), _layer("b", 2.0), _layer("c", 3.0)]
    made = [Tensor(name=a, producer=b, consumers=tuple(c), bytes_per_sample=d, **shape) for a, b, c, d in tensors]
    return profile_of(layers, made, 4)


def test_a_split_has_its_parts() -> None:
    assert FUSED.size == 16
    assert list(FUSED.pieces(1)) == [(4, 0, 4, (1,)), (12, 4, 4, (1,))]
    assert [piece.parts for part in range(4) for piece in SHARED.pieces(part)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert list(KEYS.pieces(0)) == [(0, 0, 2, (0,)), (4, 2, 2, (0, 1))]
    assert list(KEYS.pieces(1)) == [(2, 0, 2, (1,)), (4, 2, 2, (0, 1))]
    others = (DeviceCosts(device=_profile().device, layers=_profile().layers),)
    with pytest.raises(FileError, match=r"others\[0\]\.device\.name: .* is given twice"):
        Profile.parse(_profile().model_copy(update={"others": others}).dumps(), Path("p.json"))
    assert LayerSplit(count=2, cuts=(FUSED,)).cuts == (FUSED,)
    with pytest.raises(ValidationError, match="4 parts of 'keys', for 2"):
        LayerSplit(count=2, cuts=(FUSED, SHARED))


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
        ('"producer": "b"', '"producer": "c"', r"\$\.tensors\[2\]\.consumers: 'c' does not come after the producer"),
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


@pytest.mark.parametrize("options", ["[]", '[{"name": "vanilla", "tensor_parallel": 2, "recompute": false}]'])
def test_ways_to_run_a_layer_that_an_earlier_version_wrote_are_forgotten(options: str) -> None:
    text = _profile().dumps()
    earlier = text.replace('"written_bytes"', f'"options": {options}, "written_bytes"')
    assert earlier.count("options") == 3
    assert Profile.parse(earlier, Path("profile.json")).dumps() == text


FUSED = ParameterCut(parameter="qkv", dim=0, parts=(((0, 4), (8, 12)), ((4, 8), (12, 16))))
SHARED = ParameterCut(parameter="keys", dim=1, parts=(((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),)))
# Queries of each, and keys of both.
KEYS = ParameterCut(parameter="qkv", dim=0, parts=(((0, 2), (4, 6)), ((2, 6),)))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((((0, 4),), ((4, 4),)), "indices must ascend"),
        ((((0, 4), (4, 6)), ((6, 8),)), "indices must ascend, with gaps"),
        ((((0, 4),), ((5, 8),)), "no part of 'w' has indices 4 to 4"),
        ((((1, 4),), ((4, 8),)), "no part of 'w' has indices 0 to 0"),
        ((((0, 4),),), "at least 2 items"),
        (((), ((0, 8),)), "at least 1 item"),
    ],
)
def test_parts_that_make_up_no_dimension_are_refused(parts: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(ValidationError, match=said):
        ParameterCut(parameter="w", dim=0, parts=parts)


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=4, max_size=24))
def test_any_division_of_indices_is_told_back(holders: list[set[int]]) -> None:
    """Every index is on some parts, and every part has some."""
    holders = [*holders, {0, 1, 2, 3}]
    own = [[index for index, parts in enumerate(holders) if part in parts] for part in range(4)]
    cut = ParameterCut(parameter="w", dim=0, parts=tuple(map(_intervals, own)))
    assert cut.size == len(holders)
    for part, indices in enumerate(own):
        found: list[int] = []
        for piece in cut.pieces(part):
            assert piece.offset == len(found)
            found += range(piece.start, piece.start + piece.size)
            assert all(tuple(sorted(holders[index])) == piece.parts for index in found[piece.offset :])
        assert found == indices


def _intervals(indices: list[int]) -> tuple[tuple[int, int], ...]:
    starts, ends = (index for index in indices if index - 1 not in indices), (each + 1 for each in indices)
    return tuple(zip(starts, (end for end in ends if end not in indices), strict=True))
