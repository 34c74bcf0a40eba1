"""A model that is prepared to be measured or estimated, what is refused before that, and how its layers split."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture import load
from autopar.capture.graph import LayerGraph
from autopar.capture.layers.export import capture_module
from autopar.capture.split.sequence import sequence_dims
from autopar.errors import ModelError, UsageError
from autopar.formats.cuts import ParameterCut
from autopar.formats.profile import Layer as Record
from autopar.options.profile import ProfileOptions
from autopar.profiler.subject import COUNTS, SplitSurvey, Subject, prepare, with_splits
from drawn_models import captured
from random_problems import cost


@pytest.mark.parametrize("option", ["batch", "threads"])
@pytest.mark.parametrize("value", [0, 2**31, 2**40])
def test_numbers_that_nothing_is_measured_with_are_refused(option: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"`{option}` must be .* found {value}"):
        ProfileOptions(**{option: value})  # type: ignore[arg-type]


FILE = """
import torch
from torch import nn
def dataset(): return torch.utils.data.TensorDataset(torch.ones({samples}, 8), torch.ones({samples}, 1))
def model(): return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)){change}
"""
LOSS = "\ndef loss(output, batch): return (output - batch[1]).square().mean()\n"


OF_THE_LOSS = """
HEAD = nn.Parameter(torch.ones(1))
def loss(output, batch): return (output * HEAD - batch[1]).square().mean()
def optimizer(parameters): return torch.optim.SGD([*parameters, HEAD], lr=0.1)
"""
PICKING = """
def optimizer(named_parameters):
    return torch.optim.SGD([each for name, each in named_parameters if name == "x"], lr=0.1)
"""


def _prepare(folder: Path, options: ProfileOptions, change: str = "", samples: int = 8) -> Subject:
    path = folder / "model.py"
    path.write_text(FILE.format(change=change, samples=samples) + ("" if "def loss" in change else LOSS))
    return prepare(load(str(path)), options)


@pytest.mark.parametrize(
    ("change", "samples", "options", "error", "said"),
    [
        ("", 0, {}, ModelError, r"dataset\(\) is empty"),
        ("", 7, {}, UsageError, "the dataset has 7 samples, `batch` asks for 8; give `batch=7` or less"),
        (".requires_grad_(False)", 8, {}, ModelError, "there is nothing to train"),
        (".half()", 8, {}, ModelError, r"parameters are float16; all must be float32.*return the module's float\(\)"),
        (OF_THE_LOSS, 8, {}, ModelError, "HEAD of model.py is a parameter that the loss"),
        (PICKING, 8, {}, ModelError, "steps none of the model's 4 trained parameters"),
        ("", 8, {"precision": "fp64"}, UsageError, "are fp32; leave the option out"),
        (".double()", 8, {"precision": "bf16"}, UsageError, "are fp64; leave the option out, or build them in float32"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_it_is_measured(
    change: str, samples: int, options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        _prepare(tmp_path, ProfileOptions(batch=8, **options), change, samples)


def test_models_are_captured_in_their_precision_with_the_splits_of_every_layer(tmp_path: Path) -> None:
    subject = _prepare(tmp_path, ProfileOptions(batch=8, precision="bf16"))
    assert [layer.name for layer in subject.graph.layers] == ["0", "1"]
    assert (subject.precision, subject.loss_difference) == ("bf16", None)
    assert {name: len(each) for name, each in subject.batch(3).items()} == dict.fromkeys(subject.graph.inputs, 3)
    assert _prepare(tmp_path, ProfileOptions(batch=4)).precision == "fp32"
    graph = graph_of(tied=True, folded=True)
    ((name, layers),) = graph.tied_parameters().items()
    assert cut_of(cuts_of(graph_of(folded=True), 2)["embedding"], "embedding.weight") is not None
    cuts = cuts_of(graph, 2)
    assert len({cut_of(cuts[layer], name) for layer in layers}) == 1
    _, graph, _ = captured("everything")
    records = records_of(graph)
    assert [record.name for record in records] == [layer.name for layer in graph.layers]
    for count in COUNTS:
        cuts = cuts_of(graph, count)
        for record in records:
            found = record.split(count)
            assert (() if found is None else found.cuts) == cuts[record.name]
    _, graph, _ = captured("narrow_resnet")
    writing = [record for record in records_of(graph) if record.name.startswith("blocks")]
    assert writing
    for record in writing:
        assert not record.splits
        assert record.split_obstacles[0].startswith("splits in no number of parts: it writes into")
        (written,) = (name for name in graph.layer(record.name).buffers.values() if name in record.split_obstacles[0])
        assert written


class Words(nn.Module):
    """An embedding, blocks of a kind, and a head that may share the embedding's rows."""

    def __init__(self, *, tied: bool, folded: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.head = nn.Linear(8, 12, bias=False)
        self.folded = folded
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.folded:
            # What is summed over here is the width, as the head's rows are kept apart by a sort.
            return torch.sort(self.head(hidden), -1).values
        return self.head(hidden)


@cache
def graph_of(length: int = 5, *, tied: bool = False, folded: bool = False) -> LayerGraph:
    torch.manual_seed(0)
    batch = {name: torch.randint(12, (4, length)) for name in ("tokens", "targets")}
    return capture_module(
        Words(tied=tied, folded=folded).double(),
        batch,
        lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten()),
    )


def cuts_of(graph: LayerGraph, count: int) -> dict[str, tuple[ParameterCut, ...]]:
    splits = SplitSurvey(graph).splits(count)
    return {layer.name: splits[layer.name].cuts if layer.name in splits else () for layer in graph.layers}


def cut_of(cuts: tuple[ParameterCut, ...], name: str) -> ParameterCut | None:
    return next((cut for cut in cuts if cut.parameter == name), None)


@pytest.mark.parametrize("count", [2, 4])
def test_layers_of_a_kind_that_share_a_parameter_split_alike(count: int) -> None:
    cuts = cuts_of(graph_of(), count)
    blocks = [name for name in cuts if name.startswith("blocks")]
    of_kinds = {name: [cut.model_copy(update={"parameter": ""}) for cut in cuts[name]] for name in blocks}
    assert {cut.parameter for name in blocks for cut in cuts[name]} >= {f"blocks.{at}.0.weight" for at in range(3)}
    first, *others = of_kinds.values()
    assert all(other == first for other in others) or len({len(each) for each in of_kinds.values()}) > 1
    graph = graph_of(tied=True)
    cuts = cuts_of(graph, count)
    ((name, layers),) = graph.tied_parameters().items()
    found = [cut_of(cuts[layer], name) for layer in layers]
    assert found[0] is not None
    assert found[0].dim == 0
    assert len(set(found)) == 1
    graph = graph_of(8)
    found = {
        name: {cut.tensor: cut.dim for cut in split.sequence}
        for name, split in SplitSurvey(graph).splits(count).items()
    }
    assert found == {name: sequence_dims(graph.layer(name), count) for name in found}
    between = [tensor.name for tensor in graph.tensors if tensor.producer is not None]
    assert all(dims.get(name) == 1 for dims in found.values() for name in dims)
    assert {name for dims in found.values() for name in dims} == set(between)


def records_of(graph: LayerGraph) -> list[Record]:
    sizes = {"parameters_bytes": 0, "trainable_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
    costs = (cost(1, 1.0, 2.0, {}, 0, 0),)
    return with_splits(
        SplitSurvey(graph), [Record(name=each.name, modules=(), costs=costs, **sizes) for each in graph.layers]
    )
