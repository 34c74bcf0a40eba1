"""Parts of layers in profiles, against the ranks of teams that have them."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from autopar.api.estimates import estimate_profile
from autopar.capture import load
from autopar.capture.graph import LayerGraph
from autopar.capture.split.analysis import analyse
from autopar.capture.split.rewrite import split_as_recorded
from autopar.errors import CaptureError
from autopar.formats.plan import Plan
from autopar.formats.profile import PartCosts, Profile
from autopar.hardware.gpus import find
from autopar.options.profile import ProfileOptions
from autopar.profiler.optimizer import UpdateCosts
from autopar.profiler.parts import PartKind, PartMeasurement, lone_part, part_kinds, part_record
from autopar.profiler.profile import NO_PARTS, NO_ROOM, measure_layers
from autopar.profiler.subject import SplitSurvey, Subject, prepare
from autopar.progress import no_progress
from autopar.runtime.stage.parameters import Team
from drawn_models import model_case, team_plans
from part_threads import ThreadSums, run_parts
from random_problems import cost

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.down = nn.LayerNorm(16), nn.Linear(32, 16)
        self.query, self.keys, self.values = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out, self.up = nn.Linear(16, 16), nn.Linear(16, 32)
    def forward(self, x):
        y = self.norm(x)
        heads = [each(y).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.query, self.keys, self.values)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + self.down(F.gelu(self.up(x)))
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
    def forward(self, x): return F.linear(x, self.weight.sort(-1).values).tanh()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.blocks, self.whole = nn.ModuleList(Block() for _ in range(3)), Whole()
    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks: x = block(x)
        return self.head(self.whole(x))
def model(): return Net()
def dataset(): return [{"tokens": (torch.arange(8) * at) % 97, "targets": torch.arange(8) + at} for at in range(16)]
def loss(output, batch): return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = tmp_path_factory.mktemp("models") / "model.py"
    path.write_text(MODEL)
    return prepare(load(str(path)), ProfileOptions(batch=4, device="cpu", tensor=4))


@pytest.fixture(scope="module")
def measured(subject: Subject) -> Profile:
    return measure_layers(subject, ProfileOptions(batch=4, device="cpu", budget_s=0.05, tensor=4))


def parts_of(profile: Profile) -> Iterator[tuple[str, int, bool, PartCosts]]:
    for layer in profile.layers:
        for split in layer.splits:
            for sliced, part in ((False, split.part), (True, split.sliced)):
                if part is not None:
                    yield layer.name, split.count, sliced, part


def test_a_profile_has_parts_of_all_layers_that_split(measured: Profile, tmp_path: Path) -> None:
    measured.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == measured
    found = {(name, count, sliced): part for name, count, sliced, part in parts_of(measured)}
    (whole,) = (layer for layer in measured.layers if not layer.splits)
    assert "whole" in whole.modules[0]
    assert whole.on_team(4) == whole
    for layer in measured.layers:
        for split in layer.splits:
            known = split.count <= 4
            assert ((layer.name, split.count, False) in found) == known
            assert ((layer.name, split.count, True) in found) == (known and bool(split.sequence))
            assert (layer.on_team(split.count) is None) != known
    crossing = {tensor.name for tensor in measured.tensors}
    for (name, count, _), part in found.items():
        layer = next(each for each in measured.layers if each.name == name)
        assert part.parameters_bytes == part.trainable_bytes == part.gradient_bytes < layer.parameters_bytes
        assert part.optimizer_bytes < layer.optimizer_bytes
        # So little time is given that they are measured at two sizes only.
        assert [each.micro_batch for each in part.costs] == [cost.micro_batch for cost in layer.costs[:-1]] == [1, 2]
        assert min(part.update_s, *(min(cost.forward_s, cost.backward_s, cost.repeats) for cost in part.costs)) > 0
        for mine, other in zip(part.costs, layer.costs[:-1], strict=True):
            assert mine.recompute_s is not None
            assert mine.backward_input_s is not None
            kept, whole_kept = (
                {each.storage: each.bytes for each in cost.saved if each.storage in crossing} for cost in (mine, other)
            )
            assert all(
                kept[storage] in (size, size // count) for storage, size in whole_kept.items() if storage in kept
            )
            assert mine.output_bytes <= other.output_bytes
            assert len(mine.sums) > 0
            assert {each.ranks for each in mine.sums} <= {2, count}
    # Norms have whole gradients after gathers, summed up once, and none where tensors are whole.
    blocks = [part for name, count, sliced, part in parts_of(measured) if "blocks.1" in name and count == 2]
    assert [part.summand_bytes for part in blocks] == [0, 4 * 16 * 4]
    assert [each.at for each in blocks[0].costs[0].sums] == ["forward"] * 2 + ["backward_input"] * 2
    # Parts hold what all parts have whole.
    first = found[measured.layers[0].name, 2, False]
    assert first.parameters_bytes == 49 * 16 * 4


def run_as_recorded(graph: LayerGraph, kind: PartKind, rows: int) -> list[tuple[str, int]]:
    """Run a layer's parts beside each other; return what part 0 exchanges, and its bytes."""
    layer, specs = kind.layer, [graph.tensor(name) for name in kind.layer.inputs]
    specs = [spec.slice(kind.sequence[spec.name], kind.count) if spec.name in kind.sequence else spec for spec in specs]

    def act(sums: ThreadSums, index: int) -> list[tuple[str, int]]:
        part = split_as_recorded(layer, sums, index, kind.count, kind.cuts, kind.sequence, kind.deferred_names)
        inputs = [torch.zeros(spec.shape(rows), dtype=spec.dtype).requires_grad_(spec.gradient) for spec in specs]
        outputs = [each for each in part.module(rows, *inputs) if each.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        return [(kind, 4 * torch.Size(shape).numel()) for kind, shape in zip(sums.kinds, sums.shapes, strict=True)]

    return run_parts(kind.count, act)[0]


KINDS = {"all_reduce": "sum", "all_gather": "gather", "reduce_scatter": "reduce_scatter"}


def test_sums_are_those_of_parts_that_run_beside_each_other(subject: Subject, measured: Profile) -> None:
    kinds = part_kinds(subject.graph, SplitSurvey(subject.graph), 4)
    found = {(name, count, sliced): part for name, count, sliced, part in parts_of(measured)}
    assert len(found) == sum(len(kind.layers) for kind in kinds)
    for kind in kinds:
        part = found[kind.layer.name, kind.count, bool(kind.sequence)]
        for found_cost in part.costs:
            sums = Counter((KINDS[each.kind], each.bytes) for each in found_cost.sums)
            assert sums == Counter(run_as_recorded(subject.graph, kind, found_cost.micro_batch))


def test_estimated_parts_hold_and_exchange_what_measured_ones_do(subject: Subject, measured: Profile) -> None:
    estimated = estimate_profile(subject, find("H100"), ProfileOptions(batch=2, tensor=4), no_progress)
    pairs = list(zip(parts_of(measured), parts_of(estimated), strict=True))
    sizes = ("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes", "summand_bytes")
    assert pairs
    for (*key, here), (*other, there) in pairs:
        assert key == other
        assert [getattr(here, name) for name in sizes] == [getattr(there, name) for name in sizes]
        assert [each.sums for each in here.costs] == [each.sums for each in there.costs]
        assert all(cost.provenance == "estimated" and cost.forward_launch_s for cost in there.costs)
        assert there.update_s > 0
    alone = estimate_profile(subject, find("H100"), ProfileOptions(batch=2, tensor=1), no_progress)
    assert not list(parts_of(alone))
    assert [layer.costs for layer in alone.layers] == [layer.costs for layer in estimated.layers]


@cache
def kinds_of(name: str) -> dict[tuple[str, int, bool], PartKind]:
    graph = model_case(name).graph
    kinds = part_kinds(graph, SplitSurvey(graph), 8)
    return {(layer.name, kind.count, bool(kind.sequence)): kind for kind in kinds for layer in kind.layers}


@cache
def held(name: str, layer: str, count: int) -> PartCosts | None:
    """Return what a profile says that the largest part holds; none of a layer that does not split."""
    kind = kinds_of(name).get((layer, count, False))
    if kind is None:
        return None
    analysis = analyse(kind.layer)
    lone = lone_part(kind, lambda sums, index: kind.make(analysis, False, sums, index), kind.largest())
    return part_record(lone.part, (0, 0), [cost(1, 1.0, 2.0, {}, 0, 0)], UpdateCosts(0.0, 0.0))


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(team_plans("narrow_gpt"))
def test_parts_hold_what_ranks_of_drawn_plans_hold(plan: Plan) -> None:
    graph = model_case("narrow_gpt").graph
    for stage in plan.stages:
        if stage.tensor_parallel > 1:
            layers, largest = [graph.layer(name) for name in stage.layers], dict[str, int]()
            for rank in stage.devices[: stage.tensor_parallel]:
                team = Team(plan, rank, None)  # type: ignore[arg-type]
                index = plan.stages.index(stage)
                for layer in team.split(index, layers):
                    size = sum(parameter.nbytes for parameter in layer.module.parameters())
                    largest[layer.name] = max(size, largest.get(layer.name, 0))
            for layer in layers:
                part = held("narrow_gpt", layer.name, stage.tensor_parallel)
                whole = sum(parameter.nbytes for parameter in layer.module.parameters())
                assert largest[layer.name] == (whole if part is None else part.parameters_bytes)


def test_what_parts_take_is_left_out_where_a_device_is_full_or_layers_compile(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(PartMeasurement, "_time", full)
    found = measure_layers(subject, ProfileOptions(batch=2, device="cpu", budget_s=0.05, tensor=2))
    assert NO_ROOM in found.notes
    assert not list(parts_of(found))
    alone = measure_layers(subject, ProfileOptions(batch=2, device="cpu", budget_s=0.05, tensor=1))
    assert not {NO_ROOM, NO_PARTS} & set(alone.notes)


def test_a_part_that_does_not_run_leaves_the_rest_of_a_profile_as_it_is(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = PartKind.make

    def broken(kind: PartKind, *rest: Any) -> Any:  # noqa: ANN401
        if kind.layer.name == "table":
            raise CaptureError("no such part")
        return make(kind, *rest)

    monkeypatch.setattr(PartKind, "make", broken)
    measured = measure_layers(subject, ProfileOptions(batch=2, device="cpu", budget_s=0.05, tensor=2))
    asked = ProfileOptions(batch=2, device="H100", tensor=2)
    for found in (measured, estimate_profile(subject, find("H100"), asked, no_progress)):
        there = {name for name, *_ in parts_of(found)}
        assert "table" not in there
        assert len(there) > 3
        assert any("parts of layer table for 2 devices a replica were not found out" in note for note in found.notes)
