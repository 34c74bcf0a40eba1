"""The examples are ordinary PyTorch: they train in a plain loop, and know nothing of autopar."""

import ast
import runpy
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from paths import EXAMPLES


@pytest.mark.parametrize(("name", "samples"), [("gpt", 2), ("mlp", 32), ("resnet", 32)])
def test_a_few_steps_on_one_batch_lower_its_loss(name: str, samples: int) -> None:
    example: dict[str, Any] = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    torch.manual_seed(0)
    model, dataset = example["model"]().double(), example["dataset"]()
    optimizer = example["optimizer"](model.parameters())
    batch = default_collate([dataset[index] for index in range(samples)])
    inputs = batch["tokens"] if isinstance(batch, dict) else batch[0].double()
    losses = []
    for _ in range(8):
        loss = example["loss"](model(inputs), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["gpt", "mlp", "resnet"])
def test_an_example_imports_nothing_of_autopar(name: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((EXAMPLES / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported <= {"itertools", "math", "os", "pathlib", "sklearn", "torch"}


def test_the_gpt_has_twelve_blocks_and_ties_its_head_to_its_embedding() -> None:
    model = runpy.run_path(str(EXAMPLES / "gpt.py"))["model"]()
    assert len(model.blocks) == 12
    assert model.head.weight is model.wte.weight
