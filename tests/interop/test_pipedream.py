"""PipeDream's text graphs: what becomes of every line, and what is refused where."""

import os
from pathlib import Path

import pytest

from autopar.errors import FileError, UsageError
from autopar.formats.profile import Profile
from autopar.interop.pipedream import pipedream_profile

PATH = Path("some/graph.txt")
TIMES = "forward_compute_time=1.5, backward_compute_time=3.000"
LINES = [
    f"node1 -- Input -- {TIMES}, activation_size=100.0, parameter_size=0.000",
    f"node2 -- LSTM(4, 4) -- {TIMES}, activation_size=[64.0; 8.0; 8.0], parameter_size=40",
    f"node3 -- __getitem__(0) -- {TIMES}, activation_size=64, parameter_size=0",
    f"node4 -- __getitem__(1) -- {TIMES}, activation_size=8, parameter_size=0 -- stage_id=0",
    f"node5 -- Add -- {TIMES}, activation_size=65, parameter_size=0",
    "\tnode1 -- node2",
    "\tnode2 -- node3",
    "\tnode2 -- node4",
    "\tnode3 -- node5",
    "\tnode2 -- node5",
]


def _read(lines: list[str], batch: int = 1) -> Profile:
    return pipedream_profile("\n".join(lines), PATH, batch)


def test_nodes_become_layers_that_keep_their_tensors_and_edges_tensors() -> None:
    profile = _read(LINES)
    assert [layer.name for layer in profile.layers] == ["node2", "node3", "node5"]
    assert profile.layers[0].modules == ("LSTM(4, 4)",)
    (cost,) = profile.layers[0].costs
    assert (cost.micro_batch, cost.backward_s, cost.output_bytes) == (1, 0.003, 80)
    # The work of the input node, 4.5 ms, is that of the layer that reads it.
    assert (cost.forward_s, profile.layers[0].input_s) == (pytest.approx(0.006), pytest.approx(0.0045))
    assert (profile.layers[0].parameters_bytes, profile.layers[0].gradient_bytes) == (40, 40)
    tensors = {tensor.name: tensor for tensor in profile.tensors}
    assert set(tensors) == {"node1", "node2", "node3"}
    assert (tensors["node1"].producer, tensors["node1"].consumers) == (None, ("node2",))
    # A skip: node2 is read by the next layer and by the one behind it.
    assert (tensors["node2"].consumers, tensors["node2"].bytes_per_sample) == (("node3", "node5"), 80)
    assert profile.crossing_bytes() == [80, 80 + 64, 0]
    for layer in profile.layers:
        (saved,) = layer.costs[0].saved
        assert (saved.storage, saved.bytes) == (layer.name, layer.costs[0].output_bytes)
    # Its output and the gradient of that, and of what it reads, where a parameter stands behind it.
    assert [layer.costs[0].peak_bytes for layer in profile.layers] == [2 * 80, 2 * 64 + 80, 2 * 65 + 64 + 80]


def test_sizes_and_gradients_are_as_read_and_what_is_assumed_is_noted() -> None:
    profile = _read(LINES, batch=32)
    assert profile.batch == 32
    assert {layer.costs[0].micro_batch for layer in profile.layers} == {32}
    assert [tensor.bytes_per_sample for tensor in profile.tensors] == [4, 3, 2]
    with pytest.raises(UsageError, match="`profiled_batch`"):
        _read(LINES, batch=0)
    lines = [line.replace("parameter_size=40", "parameter_size=0") for line in LINES]
    assert {tensor.gradient for tensor in _read(lines).tensors} == {False}
    found = {tensor.name: tensor.gradient for tensor in _read(LINES).tensors}
    assert found == {"node1": False, "node2": True, "node3": True}
    lines = "\ufeff" + "\r\n".join([*reversed(LINES), "", ""])
    assert pipedream_profile(lines, PATH).layers == _read(LINES).layers

    def staged(*stages: int) -> str:
        tails = {LINES[at]: f" -- stage_id={stage}" for at, stage in zip((1, 2, 4), stages, strict=True)}
        return _read([line + tails.get(line, "") for line in LINES]).notes[-1]

    assert staged(0, 0, 1) == "the file's own stages, one device each: `stages='0-1:1,2-2:1'`"
    assert "no runs of consecutive layers" in staged(0, 1, 0)
    notes = "\n".join(_read(LINES).notes)
    assert "Input nodes (node1), with 0.0045 s" in notes
    assert "__getitem__ nodes that nothing reads (node4)" in notes
    assert "optimizer" in notes
    assert "V100" in notes


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (10, "\tnode2 -- node7", ":10: an edge names node 'node7'"),
        (10, "\tnode2, node5", ":10: expected an edge"),
        (5, LINES[1], ":5: node 'node2' is given twice, first in line 2"),
        (10, "\tnode5 -- node2", ":10: edges form a cycle: node5 -> node2 -> node3 -> node5"),
        (2, LINES[1].replace("=1.5", "=nan"), ":2: forward_compute_time must be milliseconds from 0"),
        (2, LINES[1].replace("64.0;", "inf;"), ":2: activation_size must be bytes from 0"),
        (2, LINES[1].replace(", parameter_size=40", ""), ":2: expected a node, `name -- description -- forward"),
        (2, LINES[1].replace("parameter_size", "size"), ":2: expected a node, `name -- description -- forward"),
        (2, LINES[1] + ", parameter_size=1", ":2: expected a node, `name -- description -- forward"),
        (2, "node2", ":2: expected a node"),
        (4, LINES[3].replace("=0 -- stage_id=0", "=0 -- stage_id=a"), ":4: stage_id must be a whole number"),
        (2, LINES[1].replace("LSTM", "LS\x07TM"), ":2: holds control characters"),
        (2, LINES[1].replace("node2", "n" * 2000), ":2: the node's name has 2000 letters, at most 1024 are read"),
        (2, LINES[1].replace("64.0; 8.0", "1e15; 8.0"), ":2: activation_size adds up to 1000000000000016.0, more than"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(number: int, line: str, message: str) -> None:
    with pytest.raises(FileError) as caught:
        _read([*LINES[: number - 1], line, *LINES[number:]])
    assert str(caught.value).startswith(f"{PATH}{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("lines", "message"), [([], "holds no nodes;"), (LINES[:1], "holds no nodes but Input;")])
def test_a_file_without_layers_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(FileError, match=message):
        _read(lines)


@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pipedream/vgg16", (40, 0.690531 - 0.017972, 553.4e6)),
        ("pipedream/resnet50", (176, 0.462357 - 0.018962, 102.2e6)),
        ("pipedream/gnmt8", (37, 0.089428, 775.1e6)),
        ("dapple/vgg-19-pbs-32", ()),
        ("dapple/bert-48-pbs-2", (53,)),
        ("dapple/xlnet-36-pbs-1", ()),
    ],
)
def test_published_profiles_are_read_whole(name: str, expected: tuple[float, ...]) -> None:
    """Of some, their layers, seconds and bytes of parameters were published."""
    path = Path(os.environ["AUTOPAR_DATA"]) / f"{name}.txt"
    profile = pipedream_profile(path.read_text(), path)
    costs = [(layer, layer.costs[0]) for layer in profile.layers]
    seconds = sum(cost.forward_s + cost.backward_s - layer.input_s for layer, cost in costs)
    found = (len(costs), seconds, sum(layer.parameters_bytes for layer in profile.layers))
    assert found[: len(expected)] == pytest.approx(expected, rel=2e-3)
    assert Profile.parse(profile.dumps(), path) == profile
