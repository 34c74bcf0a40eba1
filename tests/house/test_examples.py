"""Examples: models are ordinary PyTorch, and know nothing of autopar; its rooms are asked in short programs."""

import ast
import re
import runpy
import sys
from functools import partial
from itertools import product

import pytest

import autopar
from autopar.examples.own_costs import profile
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from paths import EXAMPLES
from suite import warm


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


@pytest.mark.parametrize("name", ["own_costs", "own_schedule", "own_stages"])
def test_a_program_that_asks_one_room_fits_a_screen_and_runs(name: str) -> None:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    out = warm.run([sys.executable, str(path)], capture_output=True, text=True, check=True).stdout
    if name == "own_costs":
        found = re.findall(r"plan of own_costs.py: (\d) stages? on 4 devices", out)
        assert found == ["1", "4"], "a slow network is what pipelines are for"
    elif name == "own_stages":
        losses = [float(text) for text in out.removeprefix("losses:").split()]
        assert len(losses) == 5
        assert losses == sorted(losses, reverse=True)
    else:
        seconds = dict(re.findall(r"^(\w+): (\d.\d+) s", out, re.MULTILINE))
        assert out.startswith("stage 0: F0 F1 F2 F3 F4 F5 B0 B1 .")
        assert seconds["1f1b"] < seconds["4F4B"] < seconds["2F2B"] < seconds["gpipe"] < seconds["1F1B"]


def test_an_order_of_your_own_carries_out_plans_of_any_numbers() -> None:
    kfkb = runpy.run_path(str(EXAMPLES / "own_schedule.py"))["kfkb"]
    machines = autopar.Cluster.of("4xA100")
    for stages, micro_batches in product(("0-4:1", "0-1:2,2-4:1", "0:1,1:1,2:1,3-4:1"), (1, 4, 16)):
        plan = autopar.plan(profile(), machines, schedule="gpipe", stages=stages, micro_batches=micro_batches)
        for k in (1, 2, 3, 5, 20):
            check(expand(plan, partial(kfkb, k=k)), plan)
