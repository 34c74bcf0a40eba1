"""Initial weights: from files, module by module or of model(), and how much of them anybody holds at once."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.capture.cache.recall import build_and_capture
from autopar.capture.model.batch import seed_data
from autopar.capture.model.effects import StorageTracker
from autopar.capture.model.source import UserModel, load
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.saving import write_stages
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.start import workspace
from autopar.runtime.start.workspace import Workspace, given_names, made_by_module
from autopar.schedules.expand import expand
from dictated import dictate
from families import tiny_config

WIDTH, BLOCKS = 96, 6
MODEL = f"""
import torch
from torch import nn
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, {WIDTH})
        blocks = (nn.Sequential(nn.LayerNorm({WIDTH}), nn.Linear({WIDTH}, {WIDTH})) for _ in range({BLOCKS}))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear({WIDTH}, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))
    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        for block in self.blocks: x = x + torch.relu(block(x))
        return self.head(x)
def model(): return Tied()
def dataset(): return torch.utils.data.TensorDataset(torch.arange(64) % 50, torch.arange(64) % 50)
def loss(output, batch): return nn.functional.cross_entropy(output, batch[1])
"""
LISTED = "def layers(model): return [nn.Sequential(model.embed), *model.blocks, model.head]\n"
LARGEST = 4 * (WIDTH + 3) * WIDTH
"""Bytes of the largest layer."""


class ValueTracker(StorageTracker):  # type: ignore[misc]
    """Counts what has values: neither fake tensors nor those of the meta device."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._add(storage)


def user_model(folder: Path, text: str = MODEL) -> UserModel:
    (folder / "tied.py").write_text(text)
    return load(str(folder / "tied.py"))


def planned(user: UserModel, widths: list[int]) -> Plan:
    return dictate(build_and_capture(user, 0)[1], user, widths, 2, 2)


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in (*module.named_parameters(), *module.named_buffers())}


def prepared(folder: Path, user: UserModel, given: Path | None = None) -> tuple[Workspace, str, int]:
    """Prepare a workspace; return it, where weights are from, and the most bytes of tensors that were alive."""
    plan = planned(user, [1, 1])
    folder.mkdir()
    with ValueTracker() as tracker:
        source = Workspace(folder).prepare(user, plan, given)
    return Workspace(folder), source, int(tracker.peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("text", [MODEL, MODEL + LISTED])
def test_given_weights_are_read_by_ranks_alone(tmp_path: Path, text: str) -> None:
    user = user_model(tmp_path, text)
    values = {name: torch.randn_like(value) for name, value in values_of(user.build(1)).items()}
    (tmp_path / "given").mkdir()
    weights.write(tmp_path / "given" / weights.SINGLE, values)
    found, source, peak_bytes = prepared(tmp_path / "w", user, tmp_path / "given")
    assert source == f"files in {tmp_path / 'given'}"
    assert found.names() == values.keys()
    assert all(torch.equal(value, values[name]) for name, value in found.read(values).items())
    assert peak_bytes < 2 * LARGEST
    # Of names that a parameter has in the model, files of the Transformers library have one or the other.
    del values["scale"]
    values["head.weight"] = values.pop("embed.weight")
    weights.write(tmp_path / "given" / weights.SINGLE, values)
    found, _, _ = prepared(tmp_path / "v", user, tmp_path / "given")
    read = found.read(["embed.weight", "scale", "head.weight"])
    assert read.keys() == {"embed.weight", "scale"}
    assert torch.equal(read["embed.weight"], values["head.weight"])
    assert read["scale"].tolist() == [0.5]


def test_weights_that_do_not_fit_and_parameters_that_nothing_makes_are_named(tmp_path: Path) -> None:
    module = user_model(tmp_path).build(0)
    values = values_of(module)
    for name, value, said in (
        ("head.bias", None, "ok"),
        ("blocks.1.1.bias", values["blocks.1.1.bias"].half(), r"'blocks.1.1.bias' is \(96,\) F16, .* is \(96,\) F32"),
        ("embed.weight", values["embed.weight"][:9], r"'embed.weight' is \(9, 96\) F32, the model's is \(50, 96\) F32"),
        ("blocks.3.0.weight", None, r"holds no parameter 'blocks.3.0.weight' of the model"),
    ):
        changed = {**values, name: value}
        weights.write(tmp_path / weights.SINGLE, {key: each for key, each in changed.items() if each is not None})
        if said == "ok":
            assert given_names(module, tmp_path) == {key: key for key in values}
            continue
        with pytest.raises(FileError, match=said):
            given_names(module, tmp_path)
    model = nn.Sequential(nn.Linear(2, 2), Positions())
    with pytest.raises(UsageError, match=r"nothing makes its parameter 1.places .* give Positions a reset_parameters"):
        list(made_by_module(model.to("meta"), 0))
    # As models of the Transformers library make theirs.
    model._init_weights = lambda part: [value.fill_(2.0) for value in part.parameters(recurse=False)]  # type: ignore
    made = {name: value for part in made_by_module(model, 0) for name, value in part.items()}
    assert made.keys() == dict(model.named_parameters()).keys()
    assert all(bool((value == 2.0).all()) for value in made.values())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_larger_than_memory_is_made_module_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = user_model(tmp_path)
    monkeypatch.setattr(workspace, "host_memory_bytes", lambda: 1)
    found, source, peak_bytes = prepared(tmp_path / "w", user)
    assert source == "made module by module, seed 0: model() is larger than the host's memory"
    assert peak_bytes < 3 * LARGEST
    expected = user.build(1)
    for path, module in expected.named_modules():
        if path != "head" and [*module.parameters(recurse=False)]:
            seed_data(0, "initial", path)
            module.reset_parameters()  # type: ignore[operator]
    values = values_of(expected)
    read = found.read(values)
    assert read.keys() == values.keys()
    assert all(torch.equal(read[name], value) for name, value in values.items())


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2)])
        self.places = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("text", [MODEL, MODEL + LISTED])
