"""Models of the Transformers library come from a configuration, with synthetic inputs and no network."""
# ruff: noqa: ANN001, ANN201

import copy
import json
import sys

import pytest
import torch

from autopar.capture import capture, load, named_tensors, slice_rows
from autopar.capture.layers.check import check_gradients
from autopar.capture.layers.losses import separation
from autopar.capture.model.batch import rebuild
from autopar.errors import FileError, ModelError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from families import tiny_config
from stage_runs import assert_equal_to_plain

pytest.importorskip("transformers", reason="autopar[hf] is not installed")

TINY = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
GPT = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 16, "n_head": 2}
GPT |= {"n_positions": 12, "vocab_size": 61, "bos_token_id": 0, "eos_token_id": 1}
BERT = {"model_type": "bert", **TINY, "max_position_embeddings": 12}
ANSWERING = BERT | {"architectures": ["BertForQuestionAnswering"]}
VIT = {"model_type": "vit", **TINY, "image_size": 16, "patch_size": 8, "architectures": ["ViTForImageClassification"]}
T5 = {"model_type": "t5", "vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
T5 |= {"architectures": ["T5ForConditionalGeneration"], "n_positions": 10, "decoder_start_token_id": 0}


def write(folder, content):
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def loaded(folder, content):
    write(folder, content)
    return load(f"hf:{folder}")


def batch_of(user, rows=3):
    return user.load_batch(user.dataset(), range(rows))


@pytest.mark.reliability(21)
def test_a_folder_and_a_file_are_the_same_model_which_takes_any_length(tmp_path):
    path = write(tmp_path, GPT)
    one, other = load(f"hf:{tmp_path}"), load(f"hf:{path}")
    assert (one.path, one.sha256) == (other.path, other.sha256)
    pairs = zip(one.build(3).parameters(), other.build(3).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert one.notes == ("inputs are synthetic, of the configuration's shapes",)
    write(tmp_path, {**GPT, "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}})
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    assert type(load(f"hf:{tmp_path}").build(0)).__name__ == "GPT2LMHeadModel"
    assert not (tmp_path / "ran").exists()
    unbounded = {name: value for name, value in T5.items() if name != "n_positions"}
    assert load(f"hf:{write(tmp_path, unbounded)}").sequence == 512
    assert len(load(f"hf:{tmp_path}", sequence=700).dataset()[0]["input_ids"]) == 700
    long = {**GPT, "n_positions": 8192}
    assert load(f"hf:{write(tmp_path, long)}").sequence == 2048
    assert load(f"hf:{tmp_path}", sequence=8192).sequence == 8192
    with pytest.raises(UsageError, match="ViTForImageClassification reads no sequences of tokens; leave it out"):
        load(f"hf:{write(tmp_path, VIT)}", sequence=8)
    assert load(f"hf:{tmp_path}").sequence is None
    (tmp_path / "data.py").write_text("def dataset():\n    return []\n")
    with pytest.raises(UsageError, match="only hf: models have synthetic inputs"):
        load(str(tmp_path / "data.py"), sequence=8)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("content", "shapes"),
    [
        (GPT, {"input_ids": (12,), "labels": (12,)}),
        (BERT, {"input_ids": (12,), "labels": (12,)}),
        (T5, {"input_ids": (10,), "decoder_input_ids": (10,), "labels": (10,)}),
        (VIT, {"pixel_values": (3, 16, 16), "labels": ()}),
        (BERT | {"architectures": ["BertForSequenceClassification"]}, {"input_ids": (12,), "labels": ()}),
        (BERT | {"architectures": ["BertForTokenClassification"]}, {"input_ids": (12,), "labels": (12,)}),
        (BERT | {"architectures": ["BertForMultipleChoice"]}, {"input_ids": (2, 12), "labels": ()}),
        (ANSWERING, {"input_ids": (12,), "start_positions": (), "end_positions": ()}),
    ],
)
def test_samples_have_the_shapes_of_the_configuration_and_the_loss_adds_up(content, shapes, tmp_path):
    user = loaded(tmp_path, content)
    dataset = user.dataset()
    assert {name: tuple(tensor.shape) for name, tensor in dataset[5].items()} == shapes
    assert all(torch.equal(dataset[5][name], dataset[5][name]) for name in shapes)
    assert any(not torch.equal(dataset[5][name], dataset[6][name]) for name in shapes)
    assert separation(user.build().train(), batch_of(user, 6), user.loss).difference == 0


def test_tokens_are_counted_by_labels_and_what_has_no_architecture_or_loss_says_so(tmp_path):
    user = loaded(tmp_path, GPT)
    model, batch = user.build().eval(), batch_of(user)
    batch["labels"][0, :] = -100
    batch["labels"][1, 4:] = -100
    output = model(**batch)
    total, count = user.loss(output, batch)
    assert int(count) == 3 + 11
    assert float((total / count).detach()) == pytest.approx(float(output.loss.detach()), rel=1e-6)
    batch["labels"][:] = -100
    total, count = user.loss(model(**batch), batch)
    assert (float(total.detach()), float(count)) == (0.0, 0.0)
    total.backward()
    assert all(float(parameter.grad.abs().sum()) == 0 for parameter in model.parameters())
    user = loaded(tmp_path, BERT)
    assert type(user.build()).__name__ == "BertForMaskedLM"
    assert "names no architecture" in user.notes[0]
    assert "BertModel has no loss" in loaded(tmp_path, BERT | {"architectures": ["BertModel"]}).notes[0]
    user = loaded(tmp_path, BERT | {"architectures": ["BertForNextSentencePrediction"]})
    with pytest.raises(ModelError, match=r"BertForNextSentencePrediction; give `data`"):
        user.dataset()


DATA = """
import torch
def dataset():
    return [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(5)]
def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def test_a_data_file_replaces_the_synthetic_inputs_if_it_has_a_dataset(tmp_path):
    write(tmp_path, GPT)
    data = tmp_path / "data.py"
    data.write_text(DATA)
    user = load(f"hf:{tmp_path}", data)
    assert {tuple(tensor.shape) for tensor in named_tensors(batch_of(user)).values()} == {(3, 8)}
    assert (user.notes, user.data, user.sequence) == ((), data, None)
    assert isinstance(user.make_optimizer(user.build().named_parameters()), torch.optim.SGD)
    assert user.loss is not None
    with pytest.raises(UsageError, match=r"`sequence=16`: inputs are those of `data="):
        load(f"hf:{tmp_path}", data, sequence=16)
    data.write_text(DATA.replace("def dataset", "def _dataset"))
    user = load(f"hf:{tmp_path}", data, sequence=10)
    assert {tuple(tensor.shape) for tensor in named_tensors(batch_of(user)).values()} == {(3, 10)}
    assert (user.sequence, "synthetic" in user.notes[-1]) == (10, True)
    assert isinstance(user.make_optimizer(user.build().named_parameters()), torch.optim.SGD)
    data.write_text("import torch\ndef dataset(): return [{'input_ids': torch.zeros(12, dtype=torch.long)}] * 4\n")
    user = load(f"hf:{tmp_path}", data)
    with pytest.raises(ModelError, match="the samples hold no labels"):
        capture(user, user.build())
    data.write_text("x = 1\n")
    with pytest.raises(ModelError, match=r"data\.py: defines no dataset\(\) and no other function of a model file"):
        load(f"hf:{tmp_path}", data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "holds a list"),
        ("{}", "has no model_type"),
        ({"model_type": "nonsense"}, 'model_type "nonsense" is none that transformers'),
        (GPT | {"architectures": ["NoSuchModel"]}, 'architecture "NoSuchModel" is none'),
        (GPT | {"architectures": [3]}, "must be a list of class names"),
        (GPT | {"n_layer": -1}, "n_layer is -1"),
        (GPT | {"n_layer": 10**9}, "n_layer is 1000000000"),
        (GPT | {"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        (GPT | {"n_embd": "wide"}, "transformers refuses the configuration"),
        (GPT | {"n_head": 3}, "model raised ValueError"),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(content, message, tmp_path):
    with pytest.raises((ModelError, FileError), match=message) as caught:
        loaded(tmp_path, content).build()
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_missing_configuration_is_refused_and_the_extra_is_named(tmp_path, monkeypatch):
    for spec, error, said in (
        (f"hf:{tmp_path}", ModelError, "no such configuration"),
        ("hf:gpt2", ModelError, "nothing is downloaded"),
        ("hf:", UsageError, "give hf:"),
    ):
        with pytest.raises(error, match=said):
            load(spec)
    write(tmp_path, GPT)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'autopar\[hf\]'"):
        load(f"hf:{tmp_path}")


ROBERTA = {"model_type": "roberta", **TINY, "max_position_embeddings": 12, "pad_token_id": 1}
ROBERTA |= {"architectures": ["RobertaForMaskedLM"]}


@pytest.mark.parametrize(("content", "usual"), [(GPT, 12), (BERT, 12), (T5, 10), (ROBERTA, 10)])
def test_sequences_are_as_long_as_asked_and_up_to_the_positions(tmp_path, content, usual):
    path = write(tmp_path, content)
    plain = load(f"hf:{path}")
    assert (plain.sequence, plain.model_source.sequence) == (usual, usual)
    assert len(plain.dataset()[0]["input_ids"]) == usual
    for length in (2, 5, usual):
        user = load(f"hf:{path}", sequence=length)
        assert user.model_source.sequence == length
        sample = user.dataset()[0]
        assert {name: len(value) for name, value in sample.items()} == dict.fromkeys(sample, length)
        # What a profile or plan records is what its run is fed with.
        assert load(f"hf:{path}", expected_source=user.model_source).sequence == length
    user.build()(**{name: value[None] for name, value in sample.items()})
    for length in (usual + 1, 4096):
        with pytest.raises(UsageError, match=f"`sequence={length}`: .* up to {usual}; use `sequence={usual}`"):
            load(f"hf:{path}", sequence=length)
    with pytest.raises(UsageError, match="at least 2 tokens"):
        load(f"hf:{path}", sequence=1)


@pytest.mark.slow
def test_a_profile_prints_and_records_how_long_sequences_are(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, GPT)
    typed, profiles = ("profile", "hf:config.json", "--batch", "2", "--device", "H100", "--tensor", "1"), []
    for options, tokens in (((), 12), (("--sequence", "6"), 6)):
        code, _, err = command(*typed, *options)
        assert code == 0, err
        assert f"synthetic sequences of {tokens} tokens (--sequence)" in err
        profiles.append(Profile.load("profile.json"))
        assert profiles[-1].model.sequence == tokens
    long, short = profiles
    assert max(tensor.bytes_per_sample for tensor in short.tensors) < max(t.bytes_per_sample for t in long.tensors)
    assert command("plan")[0] == 0
    assert Plan.load("plan.json").model.sequence == 6
    assert command("rehearse")[0] == 0
    code, _, err = command(*typed, "--sequence", "13")
    assert (code, err.count("\n")) == (2, 1)
    assert "use --sequence 12" in err
    long.save("long.json")
    device = long.device.model_copy(update={"name": "V100"})
    long.model_copy(update={"device": device, "model": short.model}).save("short.json")
    code, _, err = command("import", "profiles", "long.json", "short.json")
    assert code == 4
    assert "$.model.sequence is 6, and 12 in long.json; profile with the same --sequence" in err


FOUR = {
    "GPT2LMHeadModel": GPT | {"n_layer": 4},
    "AlbertForMaskedLM": {**BERT, "model_type": "albert", "num_hidden_layers": 4, "embedding_size": 8},
    "MixtralForCausalLM": tiny_config("mixtral", 4, 12, num_local_experts=4),
    "ResNetForImageClassification": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 8]}
    | {"depths": [1, 1, 1, 1], "layer_type": "basic", "image_size": 64, "num_labels": 4},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name[:3] != "GPT")) for name in FOUR])
def test_stages_of_a_configured_model_equal_the_plain_model(name, tmp_path):
    user = loaded(tmp_path, FOUR[name] | {"architectures": [name]})
    model = user.build(1).train()
    before = copy.deepcopy(model.state_dict())
    graph = capture(user, model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    batch, count = batch_of(user, 4), len(graph.layers)
    check_gradients(model, graph, batch, user.loss)
    # In others the order of a sum differs.
    tolerance = 0 if name[0] in "GR" else 1e-6
    for rows, stages in ((3, 2), (1, 4), (4, 8)):
        part = rebuild(batch, slice_rows(named_tensors(batch), 0, rows))
        cuts = {round(count * at / stages) for at in range(1, stages)} - {0, count}
        assert_equal_to_plain(model, graph, part, user.loss, sorted(cuts), tolerance, tolerance)
    if name[:3] == "GPT":
        blocks = [f"transformer.h.{index}" for index in range(4)]
        assert [layer.name for layer in graph.layers] == ["transformer.wte", *blocks, "transformer.ln_f+lm_head"]
        assert len({layer.fingerprint for layer in graph.layers if layer.name in blocks}) == 1
        assert graph.tied_parameters() == {"transformer.wte.weight": ("transformer.wte", "transformer.ln_f+lm_head")}
        assert graph.loss == "sum_count"
