"""Whole models of the Transformers library, trained by teams, with dropout, as one rank trains them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from autopar.formats.plan import Plan
from dictated import dictate
from families import EAGER
from in_teams import in_teams
from threads import train_in_threads
from training_cases import STEPS, Case, make_case, own_part

FILE = """
import torch
from families import VOCABULARY, example_of, family

batch, objective = example_of({name!r})


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        sample = {{}}
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                sample[name] = torch.rand(tensor.shape[1:], generator=chance, dtype=tensor.dtype)
            else:
                most = 7 if name == "labels" else VOCABULARY
                sample[name] = torch.randint(3, most, tensor.shape[1:], generator=chance)
        return sample


def model():
    return family({name!r}, {attention!r}).double()


def dataset():
    return Samples()


def loss(output, batch):
    return objective(output, batch)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
"""
NAMES = ("gpt2", "llama", "llama-2", "qwen2", "mistral", "gemma", "phi3", "phi3-2", "neox", "opt", "bert", "t5", "vit")
CLOSE = 1e-12
SINGLE = {"gemma": 1e-7}
"""Those whose norms compute in float32 whatever the model does: slices add their gradients up in another order."""


def trained(case: Case, plan: Plan, folder: Path) -> list[float]:
    folder.mkdir()
    module = case.model.build(0)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {name: each.detach().clone() for name, each in state.items()}
    return train_in_threads(plan, case.graph, case.model, state, folder, STEPS)


def largest_difference(plan: Plan, folder: Path, truth: Path, what: str) -> float:
    """Return how far what ranks end with is from what one rank does, relative to the largest of all."""
    whole, seen, apart = load_file(truth / f"{what}-0"), set[str](), 0.0
    for rank in range(len(plan.devices)):
        for name, each in load_file(folder / f"{what}-{rank}").items():
            seen.add(name)
            apart = max(apart, float((each - own_part(plan, rank, name, whole[name])).abs().max()))
    assert seen == whole.keys()
    return apart / max(float(each.abs().max()) for each in whole.values())


@pytest.mark.parametrize("name", NAMES)
def test_teams_train_a_model_as_one_rank_does(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    attention = "eager" if name in EAGER or NAMES.index(name) % 2 else "sdpa"
    (tmp_path / "model.py").write_text(FILE.format(name=name, attention=attention))
    case = make_case(tmp_path / "model.py")
    alone = dictate(case.graph, case.model, [1], 2, 3)
    losses = trained(case, alone, tmp_path / "alone")
    assert len(case.graph.layers) > 2
    for widths, sizes, sequence in [([1], [2], False), ([1, 1], [2, 4], False), ([1, 1], [4, 4], True)]:
        plan = in_teams(case.graph, dictate(case.graph, case.model, widths, 2, 3), sizes, sequence=sequence)
        assert all(stage.cuts for stage in plan.stages)
        folder = tmp_path / f"{sizes}-{sequence}"
        close = SINGLE.get(name, CLOSE) if sequence else CLOSE
        assert trained(case, plan, folder) == pytest.approx(losses, rel=max(close, 1e-10))
        assert largest_difference(plan, folder, tmp_path / "alone", "gradients") < close
        if close == CLOSE:
            assert largest_difference(plan, folder, tmp_path / "alone", "parameters") < 1e-10