def test_no_rank_holds_more_than_its_stage_and_a_layer_while_it_reads_and_saves(tmp_path: Path, text: str) -> None:
    user = user_model(tmp_path, text)
    found, _, peak_bytes = prepared(tmp_path / "w", user)
    assert peak_bytes > BLOCKS * LARGEST * 0.9
    plan = planned(user, [1, 1, 1])
    for rank, stage in enumerate(plan.stages):
        graph = found.graph(user, plan)
        names = {name for each in stage.layers for name in graph.layer(each).parameters.values()}
        own = sum(tensor.nbytes for tensor in found.read(names).values())
        transport = InProcessTransport(Exchange(), rank)

        with StorageTracker() as tracker:
            place = (rank, graph, user, found.read, transport, torch.device("cpu"))
            job = Job(plan, expand(plan), *place, lambda step, position: None)
            # The order of the samples; and the gradient of a parameter that other stages share.
            beside = 64 * 8 + sum(job.parameters[tied.parameter].nbytes for tied in plan.tied if rank in tied.stages)
            assert own <= tracker.alive_bytes
            assert tracker.peak_bytes <= own + LARGEST + beside
            write_stages(job, graph, partial(found.unread, plan, graph), tmp_path, "0")
            assert tracker.peak_bytes <= own + LARGEST + beside


@pytest.mark.parametrize(("name", "kind"), [("llama", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel")])
def test_models_of_the_transformers_library_begin_with_its_files_or_their_own_initialisation(
    name: str, kind: str, tmp_path: Path
) -> None:
    content = tiny_config(name, 2, architectures=[kind], tie_word_embeddings=True)
    pytest.importorskip("transformers", reason="autopar[hf] is not installed")
    (tmp_path / "config.json").write_text(json.dumps(content))
    user = load(f"hf:{tmp_path}")
    saved, on_meta = user.build(1), user.build(0, on_meta=True)
    saved.save_pretrained(tmp_path / "saved", max_shard_size="8KB")  # type: ignore[operator]
    names = given_names(on_meta, tmp_path / "saved")
    read = weights.read(tmp_path / "saved", names.values())
    for name, parameter in saved.named_parameters():
        assert torch.equal(read[names[name]], parameter)
    made = {name: value for part in made_by_module(on_meta, 0) for name, value in part.items()}
    assert made.keys() == dict(saved.named_parameters()).keys()
    for name, parameter in saved.named_parameters():
        if parameter.std() < 1e-3:
            assert torch.equal(made[name], parameter)
        else:
            assert float(made[name].std()) == pytest.approx(0.02, rel=0.3)
