"""Models of the Transformers library train through unequal stages as they do in one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autopar.capture.export import capture
from autopar.capture.source import UserModel, load
from autopar.runtime.data import sample_order
from dictated import dictate
from threads import train_in_threads

pytest.importorskip("transformers", reason="needs the extra autopar[hf]")

MICRO_BATCHES, ROWS, STEPS = 2, 4, 2
POSITIONS = 9
"""The library's loss is float32 whatever the model: with 8 labels each, dividing by their number rounds nothing."""
CONFIGS: dict[str, dict[str, Any]] = {
    # Rotary positions, grouped keys and values, an untied head.
    "llama": {
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
    },
    # Learned positions; the head shares the embedding's weight.
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 40,
        "n_positions": POSITIONS,
        "n_embd": 16,
        "n_layer": 5,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
CUTS = [1, 3, 4]


def _plain(module: nn.Module, model: UserModel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train as one would by hand: the mean over a mini-batch's labels; return first gradients and last parameters."""
    optimizer = model.make_optimizer(module.named_parameters())
    data = model.dataset()
    batch = MICRO_BATCHES * ROWS
    order = sample_order(len(data), 0, 0)  # type: ignore[arg-type]
    first: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = order[step * batch : (step + 1) * batch].split(ROWS)
        samples = [model.collate([model.sample(data, index) for index in part.tolist()]) for part in parts]
        counts = [int((_inputs(each)["labels"][:, 1:] != -100).sum()) for each in samples]
        for values, count in zip(samples, counts, strict=True):
            (module(**_inputs(values)).loss * count / sum(counts)).backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    return first, {name: parameter.detach() for name, parameter in module.named_parameters()}


def _inputs(values: object) -> Mapping[str, torch.Tensor]:
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_four_unequal_stages_train_a_model_of_the_library_as_one_process_does(
    name: str, schedule: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    loaded = load(f"hf:{tmp_path / 'config.json'}")
    model = replace(loaded, factory=lambda: loaded.build(0).double(), functions={**loaded.functions, "optimizer": _sgd})
    module = model.build(0)
    graph = capture(model, module)
    state = {key: value.detach().clone() for key, value in [*module.named_parameters(), *module.named_buffers()]}
    assert graph.loss == "sum_count"
    widths, chunks = ((1, 2, 1, 1), 1) if schedule == "1f1b" else ((2, 1), 2)
    plan = dictate(graph, model, widths, MICRO_BATCHES, ROWS, schedule, cuts=CUTS, chunks=chunks)
    assert len({len(stage.layers) for stage in plan.stages}) > 1
    gradients, parameters = _plain(copy.deepcopy(module), model)
    train_in_threads(plan, graph, model, state, tmp_path, STEPS)
    largest = max(float(each.abs().max()) for each in gradients.values())
    seen: set[str] = set()
    for rank in range(len(plan.devices)):
        for key, gradient in load_file(tmp_path / f"gradients-{rank}").items():
            assert float((gradient - gradients[key]).abs().max()) <= 1e-12 * largest, key
            seen.add(key)
        for key, parameter in load_file(tmp_path / f"parameters-{rank}").items():
            torch.testing.assert_close(parameter, parameters[key], rtol=0, atol=1e-10)
    assert seen == gradients.keys()


def _sgd(parameters: Any) -> torch.optim.Optimizer:  # noqa: ANN401
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
