"""Piper's input files: layers with all their options."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import FileError
from reproductions.piper_files import PiperProfile, piper_profile

PATH = Path("some/bert.json")


def way(name: str, time: float, forth: dict[str, float], back: dict[str, float], memory: float = 100) -> dict[str, Any]:
    found = {"id": name, "timePerSample": time, "parameterSize": 40.0, "memoryUsageA": memory, "memoryUsageB": 90}
    return {**found, "syncTimeFw": forth, "syncTimeBw": back}


LIMITS = {"maxDevices": 8, "maxMemoryPerDevice": 1e9, "bandwidth": 25e9, "mbsInBatch": 12}
FILE: dict[str, Any] = {
    **LIMITS,
    "comment": "other keys are allowed",
    "nodes": [
        {"id": 7, "name": "head", "TMPCs": {"1": [way("vanilla", 0.3, {"3": 0}, {})]}},
        {
            "id": 3,
            "name": "layer",
            "TMPCs": {
                "2": [way("vanilla", 0.4, {}, {"7": 16.5})],
                "1": [way("activation recomp", 0.8, {}, {"7": 0}, 25.5), way("vanilla", 0.6, {}, {"7": 0})],
            },
        },
    ],
    "edges": [{"sourceId": 3, "destId": 7, "communicationCost": 64.0}],
}


def _read(content: dict[str, Any]) -> PiperProfile:
    return piper_profile(json.dumps(content), PATH)


def test_layers_keep_all_their_options_and_limits_are_noted() -> None:
    profile = _read(FILE)
    assert [layer.name for layer in profile.layers] == ["layer.3", "head.7"]
    first = profile.layers[0]
    assert [(each.name, each.tensor_parallel, each.recompute) for each in first.ways] == [
        ("activation recomp", 1, True),
        ("vanilla", 1, False),
        ("vanilla", 2, False),
    ]
    assert [each.time_s for each in first.ways] == [0.8, 0.6, 0.4]
    assert [each.memory_per_flight_bytes for each in first.ways] == [26, 100, 100]
    assert [[(one.tensor, one.bytes) for one in each.resharded] for each in first.ways] == [[], [], [("3>7", 17)]]
    (cost,) = profile.layers[0].costs
    assert (cost.forward_s, cost.backward_s) == pytest.approx((0.2, 0.4))
    assert (cost.micro_batch, cost.saved_bytes, cost.provenance) == (1, 100, "estimated")
    assert (first.parameters_bytes, first.gradient_bytes, first.buffers_bytes) == (40, 40, 10)
    assert profile.batch == 12
    assert [(each.name, each.bytes_per_sample, each.gradient) for each in profile.tensors] == [("3>7", 64, True)]
    notes = "\n".join(_read(FILE).notes)
    assert "8 devices of 1000000000 bytes, which each send 25000000000 bytes/s, and 12 micro-batches" in notes
    renamed = {key: value for key, value in FILE.items() if key != "mbsInBatch"} | {"maxBatchSize": 12}
    assert _read(renamed).batch == 12
    for text, said in (('{"nodes": NaN}', r"\$.nodes: NaN"), ("[", ":1:2: not JSON"), ("[]", r"\$: Input should be")):
        with pytest.raises(FileError, match=said):
            piper_profile(text, PATH)
    # Over what depends on no parameter, no gradient flows back.
    frozen = copy.deepcopy(FILE)
    for each in (way for ways in frozen["nodes"][1]["TMPCs"].values() for way in ways):
        each["parameterSize"] = 0
    assert [each.gradient for each in _read(frozen).tensors] == [False]


@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
def test_the_published_file_is_read_whole() -> None:
    path = Path(os.environ["AUTOPAR_DATA"]) / "piper" / "bert32a100.json"
    profile = piper_profile(path.read_text(), path)
    assert len(profile.layers) == 37
    assert {len(layer.ways) for layer in profile.layers} == {8}
    assert {option.tensor_parallel for layer in profile.layers for option in layer.ways} == {1, 2, 4, 8}
    assert PiperProfile.parse(profile.dumps(), path) == profile
