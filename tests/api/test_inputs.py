"""Inputs: what a plan's file says it was made of is found from anywhere, unless something has changed or is missing."""

from pathlib import Path

import pytest

import autopar
from autopar.api import inputs
from autopar.api.inputs import cluster_file, data_of, model_of, open_plan, program_of, read_inputs, resolve_machines
from autopar.cache import Cache, Entry
from autopar.code import code_of_file
from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.program import BACKWARD, REDUCE, Program, RankProgram
from autopar.formats.references import reference
from autopar.hardware.clusters import cluster_named
from autopar.planner import PlanOptions
from autopar.planner.assemble import assemble
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import CostModel
from autopar.schedules.check import ProgramError, read_program
from autopar.schedules.expand import expand
from played import small_plan
from random_problems import gpt_profile, local_cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile and a cluster, and a plan of theirs one folder deeper, below the working folder."""
    folder, plan = tmp_path / "made", tmp_path / "made" / "plans" / "plan.json"
    plan.parent.mkdir(parents=True)
    profile, cluster = gpt_profile(blocks=4), local_cluster(2)
    profile.save(folder / "profile.json")
    cluster.save(folder / "cluster.json")
    files = {kind: folder / f"{kind}.json" for kind in ("profile", "cluster")}
    records = {kind: reference(path, path.read_text(), plan) for kind, path in files.items()}
    planned = autopar.plan(profile, cluster, gpus=2)
    model = planned.model.model_copy(update={"source": "../model.py"})
    planned.model_copy(update={**records, "model": model}).save(plan)
    monkeypatch.chdir(tmp_path)
    return Path("made")


def test_inputs_are_those_named_or_recorded_or_beside_the_profile(folder: Path, tmp_path: Path) -> None:
    path = folder / "plans" / "plan.json"
    found = read_inputs(path)
    assert found == (Plan.load(path), Profile.load(folder / "profile.json"), Cluster.load(folder / "cluster.json"))
    assert autopar.simulate(path).end_s == found[0].predicted.step_s
    (folder / "cluster.json").write_text((folder / "cluster.json").read_text() + "\n")
    with pytest.raises(FileError, match=r"\$\.cluster\.sha256: .*cluster\.json has changed since the plan was made"):
        read_inputs(path)
    assert read_inputs(path, cluster="4xH100")[2] == cluster_named("4xH100")
    (folder / "profile.json").rename(folder / "other.json")
    with pytest.raises(FileError, match=r"\$\.profile\.path: no such file: .*; or pass `profile`"):
        read_inputs(path, cluster="4xH100")
    assert read_inputs(path, folder / "other.json", "4xH100")[1] == found[1]
    profile = gpt_profile(blocks=4)
    beside = cluster_file(None, folder / "profile.json")
    assert beside == folder / "cluster.json"
    five = PlanOptions(gpus=5)
    assert resolve_machines(profile, str(beside), five) == (profile, local_cluster(2))
    assert cluster_file("2xH100", folder / "profile.json") is None
    assert resolve_machines(profile, "2xH100", five) == (profile, cluster_named("2xH100"))
    _, estimated = resolve_machines(profile, None, five)
    assert len(estimated.devices) == 5
    assert {device.memory_bytes for device in estimated.devices} == {profile.device.memory_bytes}
    with pytest.raises(UsageError, match="name a file or a cluster"):
        cluster_file("", folder / "profile.json")
    made = small_plan((1, 1), 2)
    later = made.stages[1].model_copy(update={"devices": (4,)})
    alone = made.model_copy(update={"stages": (made.stages[0], later), "cluster": None})
    assert len(inputs._cluster(alone, path, profile).devices) == 5


def test_a_model_file_elsewhere_is_opened_if_this_user_has_captured_it_as_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, path = tmp_path / "zoo" / "model.py", folder / "plans" / "plan.json"
    elsewhere.parent.mkdir()
    elsewhere.write_text("import helper\n")
    (elsewhere.parent / "helper.py").write_text("")
    loaded, source = Plan.load(path), "../../../zoo/model.py"
    plan = loaded.model_copy(update={"model": loaded.model.model_copy(update={"source": source})})
    (tmp_path / "work" / "made" / "plans").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    code = code_of_file(elsewhere)

    for imports in ({}, code.imports):
        with pytest.raises(FileError, match="leads out of"):
            model_of(plan, path)
        entry = Entry(str(len(imports)), "zoo/model.py", code.sha256, imports, 0.0, 1)
        assert Cache(tmp_path / "cache").keep(entry, Path.mkdir)
    assert Path(model_of(plan, path)).samefile(elsewhere)
    (elsewhere.parent / "helper.py").write_text("changed = True\n")
    with pytest.raises(FileError, match="leads out of"):
        model_of(plan, path)


def test_model_and_data_are_found_from_the_plan_s_folder(folder: Path) -> None:
    path = folder / "plans" / "plan.json"
    plan = Plan.load(path)
    with pytest.raises(FileError, match=r"\$\.model\.source: no such file: .*model\.py"):
        model_of(plan, path)
    assert [open_plan(each, 5)[0].seed for each in (plan, path)] == [5, 5]
    (folder / "model.py").touch()
    assert Path(model_of(plan, path)).samefile(folder / "model.py")
    assert data_of(plan, path) is None
    (folder / "tokens").mkdir()
    update = {"source": "hf:../tokens", "data": "../model.py"}
    plan = plan.model_copy(update={"model": plan.model.model_copy(update=update)})
    kind, _, model = model_of(plan, path).partition(":")
    assert kind == "hf"
    assert Path(model).samefile(folder / "tokens")
    assert (data_of(plan, path) or Path()).samefile(folder / "model.py")
    source = plan.model.model_copy(update={"source": "graph.txt"})
    with pytest.raises(FileError, match=r"expected a \.py file, hf: and a configuration, .* found 'graph\.txt'"):
        model_of(plan.model_copy(update={"model": source}), path)


def test_programs_whose_reductions_stand_elsewhere_are_run_but_not_simulated(tmp_path: Path) -> None:
    costs = CostModel(gpt_profile(blocks=2), local_cluster(2), PlanOptions(gpus=2))
    # Both are on the same two replicas.
    stages = (CandidateStage(0, 2, (0, 1), (2, 2), 4), CandidateStage(2, 4, (0, 1), (2, 2), 4))
    plan = assemble(costs, Candidate(4, 4, "interleaved", stages), PlanOptions(), 0.0, (), ())
    path, ranks = tmp_path / "program.json", []
    for actions in expand(plan).ranks:
        moved = list(actions)
        at = next(at for at, action in enumerate(moved) if action.kind == REDUCE and action.stage == 1)
        behind = max(at for at, action in enumerate(moved) if action.kind == BACKWARD and action.stage == 1)
        assert any(action.kind == BACKWARD for action in moved[behind + 1 : at])
        moved.insert(behind + 1, moved.pop(at))
        ranks.append(RankProgram.of(moved))
    path.write_text(Program(tuple(ranks)).dumps())
    assert read_program(path, plan) != expand(plan)
    with pytest.raises(ProgramError, match=r"rank 0: reductions stand elsewhere than in the plan's own program"):
        program_of(path, plan)
    path.write_text(expand(plan).dumps())
    assert program_of(path, plan) == expand(plan)
