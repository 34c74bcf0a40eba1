"""The samples of a rank's share of every mini-batch."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import FileError, ModelError, TrainingError, UsageError
from autopar.options.train import RunOptions
from autopar.ranks.pool import RankPool
from autopar.runtime.data import Excerpt, ShareLoader, check_given, same_samples, sample_order
from autopar.runtime.stage.stage import Stage
from autopar.runtime.start.launch import run
from drawn_models import model_case
from training_cases import make_case

CPU = torch.device("cpu")


@pytest.mark.reliability(25)
def test_shares_of_a_mini_batch_are_its_rows_in_order_and_epochs_reshuffle() -> None:
    case = model_case("dropout")
    model, graph, plan = case.model, case.graph, case.plan([3, 1], 2, 7, seed=5)
    inputs, targets = (graph.tensor(name) for name in ("batch.0", "batch.1"))
    loaders = [ShareLoader(model, plan, rank, [inputs], CPU) for rank in range(3)]
    whole = ShareLoader(model, plan, 3, [inputs, targets], CPU)
    data = model.dataset()
    # 100 samples make 7 mini-batches of 14; the last 2 are dropped.
    for step, epoch, first in ((0, 0, 0), (6, 0, 84), (7, 1, 0), (15, 2, 14)):
        order = sample_order(100, 5, epoch)
        expected = torch.stack([data[int(index)][0] for index in order[first : first + 14]])
        parts = [loader.load(step) for loader in loaders]
        rows = [torch.cat([part[m]["batch.0"] for part in parts]) for m in range(2)]
        assert torch.equal(torch.cat(rows), expected)
        assert torch.equal(torch.cat([m["batch.0"] for m in whole.load(step)]), expected)
    assert not torch.equal(sample_order(100, 5, 0), sample_order(100, 5, 1))
    assert ShareLoader(model, plan, 3, (), CPU).load(3) == [{}, {}]


@pytest.mark.reliability(35, 36)
def test_a_batch_is_divided_whole_and_filled_up_where_it_is_incomplete(tmp_path: Path) -> None:
    case = model_case("dropout")
    data, inputs = case.model.dataset(), case.graph.tensor("batch.0")
    for rows, steps in ((7, 8), (60, 1)):
        # 100 samples make 8 mini-batches of 14, 12 samples twice; or one of 120, 20 samples twice.
        loader = ShareLoader(case.model, case.plan([1], 2, rows, seed=5), 0, [inputs], CPU, "pad")
        for epoch in (0, 1):
            taken = (sample_order(100, 5, epoch).tolist() * 2)[: steps * 2 * rows]
            loaded = [loader.load(epoch * steps + step) for step in range(steps)]
            found = torch.cat([part["batch.0"] for parts in loaded for part in parts])
            assert torch.equal(found, torch.stack([data[index][0] for index in taken]))
    said = r"dropout.py: the dataset has 100 samples, a mini-batch takes 102; plan with .* or pass `last='pad'`"
    with pytest.raises(FileError, match=said):
        ShareLoader(case.model, case.plan([1], 2, 51), 0, [inputs], CPU)
    centring = COLLATE.replace(" + torch.rand(len(samples), 1)", "")
    case = make_case(tmp_path / "model.py", f"{DRAWN}{centring}whole_batches = True\n")
    plan, specs = case.plan([3, 1], 2, 5, seed=5), [case.graph.tensor("batch.0")]
    parts = [ShareLoader(case.model, plan, rank, specs, CPU).load(3) for rank in range(3)]
    (whole,) = ShareLoader(case.model, case.plan([1], 1, 10, seed=5), 0, specs, CPU).load(3)
    assert torch.equal(torch.cat([part[m]["batch.0"] for m in range(2) for part in parts]), whole["batch.0"])
    assert whole["batch.0"].mean(0).abs().max() < 1e-6


BAD_DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "longer samples": (
        lambda: torch.utils.data.TensorDataset(torch.randn(9, 7, dtype=torch.float64), torch.zeros(9).long()),
        r"batch.0 is torch.float64 of shape \(7,\) per sample, .* of shape \(5,\)",
    ),
    "no tensors": (lambda: {}.fromkeys(range(8)), r".*dropout.py: collate raised TypeError"),
    "not all samples": (
        lambda: {}.fromkeys(range(8, 16)), r".*dropout.py: dataset\(\)\[(\d)\] raised KeyError: \1$"
    ),
}  # fmt: skip


@pytest.mark.reliability(37)
@pytest.mark.parametrize("wrong", BAD_DATA)
def test_samples_that_are_not_as_the_models_are_refused_by_name(wrong: str) -> None:
    case, (dataset, said) = model_case("dropout"), BAD_DATA[wrong]
    other = replace(case.model, functions={**case.model.functions, "dataset": dataset})
    loader = ShareLoader(other, case.plan([1, 1], 2, 3), 0, [case.graph.tensor("batch.0")], CPU)
    with pytest.raises(TrainingError, match=rf"rank 0 \(stage 0, step 0, micro-batch 0\): {said}"):
        loader.load(0)


@pytest.mark.reliability(37)
def test_outputs_or_samples_not_as_planned_are_refused_by_name() -> None:
    graph, plan = model_case("dropout").graph, model_case("dropout").plan([1, 1], 2, 3)
    layers = [graph.layer(name) for name in plan.stages[0].layers]
    stage = Stage(layers, [spec for spec in graph.tensors if spec.producer is not None], graph.inputs, graph.outputs)
    (sent,) = stage.sent_specs
    with pytest.raises(TrainingError, match=rf"tensor {sent.name} has shape \(3, 9\), the plan sends \(3, 8\)"):
        stage.sendable(3, {sent.name: torch.zeros(3, 9)})
    with pytest.raises(UsageError, match="a batch of 3 samples, the plan is for 4"):
        check_given(0, {}, 3, [], 4)
    with pytest.raises(UsageError, match="a batch without samples"):
        check_given(0, {}, 0, [], None)
    check_given(0, {}, None, [], 4)


DRAWN = """
import random, numpy as np, torch
class Drawn(torch.utils.data.Dataset):
    def __init__(self): self.scale = np.random.rand()
    def __len__(self): return 30
    def __getitem__(self, index):
        x = torch.rand(4) + random.random() + np.random.rand() * self.scale
        return x, x.sum(0, keepdim=True)
