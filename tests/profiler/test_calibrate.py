"""Constants fitted to runs: recovered where runs tell, kept where they do not; and how runs are read."""

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import FileError
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import find
from autopar.options.plan import PlanOptions
from autopar.ownership import SHARDS, Replicas
from autopar.planner.candidate import Family, place, with_depths
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated_run import DictatedRun
from autopar.planner.simulator.simulate import Simulator
from autopar.profiler import calibrate as calibrating
from autopar.profiler.calibrate import MeasuredRun, Observation, calibrate, predict, read_runs
from autopar.profiler.estimate import TeamShape, Workload, profile_of, workload
from autopar.profiler.kernels import Constants, default_constants
from autopar.profiler.subject import Subject
from subjects import gpt_subject, written_runs

A100 = find("A100")
SIZES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Setting:
    """A model with its work, and the costs of eight devices."""

    subject: Subject
    load: Workload
    costs: CostModel

    def observed(self, stages: int, width: int, rows: int, recompute: Collection[int] = ()) -> Observation:
        """A run of 4 micro-batches; its time is yet to be given."""
        count = self.costs.layer_count
        cuts = tuple(count * (stage + 1) // stages for stage in range(stages))
        run = DictatedRun(self.costs, Family(4, rows * width, "1f1b"), cuts, [Replicas(width)] * stages, recompute)
        return Observation(self.load, run.step_s, 1.0)


@pytest.fixture(scope="module")
def setting() -> Setting:
    subject = gpt_subject(4)
    work = workload(subject, A100, 256, sizes=SIZES)
    profile = profile_of(subject, work, 256, default_constants(A100))
    return Setting(subject, work, CostModel(profile, cluster_named("8xA100"), PlanOptions()))


@pytest.fixture(scope="module")
def team_setting() -> Setting:
    subject = gpt_subject(4)
    work = workload(subject, A100, 8, sizes=(4, 8), tensor=4)
    profile = profile_of(subject, work, 8, default_constants(A100))
    return Setting(subject, work, CostModel(profile, cluster_named("8xA100"), PlanOptions()))


def _measured(observations: list[Observation], truth: Constants, noise: float = 0.0) -> list[Observation]:
    """Give runs the times that constants predict, with noise."""
    draw = random.Random(5)
    steps = predict(observations, truth)
    return [replace(o, step_s=s * (1 + noise * draw.uniform(-1, 1))) for o, s in zip(observations, steps, strict=True)]


def _runs(setting: Setting) -> list[Observation]:
    shapes = ((1, 1), (1, 4), (2, 1), (2, 4), (4, 2))
    every = range(setting.costs.layer_count)
    return [setting.observed(*shape, rows, every if rows == 16 else ()) for shape in shapes for rows in SIZES]


TRUTH = Constants(forward_launch_s=30e-6, backward_launch_s=14e-6, matmul_share=0.6, memory_share=0.6, step_s=2e-3)


@pytest.mark.slow
def test_runs_that_follow_constants_are_predicted_after_a_fit_to_some_of_them(setting: Setting) -> None:
    runs = _measured(_runs(setting), TRUTH, noise=0.02)
    chosen = random.Random(0).sample(runs, 12)
    rest = [run for run in runs if run not in chosen]
    calibration = calibrate(chosen, default_constants(A100))
    errors = [abs(p / run.step_s - 1) for p, run in zip(predict(rest, calibration.constants), rest, strict=True)]
    assert max(errors) < 0.08
    assert calibration.error_after < 0.02 < 0.2 < calibration.error_before
    assert calibration.error_left_out is not None
    assert calibration.error_left_out < 0.05
    assert calibration.constants.forward_launch_s == pytest.approx(30e-6, rel=0.15)


def test_what_runs_do_not_tell_about_stays_where_it_was(setting: Setting) -> None:
    # Launches are all that a micro-batch of one sample takes.
    runs = _measured([setting.observed(1, 1, 1)], TRUTH)
    start = default_constants(A100)
    found = calibrate(runs, start).constants
    assert found.matmul_share == pytest.approx(start.matmul_share, rel=1e-3)
    assert found.memory_share == pytest.approx(start.memory_share, rel=1e-3)
    assert found.forward_launch_s > start.forward_launch_s


def test_one_bad_run_does_not_spoil_the_others(setting: Setting) -> None:
    runs = _measured(_runs(setting), TRUTH)[::2]
    spoiled = [replace(runs[3], step_s=8 * runs[3].step_s), *runs[:3], *runs[4:]]
    found = calibrate(spoiled, default_constants(A100), leave_out=False).constants
    errors = [abs(p / run.step_s - 1) for p, run in zip(predict(runs, found), runs, strict=True)]
    assert np.median(errors) < 0.05


def test_errors_are_those_of_the_start_of_the_fit_and_of_fits_without_each_run(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a fit finds the truth where it is given all runs, and nothing where it is not."""
    runs, start = _measured(_runs(setting)[:5], TRUTH), default_constants(A100)
    monkeypatch.setattr(calibrating, "_fit", lambda given, start: TRUTH if len(given) == len(runs) else start)
    found = calibrate(runs, start)
    errors = [abs(p / run.step_s - 1) for p, run in zip(predict(runs, start), runs, strict=True)]
    assert found.error_before == found.error_left_out == pytest.approx(np.median(errors))
    assert (found.constants, found.error_after) == (TRUTH, pytest.approx(0.0))
    runs = runs[:2]
    alone = calibrate(runs, start)
    assert (alone.error_left_out, "too few to leave one out" in alone.notes()[0]) == (None, True)


def test_recomputed_layers_run_their_forward_again(setting: Setting) -> None:
    every = range(setting.costs.layer_count)
    plain, again = setting.observed(1, 1, 64), setting.observed(1, 1, 64, every)
    without_s, with_s = predict([plain, again], TRUTH)
    profile = profile_of(setting.subject, setting.load, 256, TRUTH)
    costs = [one for layer in profile.layers for one in layer.costs if one.micro_batch == 64]
    launches, kernels = (
        np.sum([[getattr(one, f"{each}{queue}") for each in ("forward", "backward")] for one in costs], axis=0)
        for queue in ("_launch_s", "_s")
    )
    once_s, twice_s = (max(launches @ way, kernels @ way) for way in ((1, 1), (2, 1)))
    assert with_s - without_s == pytest.approx(4 * (twice_s - once_s))


def test_some_layers_run_again_take_their_part_of_all_and_what_replicas_divide_counts(setting: Setting) -> None:
    count = setting.costs.layer_count
    plain, full = setting.observed(1, 1, 256), setting.observed(1, 1, 256, range(count))
    parts = [setting.observed(1, 1, 256, range(first, count, 2)) for first in (0, 1)]
    none_s, all_s, *some_s = predict([plain, full, *parts], TRUTH)
    assert sum(some_s) - 2 * none_s == pytest.approx(all_s - none_s)
    assert min(some_s) > none_s
    cuts, family = (count,), Family(4, 16 * 8, "1f1b")
    ways = {shard: DictatedRun(setting.costs, family, cuts, [Replicas(8, shard=shard)]).predicted() for shard in SHARDS}
    peaks = [peak for _, (peak,) in ways.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert len({step_s for step_s, _ in ways.values()}) == len(SHARDS)


@pytest.mark.parametrize(
    ("sizes", "sliced", "recompute"),
    [((2, 1), False, ()), ((1, 2), True, (2, 0)), ((2, 2), True, (0, 1, 2, 3, 4, 5)), ((4, 2), False, (5,))],
)
def test_runs_of_teams_take_what_plans_with_a_profile_of_the_same_constants_take(
    team_setting: Setting, sizes: tuple[int, int], sliced: bool, recompute: tuple[int, ...]
) -> None:
    costs, load = team_setting.costs, team_setting.load
    ends, family = zip((0, 3), (3, 6), sizes, strict=True), Family(3, 8, "1f1b")
    teams = tuple(TeamShape(size, sliced) for first, stop, size in ends for _ in range(first, stop))
    own = [Replicas(width, team=size, sliced=sliced and size > 1) for width, size in zip((1, 2), sizes, strict=True)]
    run = DictatedRun(costs, family, (3, 6), own, recompute)
    found = predict([Observation(load, run.step_s, 1.0, teams)], TRUTH)
    truth = CostModel(profile_of(team_setting.subject, load, 8, TRUTH), costs.cluster, PlanOptions())
    stages = (
        each._replace(recompute=tuple(sorted(set(recompute) & set(range(each.first, each.stop)))))
        for each in place(family, (3, 6), own)
    )
    alone = Simulator(truth, replace(truth.sharing, links={}, slowdowns={}))
    # Of the embedding that both stages share, stage 1 is taken to update what stage 0 does.
    assert found == [pytest.approx(alone.step_s(with_depths(family, list(stages), (2, 1))), rel=2e-4)]


def test_runs_are_read_with_the_columns_defaults_for_empty_cells(tmp_path: Path) -> None:
    path = written_runs(
        tmp_path,
        "\ufeffbatch, step_s ,devices,stages,micro_batches,schedule,recompute,model,cluster",
        "32,0.25,8,4,8,ScheduleGPipe,full,big.py,1x8xA100",
        "16,1e-2,,,,,,,",
    )
    first, second = read_runs(path)
    said = {"model": "big.py", "devices": 8, "stages": "4", "micro_batches": 8, "cluster": "1x8xA100"}
    expected = MeasuredRun(at=f"{path}: row 2", step_s=0.25, batch=32, schedule="gpipe", recompute="full", **said)  # type: ignore[arg-type]
    assert first == expected
    assert second == MeasuredRun(at=f"{path}: row 3", step_s=0.01, batch=16)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("batch", "8"), "row 2, column step_s: Field required"),
        (("batch,step_s",), "holds no run"),
        (("batch,step_s,micro_batch", "8,1,1"), "row 1: no column is called 'micro_batch'; did you mean micro_batches"),
        (("batch,step_s,batch", "8,1,1"), "row 1: column batch is given twice"),
        (("batch,step_s", "8,1", "8,fast"), "row 3, column step_s: .* valid number, .* found .fast"),
        (("batch,step_s", "8,nan"), "row 2, column step_s: .* finite number, found .nan"),
        (("batch,step_s", "8,0"), "row 2, column step_s: .* greater than or equal to 0.000001, found .0"),
        (("batch,step_s", "8,1", "8,3e7"), "row 3, column step_s: .* less than or equal to 86400, found .3e7"),
        (("batch,step_s", "0,1"), "row 2, column batch: .* greater than or equal to 1, found .0"),
        (("batch,step_s", "8,"), "row 2, column step_s: Field required"),
        (("batch,step_s,recompute", "8,1,some"), "row 2, column recompute: .* match pattern .*, found .some"),
        (("batch,step_s,shard", "8,1,all"), "row 2, column shard: .* 'gradients' or 'parameters', found .all"),
        (("batch,step_s,schedule", "8,1,magic"), "row 2, column schedule: .* 'gpipe' or '1f1b', found .magic"),
        (("batch,step_s,micro_batches", "8,1,3"), "row 2, column micro_batches: 3 does not divide the batch 8"),
        (("batch,step_s,stages,tensor", '8,1,"0-5:1x2",2'), "row 2, column tensor: .* write 0-5:2x2 in column stages"),
        (("batch,step_s", "8,1,9"), "row 2: has more cells than the header has columns"),
    ],
)
def test_a_broken_runs_file_is_refused_by_row_and_column(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(FileError, match=message.replace("'", ".")):
        read_runs(written_runs(tmp_path, *lines))
    with pytest.raises(FileError, match=r"none\.csv: no such file; docs/howto/other_gpus\.md"):
        read_runs(tmp_path / "none.csv")
