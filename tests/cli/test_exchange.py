"""``autopar export`` and ``autopar import``: files, exit codes, one line of error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.formats.profile import Profile
from equal_plans import equal_plan, llama_profile
from random_problems import local_cluster

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_with_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder with a plan of two stages; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    profile = llama_profile()
    plan, cluster = equal_plan(profile, "1f1b", 2)
    plan.save("plan.json")
    profile.save("measured.json")
    cluster.save("machines.json")
    return command


INPUTS = ("--profile", "measured.json", "--cluster", "machines.json")


def test_files_are_written_beside_each_other_and_not_over_others(run_with_plan: Run) -> None:
    Path("out").mkdir()
    code, _, err = run_with_plan("export", "torch", *INPUTS, "-o", "out/order.csv")
    assert (code, "Written: out/order.csv, out/stages.py" in err) == (0, True)
    assert 'FOLDER / "order.csv"' in Path("out/stages.py").read_text()
    code, _, err = run_with_plan("export", "torch", *INPUTS, "-o", "out/other.csv")
    assert (code, "out/stages.py exists; pass --overwrite" in err) == (2, True)
    assert not Path("out/other.csv").exists()
    assert run_with_plan("export", "torch", *INPUTS, "-o", "out/other.csv", "--overwrite")[0] == 0


def test_an_unknown_format_and_a_plan_without_its_profile_are_one_line(run_with_plan: Run) -> None:
    code, _, err = run_with_plan("export", "word", *INPUTS)
    assert (code, "FORMAT must be one of torch" in err, err.count("\n")) == (2, True, 1)
    code, _, err = run_with_plan("export", "torch")
    assert (code, "the plan records no profile" in err, err.count("\n")) == (4, True, 1)
    code, _, err = run_with_plan("export", "torch", *INPUTS, "-o", "nowhere/a.csv")
    assert (code, "no such folder" in err) == (4, True)


LINE = "forward_compute_time=1, backward_compute_time=2, activation_size=64, parameter_size=8"
TEXT = f"node1 -- Linear -- {LINE}\nnode2 -- Linear -- {LINE}\n\tnode1 -- node2\n"
PIPER = {
    "maxDevices": 2,
    "maxMemoryPerDevice": 1000,
    "bandwidth": 1e9,
    "mbsInBatch": 4,
    "nodes": [
        {
            "id": 0,
            "TMPCs": {
                "1": [
                    {
                        "id": "vanilla",
                        "timePerSample": 0.5,
                        "parameterSize": 8,
                        "memoryUsageA": 4,
                        "memoryUsageB": 16,
                        "syncTimeFw": {},
                        "syncTimeBw": {},
                    }
                ]
            },
        }
    ],
    "edges": [],
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a text graph and a file of Piper's; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    Path("theirs/graph.txt").write_text(TEXT)
    Path("theirs/bert.json").write_text(json.dumps(PIPER))
    return command


def test_a_text_graph_becomes_a_profile_that_can_be_planned_for(run: Run) -> None:
    code, out, err = run("import", "pipedream", "theirs/graph.txt", "--profiled-batch", "4", "--json")
    assert code == 0
    profile = Profile.load("profile.json")
    assert out == profile.dumps() == Path("profile.json").read_text()
    assert (profile.batch, profile.model.source) == (4, "theirs/graph.txt")
    assert "Note: " in err
    assert "Written: profile.json, 2 layers of 0.006 s" in err
    code, _, err = run("plan", "--gpus", "2")
    assert code == 0
    assert "it can be looked at, but not run" in " ".join(err.split())


def test_pipers_file_becomes_a_profile_with_options(run: Run) -> None:
    assert run("import", "piper", "theirs/bert.json", "-o", "bert.json")[0] == 0
    profile = Profile.load("bert.json")
    assert [len(layer.options) for layer in profile.layers] == [1]
    assert run("show", "bert.json")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("onnx", "theirs/graph.txt"),
            2,
            "FORMAT must be one of pipedream, piper, profiles, layout, torchtitan; found 'onnx'",
        ),
        (("piper", "theirs/bert.json", "--profiled-batch", "4"), 2, "--profiled-batch is for pipedream"),
        (("pipedream", "theirs/graph.txt", "--profiled-batch", "0"), 2, "--profiled-batch must lie in 1.."),
        (("pipedream", "theirs/graph.txt", "-o", "theirs/graph.txt", "--overwrite"), 2, "is read by this command"),
        (("pipedream", "theirs/graph.txt", "-o", "theirs/bert.json"), 2, "theirs/bert.json exists; pass --overwrite"),
        (("pipedream", "theirs/graph.txt", "--replicas", "2"), 2, "--replicas is of layout; pipedream has none"),
        (("layout", "EttL", "--profile", "theirs/bert.json"), 4, "theirs/bert.json: $."),
        (("pipedream", "nowhere.txt"), 4, "nowhere.txt: no such"),
        (("pipedream", "theirs"), 4, "cannot read theirs"),
        (("pipedream", "theirs/bert.json"), 4, "theirs/bert.json:1: expected a node"),
        (("piper", "theirs/graph.txt"), 4, "theirs/graph.txt:1:1: not JSON"),
    ],
)
def test_bad_input_gets_one_line_and_its_exit_code_and_writes_nothing(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = run("import", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("profile.json").exists()
    assert Path("theirs/graph.txt").read_text() == TEXT


def test_an_output_is_replaced_where_that_is_asked_for(run: Run) -> None:
    Path("old.json").write_text("{}")
    assert run("import", "pipedream", "theirs/graph.txt", "-o", "old.json", "--overwrite")[0] == 0
    assert len(Profile.load("old.json").layers) == 2


def test_a_layout_becomes_stages_that_plan_and_compare_take(run: Run) -> None:
    llama_profile(4).save("profile.json")
    code, out, err = run("import", "layout", "Et|ttt|L", "--replicas", "2")
    assert (code, out) == (0, "0-1:2,2-4:2,5:2\n")
    assert "`autopar plan --stages 0-1:2,2-4:2,5:2 --schedule 1f1b`" in err.replace("\n", " ")
    code, out, _ = run("import", "layout", "Et|t|t|tL", "--pipeline-size", "2", "--json")
    assert (code, json.loads(out)) == (0, {"stages": "0-1:1,2:1,3:1,4-5:1", "schedule": "interleaved"})
    local_cluster(6).save("cluster.json")
    assert run("plan", "--stages", "0-1:2,2-4:2,5:2", "--schedule", "1f1b")[0] == 0
    code, out, _ = run("compare", "--stages", "0-1:2,2-4:2,5:2", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["dictated"]["stages"] == "0-1:2,2-4:2,5:2"
    assert rows["autopar"]["step_s"] < rows["dictated"]["step_s"]
    code, _, err = run("compare", "--schedule", "gpipe")
    assert (code, "--schedule is that of --stages" in err) == (2, True)


def test_a_torchtitan_configuration_becomes_stages(run: Run) -> None:
    llama_profile(2).save("measured.json")
    parts = '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'
    Path("theirs/config.py").write_text(f"config.parallelism.module_fqns_per_model_part = {parts}\n")
    found = ("import", "torchtitan", "theirs/config.py", "--profile", "measured.json")
    code, _, err = run(*found)
    assert (code, "what is left of all ranks; say how many: --replicas" in err.replace("`", "")) == (2, True)
    code, out, err = run(*found, "--replicas", "2")
    assert (code, out) == (0, "0-1:2,2-3:2\n")
    assert "--shard optimizer" in err.replace("\n", " ")
    code, _, err = run(*found, "--pipeline-size", "2")
    assert (code, "--pipeline-size is what theirs/config.py says" in err) == (2, True)
