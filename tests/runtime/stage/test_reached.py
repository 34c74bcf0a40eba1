"""Listed modules decide which parameters they use: replicas that divide them must decide alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_plan import truth_of
from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import load
from autopar.errors import TrainingError
from autopar.formats.plan import Plan, Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.start.launch import RunOptions, run
from autopar.runtime.weights import names, read
from dictated import dictate
from paths import MODELS

FILE = MODELS / "deciding.py"


def _planned(
    folder: Path, kind: str, signs: tuple[int, int], level: Shard, *, turns: bool = False, micro_batches: int = 4
) -> tuple[Path, LayerGraph, Plan]:
    file = folder / f"{kind}.py"
    text = FILE.read_text().replace('KIND = "extra"', f'KIND = "{kind}"').replace("SIGNS = (1, 1)", f"SIGNS = {signs}")
    file.write_text(text)
    model = load(str(file))
    graph = capture(model, model.build(0))
    return (
        file,
        graph,
        # Of modules that decide, none is behind the cut, where one might let no gradient through.
        dictate(graph, model, (2, 1), micro_batches, 2, "gpipe", cuts=[3], shard=level, turns=[0] if turns else []),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "kind"),
    [("optimizer", "other"), ("gradients", "other"), ("parameters", "extra"), ("parameters", "layer")],
)
def test_replicas_that_disagree_end_the_run_and_name_a_parameter(
    level: Shard, kind: str, pool: RankPool, tmp_path: Path
) -> None:
    # In a step of several, each replica reaches all parameters in one micro-batch or another.
    file, _, plan = _planned(tmp_path, kind, (1, -1), level, micro_batches=1 if level == "optimizer" else 4)
    said = r"the backward of a micro-batch reaches \d\.(extra|other|always)\.\w+ on some replicas of its stage and not"
    with pytest.raises(TrainingError, match=said):
        run(plan, str(file), RunOptions(steps=1), pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "kind", "turns"),
    [("optimizer", "other", True), ("gradients", "other", False), ("parameters", "layer", False)],
)
def test_replicas_that_agree_train_as_the_plain_loop(
    level: Shard, turns: bool, kind: str, pool: RankPool, tmp_path: Path
) -> None:
    file, graph, plan = _planned(tmp_path, kind, (1, 1), level, turns=turns)
    run(plan, str(file), RunOptions(steps=2, save=tmp_path / "saved"), pool=pool)
    truth = truth_of(file, graph, plan, 2)
    found = read(tmp_path / "saved", names(tmp_path / "saved"))
    assert found.keys() == truth.parameters.keys()
    for name, value in found.items():
        expected = truth.parameters[name]
        assert float((value - expected).abs().max()) <= 1e-10 * float(expected.abs().max()) + 1e-10, name
