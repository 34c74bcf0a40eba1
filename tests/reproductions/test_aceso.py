"""Aceso's operators as layers of a profile, and its own prices of plans of them."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas
from autopar.planner.candidate import Family
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated_run import DictatedRun
from reproductions.aceso import MIB, ROWS, TEAMS, Aceso, AcesoStage, aceso_profile

HEAD = "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,fwd_reserved,bwd_reserved"
NAMES = ("encoder-embedding", "enc-1st-layernorm", "enc-attention-softmax", "enc-attention-dropout", "enc-MLP", "final")
COUNT = 2 * len(NAMES) - 2


def _line(name: str, at: int, rows: int, team: int) -> str:
    """Return an operator of which one of a team does as much less; sizes are in whole megabytes."""
    share = rows * 8 // team
    numbers = 100 * (at + 1) * share, 200 * (at + 1) * share, share, share, 16 // team, share, 100 * at, 200 * at
    return ",".join([name, *map(str, numbers)])


@pytest.fixture
def model(tmp_path: Path) -> Aceso:
    """Give a model of two blocks."""
    for rows in ROWS:
        for team in TEAMS:
            lines = [HEAD, *(_line(name, at, rows, team) for at, name in enumerate(NAMES))]
            (tmp_path / f"gpt_small_mbs{rows}_tp{team}_algo0.csv").write_text("\n".join(lines))
    for ranks in TEAMS[1:]:
        (tmp_path / f"prim_gpt_small_all_reduce_{ranks}gpus.csv").write_text("data_size(MB),time(ms)\n8,2.0\n1,0.5\n")
    for where, rate in (("intra", 4), ("inter", 2)):
        rates = ",".join([str(rate)] * 11)
        (tmp_path / f"p2p_{where}_node.csv").write_text(f"1,2,4,8,16,32,64,128,256,512,1024\n{rates}\n")
    return Aceso.read(tmp_path, "small", 2)


def test_operators_are_layers_whose_parts_have_their_sums_in_their_seconds(model: Aceso) -> None:
    profile = aceso_profile(model)
    assert [layer.modules[0] for layer in profile.layers] == [NAMES[0], *NAMES[1:-1] * 2, NAMES[-1]]
    for at, layer in enumerate(profile.layers):
        assert [split.count for split in layer.splits] == list(TEAMS[1:])
        for team in TEAMS:
            own = layer.on_team(team)
            assert own is not None
            assert own.parameters_bytes == 16 * MIB // team
            for cost in own.costs:
                assert cost.forward_s == pytest.approx(model.chains[cost.micro_batch, team][at].forward_s)
                assert cost.sums == ()


@pytest.mark.parametrize(("per_node", "step_s"), [(8, 5 * 0.052 + 0.0456 + 0.052), (2, 5 * 0.056 + 0.0476 + 0.056)])
def test_a_step_is_the_slowest_stage_once_for_each_micro_batch_and_the_others_once(
    model: Aceso, per_node: int, step_s: float
) -> None:
    """Eight megabytes take 2 ms within a node, and 4 ms between nodes."""
    stages = [AcesoStage(0, 5, frozenset({2, 3}), team=2), AcesoStage(5, COUNT, frozenset(), replicas=2)]
    assert model.step_s(stages, 2, 12, per_node) == pytest.approx(step_s)


@pytest.mark.parametrize(
    ("again", "freed", "longest"),
    [((), 0, 0), ((3,), 0, 0), ((2, 3, 4), 12, 12), ((3, 4, 5, 6), 20, 20), ((1, 2, 3, 4, 5, 6, 7, 8), 40, 28)],
)
def test_a_recomputed_run_keeps_its_first_operators_input_and_its_last_ones_output(
    model: Aceso, again: tuple[int, ...], freed: int, longest: int
) -> None:
    """Runs end with a block: what a block gives is kept."""
    stages = [AcesoStage(0, COUNT - 1, frozenset(again)), AcesoStage(COUNT - 1, COUNT, frozenset())]
    first, last = model.peak_bytes(stages, 1)
    assert first / MIB == 8 * 9 * 16 + 2 * (72 - freed) + longest + 400 + 800
    # The last operator reserves nothing: a copy of its weights counts.
    assert last / MIB == 8 * 16 + 8 + 8 + 16


@pytest.mark.parametrize("team", TEAMS)
def test_autopar_prices_a_stage_of_a_team_as_aceso_does(model: Aceso, team: int) -> None:
    costs = CostModel(aceso_profile(model), model.cluster(8, 8), PlanOptions(batch=12, memory_bytes=2**40))
    again = frozenset({2, 3, 7})
    step_s, _ = DictatedRun(costs, Family(6, 2, "1f1b"), [COUNT], [Replicas(team=team)], again).predicted()
    messages_s = 6 * 2 * 16 // team / 4e3
    stage = AcesoStage(0, COUNT, again, team)
    assert step_s == pytest.approx(model.step_s([stage], 2, 12, per_node=16) - messages_s)
    assert model.step_s([stage], 2, 12, per_node=16) > 2 * messages_s


@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
def test_a_plan_of_1_3b_has_the_published_step_and_memory_of_its_size() -> None:
    """Of four V100, of 32 GB, that Aceso plans to fill up to 28,000 MB."""
    model = Aceso.read(Path(os.environ["AUTOPAR_DATA"]) / "aceso", "1_3B", 24)
    again = frozenset((3, 4, 5, 6, 16, 17, 18, 19))
    ends = (0, 79, 163, 248, 315)
    stages = [AcesoStage(first, stop, again) for first, stop in pairwise(ends)]
    assert model.step_s(stages, 1, 1024, 4) == pytest.approx(101.18, abs=0.01)
    assert 26_000 < max(model.peak_bytes(stages, 1)) / MIB < 28_000
    assert max(model.peak_bytes([each._replace(recompute=frozenset()) for each in stages], 1)) / MIB > 28_000