def model(): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
def dataset(): return Drawn()
def loss(output, batch): return (output - batch[1]).square().mean()
"""
COLLATE = """
def collate(samples):
    x = torch.stack([x for x, _ in samples])
    x = x - x.mean(0) + torch.rand(len(samples), 1)
    return x, x.sum(1, keepdim=True)
"""


@pytest.mark.parametrize("text", [DRAWN, DRAWN + COLLATE], ids=["samples", "collate"])
def test_what_is_drawn_for_a_sample_is_the_same_on_all_ranks(text: str, tmp_path: Path) -> None:
    case = make_case(tmp_path / "drawn.py", text)
    plan, names = case.plan([1, 2], 2, 5, shares=[[5], [2, 3]]), ["batch.0", "batch.1", "batch.1"]
    loaders = [ShareLoader(case.model, plan, rank, [case.graph.tensor(name)], CPU) for rank, name in enumerate(names)]
    seen = []
    # The last of four steps begins the second epoch.
    for step in range(4):
        parts = [loader.load(step) for loader in loaders]
        for m in range(2):
            inputs = parts[0][m]["batch.0"]
            targets = torch.cat([part[m]["batch.1"] for part in parts[1:]])
            assert torch.equal(inputs.sum(1, keepdim=True), targets)
            seen.append(inputs)
    assert not any(torch.equal(a, b) for a, b in combinations(seen, 2))
    # A sample is drawn anew in every epoch.
    assert len(torch.cat(seen).unique(dim=0)) == 40


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.reliability(59)
def test_whether_ranks_have_read_the_same_samples_is_seen_but_for_rounding(seed: int) -> None:
    rng = random.Random(seed)
    names, samples = [f"batch.{at}" for at in range(rng.randint(1, 3))], rng.randint(1, 300)
    truth = {name: [rng.choice((rng.gauss(0, 1), 0.0, float("nan"), 7.0)) for _ in range(64)] for name in names}
    truth[names[-1]][5] = 0.5
    rounded = {name: [each * (1 + rng.uniform(-1e-6, 1e-6)) for each in values] for name, values in truth.items()}
    # Some read nothing, or could not read what their first step will say is wrong.
    found: list[tuple[int, Excerpt]] = [(0, {}), (samples, truth), (samples, {}), (0, {}), (samples, rounded)]
    rng.shuffle(found)
    assert same_samples(found, "model.py") == samples
    assert same_samples([(0, {})] * 3, "model.py") == 0
    other = {**truth, names[-1]: [*truth[names[-1]][:5], 3.5, *truth[names[-1]][6:]]}
    shorter = {**truth, names[-1]: truth[names[-1]][:-1]}
    for wrong, said in (
        ((samples + 1, truth), rf"dataset\(\) has {samples} samples on rank \d, and {samples + 1} on rank 0; all"),
        ((samples, other), rf"gives another {names[-1]} on rank \d than on rank 0; all ranks"),
        ((samples, shorter), rf"gives another {names[-1]} on rank \d"),
    ):
        with pytest.raises(ModelError, match=said):
            same_samples([wrong, *found], "model.py")


UNLIKE = """
import os, torch
class Listed(torch.utils.data.Dataset):
    def __len__(self): return 40 + (os.getpid() % 97 if {grows} else 0)
    def __getitem__(self, index):
        # What another order gives, in every process its own.
        x = torch.full((4,), float(index + (0 if {grows} else os.getpid() % 97)))
        return x, x.sum(0, keepdim=True)
def model(): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
def dataset(): return Listed()
def loss(output, batch): return (output - batch[1]).square().mean()
"""


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.reliability(59)
def test_data_that_differ_between_ranks_are_refused_before_the_first_step(
    grows: bool, loaders: int, tmp_path: Path, living_pool: Callable[[], RankPool]
) -> None:
    case = make_case(tmp_path / f"listed_{grows}.py", UNLIKE.format(grows=grows))
    plan, said = (
        case.plan([1, 1], 2, 5),
        r"has \d+ samples on rank 1, and \d+ on rank 0" if grows else r"gives another batch\.[01] on rank 1",
    )
    if loaders:
        # Of one host, all are read by the same processes.
        outcome = run(plan, str(case.file), RunOptions(1, loaders=1), pool=living_pool())
        assert outcome.report.steps == 1
        return
    with pytest.raises(FileError, match=said):
        run(plan, str(case.file), RunOptions(1, loaders=0), pool=living_pool())
