"""Whatever fails while weights are saved, the folder has the set before or the new one, whole."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autopar.errors import FileError
from autopar.formats.document import write_text
from autopar.ownership import Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.saving import check_shared, new_set, set_of
from autopar.runtime.messages.transport import Transport
from autopar.runtime.start.workspace import Workspace
from drawn_models import model_case
from failing_calls import Calls, counted, full, killed, meeting
from in_teams import in_teams
from threads import in_ranks

# Forks are warned of where there are threads; these children only write files.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
STAGES, SIZE = 3, 1000
OWN = {"tokenizer.json": "{}", "config.json": "{1}"}


def _save(folder: Path, value: float) -> None:
    """Save as a run of some stages does, each of one tensor of one value."""
    name = new_set()
    with set_of(folder, name):
        files = []
        for stage in range(STAGES):
            path = folder / f"model-{stage + 1:05d}-of-{STAGES:05d}-{name}.safetensors"
            files.append(weights.write(path, {f"w{stage}": torch.full((SIZE,), value)}))
        weights.publish(folder, files)


def _prepared(folder: Path) -> Path:
    folder.mkdir()
    for name, text in OWN.items():
        (folder / name).write_text(text)
    _save(folder, 1.0)
    return folder


def _value(folder: Path) -> float:
    """Return the one value that a folder's set holds."""
    found = weights.read(folder, [f"w{stage}" for stage in range(STAGES)])
    assert len(found) == STAGES
    (value,) = {float(each) for tensor in found.values() for each in tensor}
    return value


def _value_elsewhere(folder: Path) -> float:
    """Return it as other libraries read it, which prefer the single file."""
    index = json.loads((folder / weights.INDEX).read_text())
    single = folder / weights.SINGLE
    files = [single] if single.exists() else [folder / name for name in set(index["weight_map"].values())]
    (value,) = {float(each) for file in files for tensor in load_file(file).values() for each in tensor}
    return value


def _check(folder: Path, values: tuple[float, ...]) -> None:
    assert _value(folder) in values
    assert _value_elsewhere(folder) in values
    assert all((folder / name).read_text() == text for name, text in OWN.items())


def _calls(folder: Path) -> int:
    """Return how many calls a save makes."""
    calls = Calls(None, full)
    with counted(calls):
        _save(folder, 1.0)
    return calls.count


