"""``autopar export`` and ``autopar import``: the files that they write."""

import json
from pathlib import Path

from autopar.formats.profile import Profile
from calls import Run, refused, well
from equal_plans import equal_plan, llama_profile
from random_problems import local_cluster

LINE = "forward_compute_time=1, backward_compute_time=2, activation_size=64, parameter_size=8"
TEXT = f"node1 -- Linear -- {LINE}\nnode2 -- Linear -- {LINE}\n\tnode1 -- node2\n"


def test_text_graphs_become_profiles_and_exports_are_written_beside_each_other(run: Run) -> None:
    Path("cluster.json").unlink()
    Path("graph.txt").write_text(TEXT)
    Path("old.json").write_text("{}")
    asked = ("import", "pipedream", "graph.txt", "--profiled-batch", "4")
    out, err = well(run, *asked, "--json")
    profile = Profile.load("profile.json")
    assert out == profile.dumps() == Path("profile.json").read_text()
    assert (profile.batch, profile.model.source) == (4, "graph.txt")
    assert "Note: " in err
    assert "Written: profile.json, 2 layers of 0.006 s" in err
    well(run, *asked, "-o", "old.json", "--overwrite")
    assert Profile.load("old.json") == profile
    assert "it can be looked at, but not run" in well(run, "plan", "--gpus", "2")[1]
    profile = llama_profile()
    plan, cluster = equal_plan(profile, "1f1b", 2)
    for each, name in ((plan, "plan"), (profile, "measured"), (cluster, "machines")):
        each.save(f"{name}.json")
    Path("out").mkdir()
    asked = ("export", "torch", "--profile", "measured.json", "--cluster", "machines.json", "-o")
    assert "Written: out/order.csv, out/stages.py" in well(run, *asked, "out/order.csv")[1]
    assert 'FOLDER / "order.csv"' in Path("out/stages.py").read_text()
    refused(run, 2, "out/stages.py exists; pass --overwrite", *asked, "out/other.csv")
    well(run, *asked, "out/other.csv", "--overwrite")
    refused(run, 4, "the plan records no profile", "export", "torch")


def test_a_layout_and_a_torchtitan_configuration_become_stages(run: Run) -> None:
    llama_profile(4).save("profile.json")
    local_cluster(6).save("cluster.json")
    refused(run, 2, "--replicas must be at least 1, found 0", "import", "layout", "Et|ttt|L", "--replicas", "0")
    out, err = well(run, "import", "layout", "Et|ttt|L", "--replicas", "2")
    assert out == "0-1:2,2-4:2,5:2\n"
    assert "`autopar plan --stages 0-1:2,2-4:2,5:2 --schedule 1f1b`" in err
    out, _ = well(run, "import", "layout", "Et|t|t|tL", "--pipeline-size", "2", "--json")
    assert json.loads(out) == {"stages": "0-1:1,2:1,3:1,4-5:1", "schedule": "interleaved"}
    well(run, "plan", "--stages", "0-1:2,2-4:2,5:2", "--schedule", "1f1b")
    out, _ = well(run, "compare", "--stages", "0-1:2,2-4:2,5:2", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["dictated"]["stages"] == "0-1:2,2-4:2,5:2"
    assert rows["autopar"]["step_s"] < rows["dictated"]["step_s"]
    llama_profile(2).save("measured.json")
    parts = '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'
    Path("config.py").write_text(f"config.parallelism.module_fqns_per_model_part = {parts}\n")
    asked = ("import", "torchtitan", "config.py", "--profile", "measured.json")
    refused(run, 2, "what is left of all ranks; say how many: --replicas", *asked)
    refused(run, 2, "--pipeline-size is of layout; leave it out for torchtitan", *asked, "--pipeline-size", "2")
    out, err = well(run, *asked, "--replicas", "2")
    assert out == "0-1:2,2-3:2\n"
    assert "--shard optimizer" in err
