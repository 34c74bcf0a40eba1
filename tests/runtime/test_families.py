"""Models of the Transformers library, trained by teams as one rank trains them, and in unequal stages as in one."""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.errors import UsageError
from autopar.runtime.data import sample_order
from autopar.runtime.settings import TrainSettings
from autopar.runtime.stage.parameters import check_split_seeds
from families import tiny_config
from family_cases import Layout, Variant, differences, family_case, plan_of, thread_variants, train_threads
from training_cases import Case

pytest.importorskip("transformers")
EVERY = {key: list(found) for key, found in groupby(thread_variants(), key=lambda each: each[:2])}
# Both kinds of attention are tried in turn; ``benchmarks/family_ranks.py`` tries both of each model.
BY_MODEL = {key: found for at, (key, found) in enumerate(EVERY.items()) if at % 4 in (0, 3)}


@pytest.mark.slow
@pytest.mark.some(5)
@pytest.mark.parametrize("model", BY_MODEL, ids="-".join)
def test_teams_train_a_model_as_one_rank_does(model: tuple[str, str], tmp_path: Path) -> None:
    case = family_case(*model, tmp_path)
    assert len(case.graph.layers) > 2
    for at, variant in enumerate(BY_MODEL[model]):
        folder = tmp_path / str(at)
        folder.mkdir()
        found = differences(case, variant, folder)
        assert found.within(variant), (variant, found)


@pytest.mark.slow
def test_parts_that_draw_for_themselves_train_alike_each_time(tmp_path: Path) -> None:
    """With recomputation, too, whose masks are those of the forward; other devices a replica draw other masks."""
    case, settings = family_case("gpt2", "sdpa", tmp_path), TrainSettings(split_seeds=True)
    losses = {}
    for size, recompute in ((2, False), (2, True), (4, False)):
        variant = Variant("gpt2", "sdpa", Layout((1,), (size,)), False, ("1f1b", 1), recompute, "none")
        folder = tmp_path / f"{size}-{recompute}"
        losses[size, recompute] = train_threads(case, plan_of(case, variant), folder, settings)
    assert losses[2, False] == pytest.approx(losses[2, True], rel=1e-12)
    assert losses[2, False] != pytest.approx(losses[4, False], rel=1e-6)
    assert losses[2, False] == pytest.approx(losses[4, False], rel=0.1)


@pytest.mark.parametrize(("name", "attention", "size"), [("gpt2", "sdpa", 1), ("gpt2", "eager", 2)])
def test_seeds_are_not_split_where_no_part_draws(name: str, attention: str, size: int, tmp_path: Path) -> None:
    case = family_case(name, attention, tmp_path)
    variant = Variant(name, attention, Layout((1,), (size,)), False, ("1f1b", 1), False, "none")
    with pytest.raises(UsageError, match="`split_seeds`: no stage of several devices a replica attends"):
        check_split_seeds(plan_of(case, variant), case.graph)


MICRO_BATCHES, ROWS, STEPS = 2, 4, 2
POSITIONS = 9
"""The library's loss is float32 whatever the model: with 8 labels each, dividing by their number rounds nothing."""
CONFIGS = {
    "llama": tiny_config("llama", 5, POSITIONS),
    "gpt2": tiny_config("gpt2", 5, POSITIONS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}
CUTS = [1, 3, 4]


def _plain(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train as one would by hand: the mean over a mini-batch's labels; return first gradients and last parameters."""
    model, module = case.model, case.model.build(0)
    optimizer, data, batch = model.make_optimizer(module.named_parameters()), model.dataset(), MICRO_BATCHES * ROWS
    order = sample_order(len(data), 0, 0)  # type: ignore[arg-type]
    first: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = order[step * batch : (step + 1) * batch].split(ROWS)
        samples: list[Any] = [model.collate([model.sample(data, index) for index in part.tolist()]) for part in parts]
        counts = [int((each["labels"][:, 1:] != -100).sum()) for each in samples]
        for values, count in zip(samples, counts, strict=True):
            (module(**values).loss * count / sum(counts)).backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    return first, {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "schedule"), [("llama", "1f1b"), ("gpt2", "interleaved")])
def test_four_unequal_stages_train_a_model_of_the_library_as_one_process_does(
    name: str, schedule: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    loaded = load(f"hf:{tmp_path / 'config.json'}")
    model = replace(loaded, factory=lambda: loaded.build(0).double(), functions={**loaded.functions, "optimizer": _sgd})
    module = model.build(0)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {key: value.detach().clone() for key, value in held.items()}
    case = Case(tmp_path / "config.json", model, capture(model, module), state)
    assert case.graph.loss == "sum_count"
    widths, chunks = ((1, 2, 1, 1), 1) if schedule == "1f1b" else ((2, 1), 2)
    plan = case.plan(widths, MICRO_BATCHES, ROWS, schedule, cuts=CUTS, chunks=chunks)
    assert len({len(stage.layers) for stage in plan.stages}) > 1
    gradients, parameters = _plain(case)
    case.train(plan, tmp_path, STEPS)
    largest = max(float(each.abs().max()) for each in gradients.values())
    seen: set[str] = set()
    for rank in range(len(plan.devices)):
        for key, gradient in load_file(tmp_path / f"gradients-{rank}").items():
            assert float((gradient - gradients[key]).abs().max()) <= 1e-12 * largest, key
            seen.add(key)
        for key, parameter in load_file(tmp_path / f"parameters-{rank}").items():
            torch.testing.assert_close(parameter, parameters[key], rtol=0, atol=1e-10)
    assert seen == gradients.keys()


def _sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