@pytest.mark.reliability(15)
def test_a_write_that_fails_leaves_the_set_before_or_the_new_one(tmp_path: Path) -> None:
    folder = _prepared(tmp_path / "saved")
    count = _calls(folder)
    assert count >= 5 * (STAGES + 1)
    before = {*OWN, weights.INDEX, weights.SINGLE}
    for number in range(count):
        _save(folder, 1.0)
        weights.write(folder / weights.SINGLE, {"w0": torch.full((SIZE,), 1.0)})
        saved = 2.0
        with counted(Calls(number, full)):
            try:
                _save(folder, 2.0)
            except FileError:
                saved = 1.0
        _check(folder, (1.0, 2.0))
        assert _value(folder) == saved
        if saved == 1.0:
            # Nothing half-written is left.
            assert {path.name for path in folder.iterdir()} == before | weights.indexed_file_names(folder)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_the_set_before_or_the_new_one(tmp_path: Path) -> None:
    folder = _prepared(tmp_path / "saved")
    count = _calls(folder)
    seen = set()
    for number in range(count):
        _save(folder, 1.0)
        child = os.fork()
        if child == 0:
            with counted(Calls(number, killed)):
                _save(folder, 2.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 9
        _check(folder, (1.0, 2.0))
        seen.add(_value(folder))
        _save(folder, 3.0)
        # What the one that was killed has left is gone.
        assert {path.name for path in folder.iterdir()} == {*OWN, weights.INDEX} | weights.indexed_file_names(folder)
    assert seen == {1.0, 2.0}


def test_what_killed_processes_have_left_is_swept_unless_another_saves_or_the_set_is_not_known(tmp_path: Path) -> None:
    folder = _prepared(tmp_path / "saved")
    own = {path.name for path in folder.iterdir()}
    others = {"model-00001-of-00002.safetensors", f"model-1-of-2-{new_set()}.safetensors", ".autopar-notes"}
    left = {f"model-00001-of-00002-{new_set()}.safetensors", f".autopar-{new_set()}"}

    def found_within() -> set[str]:
        for name in others | left:
            (folder / name).touch()
        with set_of(folder, new_set()):
            return {path.name for path in folder.iterdir()}

    assert found_within() == own | others
    with set_of(folder, new_set()):
        assert found_within() == own | others | left
    content = (folder / weights.INDEX).read_text()
    (folder / weights.INDEX).write_text(content[:-9])
    assert found_within() == own | others | left
    (folder / weights.INDEX).write_text(content)
    assert found_within() == own | others
    assert _value(folder) == 1.0


def test_readers_and_two_runs_at_once_never_see_parts_of_two_sets(tmp_path: Path) -> None:
    folder = _prepared(tmp_path / "saved")
    children = []
    for value in (2.0, 3.0):
        children.append(os.fork())
        if children[-1] == 0:
            for _ in range(60):
                _save(folder, value)
            os._exit(0)
    seen, running = set(), set(children)
    while running:
        seen.add(_value(folder))
        running -= {child for child in running if os.waitpid(child, os.WNOHANG)[0]}
    assert {2.0, 3.0} & seen
    assert _value(folder) in (2.0, 3.0)


def test_what_is_not_of_the_set_stays_and_a_single_file_does_not_shadow_it(tmp_path: Path) -> None:
    folder = _prepared(tmp_path / "saved")
    weights.write(folder / weights.SINGLE, {f"w{stage}": torch.zeros(SIZE) for stage in range(STAGES)})
    (folder / "model-00001-of-00001.safetensors").write_text("another's")
    _check(folder, (0.0, 1.0))
    assert _value(folder) == 1.0
    _save(folder, 2.0)
    assert _value(folder) == _value_elsewhere(folder) == 2.0
    assert not (folder / weights.SINGLE).exists()
    assert (folder / "model-00001-of-00001.safetensors").read_text() == "another's"
    _check(folder, (2.0,))
    assert len(list(folder.iterdir())) == len(OWN) + 1 + 1 + STAGES


@pytest.mark.parametrize("change", ["a bit", "the length", "gone", "a folder"])
def test_a_file_that_is_not_the_one_of_the_index_is_refused(change: str, tmp_path: Path) -> None:
    folder = _prepared(tmp_path / "saved")
    assert _value(folder) == 1.0
    path = sorted(folder.glob("*.safetensors"))[1]
    content = bytearray(path.read_bytes())
    if change == "a bit":
        content[-5] ^= 1
        path.write_bytes(content)
    elif change == "the length":
        path.write_bytes(content[:-4])
    else:
        path.unlink()
    if change == "a folder":
        path.mkdir()
    with pytest.raises(FileError, match=path.name):
        _value(folder)


def test_no_link_is_followed_and_the_umask_counts(tmp_path: Path) -> None:
    folder = _prepared(tmp_path / "saved")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = os.umask(0o027)
    try:
        for name in (weights.INDEX, weights.SINGLE):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(victim)
        weights.write(folder / weights.SINGLE, {"w": torch.ones(1)})
        write_text(folder / weights.INDEX, "{}")
    finally:
        os.umask(before)
    assert victim.read_text() == "precious"
    for name in (weights.INDEX, weights.SINGLE):
        assert not (folder / name).is_symlink()
        assert (folder / name).stat().st_mode & 0o777 == 0o640


def test_other_libraries_load_the_set(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra autopar[hf]")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=4, vocab_size=5)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    name, names = new_set(), sorted(state)
    files = [
        weights.write(tmp_path / f"model-{part}-{name}.safetensors", {key: state[key] + 1 for key in names[part::2]})
        for part in range(2)
    ]
    weights.publish(tmp_path, files)
    loaded = dict(transformers.GPT2LMHeadModel.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(loaded[key], state[key] + 1) for key in names)


def test_a_folder_of_one_host_alone_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def checked(folders: list[Path]) -> list[str]:
        contexts, said = meeting(len(folders)), [""] * len(folders)

        def check(rank: int, transport: Transport) -> None:
            try:
                check_shared(contexts[rank], folders[rank])
            except FileError as error:
                said[rank] = str(error)

        in_ranks(len(folders), check)
        return said

    shared, own = tmp_path / "shared", tmp_path / "own"
    own.mkdir()
    assert checked([shared] * 3) == [""] * 3
    assert list(shared.iterdir()) == []
    refused = checked([shared, shared, own])
    assert all("rank 2 on " in said and "sees another than rank 0" in said for said in refused)
    assert list(shared.iterdir()) == list(own.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert all("cannot be written on " in said for said in checked([tmp_path / "file"] * 2))


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("widths", "sizes", "shard", "given"),
    [
        ((1, 1), (2, 1), "none", True),
        ((2,), (2,), "optimizer", False),
        ((2,), (2,), "parameters", False),
        ((2, 1), (2, 1), "none", False),
    ],
)
def test_what_teams_cut_is_written_whole(
    widths: Sequence[int], sizes: Sequence[int], shard: Shard, given: bool, pool: RankPool, tmp_path: Path
) -> None:
    case, folder = model_case("narrow_gpt"), tmp_path / "workspace"
    plan = in_teams(case.graph, case.plan(widths, 4, 3, shard=shard), sizes)
    assert all(stage.cuts for stage, size in zip(plan.stages, sizes, strict=True) if size > 1)
    state = {name: each.detach() for name, each in case.model.build(0).named_parameters()}
    if given:
        state = {name: torch.randn_like(each) for name, each in state.items()}
        (tmp_path / "given").mkdir()
        weights.write(tmp_path / "given" / weights.SINGLE, state)
    folder.mkdir()
    Workspace(folder).prepare(case.model, plan, tmp_path / "given" if given else None)
    paths = {"workspace": str(folder), "folder": str(tmp_path)}
    pool.run(
        "rank_jobs:build_and_save", {"plan": plan.dumps(), "model": str(case.file), **paths}, ranks=len(plan.devices)
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == len(plan.stages)
    found = {name: each for path in tmp_path.glob("*.safetensors") for name, each in load_file(path).items()}
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], each) for name, each in state.items())
