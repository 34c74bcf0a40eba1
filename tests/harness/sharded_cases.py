"""Models whose stages are sharded, trained by rank processes and by a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from any_plan import truth_of
from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace
from autopar.schedules.expand import stages_of
from dictated import dictate
from rank_jobs import real

STEPS = 2


class Case(NamedTuple):
    file: Path
    model: UserModel
    graph: LayerGraph
    workspace: Path


def make_case(file: Path, text: str) -> Case:
    file.write_text(text)
    model = load(str(file))
    graph = capture(model, model.build(0))
    workspace = file.with_suffix("")
    workspace.mkdir()
    Workspace(workspace).prepare(model, dictate(graph, model, (1,), 1, 2), None)
    return Case(file, model, graph, workspace)


def trains_as_plain(pool: RankPool, case: Case, plan: Plan, folder: Path) -> None:
    arguments = {
        "plan": plan.dumps(),
        "model": str(case.file),
        "workspace": str(case.workspace),
        "folder": str(folder),
        "steps": STEPS,
    }
    pool.run("rank_jobs:train_and_keep", arguments, ranks=len(plan.devices))
    truth = truth_of(case.file, case.graph, plan, STEPS)
    largest = max(float(gradient.abs().max()) for gradient in truth.gradients.values() if gradient.numel())
    for rank in range(len(plan.devices)):
        gradients = load_file(folder / f"gradients-{rank}")
        for name, gradient in gradients.items():
            off = (gradient - real(truth.gradients[name])).abs()
            assert float(off.max() if off.numel() else 0.0) <= 1e-12 * largest, f"{name} on rank {rank}"
        parameters = load_file(folder / f"parameters-{rank}")
        assert gradients.keys() == parameters.keys() & truth.gradients.keys()
        for name, parameter in parameters.items():
            expected = real(truth.parameters[name])
            torch.testing.assert_close(parameter, expected, rtol=0, atol=bound(expected), msg=f"{name} on rank {rank}")
        if stages_of(plan, rank)[1] == 0:
            for name, buffer in load_file(folder / f"buffers-{rank}").items():
                torch.testing.assert_close(buffer, truth.buffers[name], rtol=1e-10, atol=1e-10)


def bound(expected: torch.Tensor) -> float:
    return 1e-10 * float(expected.abs().max()) + 1e-10 if expected.numel() else 0.0
