"""``autopar run`` and ``autopar worker``, as a user meets them: outcome, files, exit codes, and nothing left behind."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from autopar.capture.model.source import load
from autopar.errors import UsageError
from autopar.formats.plan import NodeDevices, Plan
from autopar.formats.program import Fault
from autopar.formats.report import Report
from autopar.formats.timeline import Timeline
from autopar.options.train import RunOptions
from autopar.ranks.device import gpus_of_host
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.weights import read
from autopar.runtime.start.launch import run
from autopar.schedules.expand import expand
from launched import alive, ended, free_port, launch, processes_in, until
from pooled import process_ids
from suite import warm
from words_plans import copy_model, save_plan

Command = Callable[..., tuple[int, str, str]]
RUN = [sys.executable, "-m", "autopar", "run", "--steps"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a model file in it."""
    copy_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan_for(here: Path, widths: list[int], name: str = "words", rows: int = 4, **how: object) -> Plan:
    return save_plan(here, widths, name, rows, cuts=[1, 2, 3][: len(widths) - 1], **how)


def jsons(here: Path) -> list[str]:
    return sorted(path.name for path in here.glob("*.json"))


@pytest.mark.slow
@pytest.mark.core
def test_a_run_writes_report_trace_and_weights_that_a_second_run_starts_from(here: Path, command: Command) -> None:
    plan = plan_for(here, [1, 2])
    started = [*RUN, "4", "--trace", "t.json", "--save", "trained", "--json"]
    done = subprocess.run(started, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    report = Report.load(here / "report.json")
    assert json.loads(done.stdout) == json.loads((here / "report.json").read_text())
    assert report.steps == len(report.loss) == 4
    assert len(report.peak_bytes) == report.ranks == 3
    assert all(peak > 0 for peak in report.peak_bytes)
    timeline = Timeline.load(here / "t.json")
    assert (timeline.origin, timeline.rank_count()) == ("measured", 3)
    state = dict(load("words.py").build(0).named_parameters())
    trained = read(here / "trained", state)
    assert trained.keys() == state.keys()
    names = sorted(re.sub("-[0-9a-f]{16}", "", path.name) for path in (here / "trained").iterdir())
    parts = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    assert names == [*parts, "model.safetensors.index.json"]
    code, _, said = command("run", "--steps", "1", "--weights", "trained", "--save", "more")
    assert code == 0, said
    (file,) = (here / "more").glob("model-00001-*.safetensors")
    moved = load_file(file)
    assert [name for name, value in moved.items() if value.equal(state[name])] == ["unused"]
    assert Report.load(here / "report.json").initial_weights == "files in trained"
    assert plan.predicted.step_s == 0


def test_the_report_names_modules_that_training_puts_back_into_training_mode(here: Path, pool: RankPool) -> None:
    frozen = "import words\nfrom words import *\ndef model():\n    net = words.model()\n"
    part = "next(part for path, part in net.named_modules() if path)"
    (here / "frozen.py").write_text(f"{frozen}    {part}.eval()\n    return net\n")
    plan = plan_for(here, [1, 1], "frozen")
    report = run(plan, str(here / "frozen.py"), RunOptions(1), pool=pool).report
    (note,) = [note for note in report.notes if "evaluation mode" in note]
    assert note.endswith("training puts all modules into training mode, as train() does")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_rank_gives_back_what_a_training_has_opened_before_it_serves_the_next(here: Path) -> None:
    def threads_of(pool: RankPool) -> list[int]:
        return [len(list(Path(f"/proc/{each}/task").iterdir())) for each in process_ids(pool)]

    plan = plan_for(here, [2], shard="parameters")
    with RankPool(2) as pool:
        run(plan, "words.py", RunOptions(2), pool=pool)
        first = threads_of(pool)
        for _ in range(3):
            run(plan, "words.py", RunOptions(2), pool=pool)
        # The rank collects when it has answered.
        until(lambda: max(threads_of(pool)) <= max(first))


def test_an_edited_program_is_run_and_a_broken_one_refused(here: Path, command: Command) -> None:
    text = expand(plan_for(here, [1, 1])).dumps()
    early = text.replace("SG0@1>0@0 R1@1<0@0", "R1@1<0@0 SG0@1>0@0")
    assert early != text
    (here / "p.json").write_text(early)
    code, out, said = command("run", "--steps", "1", "--program", "p.json", "--trace", "t.json", "--json")
    assert code == 0, said
    assert json.loads(out)["notes"] == ["the program of p.json was run, not the plan's own"]
    performed = [str(event.action) for event in Timeline.load(here / "t.json") if event.rank == 1]
    assert performed.index("SG0@1>0@0") == performed.index("R1@1<0@0") + 1
    (here / "p.json").write_text(text.replace("S0@0>1@1 ", ""))
    code, _, said = command("run", "--steps", "1", "--program", "p.json")
    assert code == 4
    assert said.splitlines()[-1] == "autopar: p.json: rank 0 (stage 0): S0@0>1@1 is missing"


@pytest.mark.slow
@pytest.mark.reliability(36)
def test_a_launcher_starts_the_same_ranks(here: Path, command: Command) -> None:
    # Mini-batches of 48 of the 64 samples.
    plan_for(here, [1, 1], rows=24)
    assert command("run", "--epochs", "1", "--last", "pad")[0] == 0
    report = Report.load(here / "report.json")
    assert len(report.loss) == 2
    assert report.notes == ("the last mini-batch of an epoch repeats 32 of its 64 samples (--last pad)",)
    asked = ["--epochs", "1", "--report", "other.json", "--loaders", "2"]
    found = ended(launch(2, ["-m", "autopar", "worker", "plan.json", *asked]))
    assert [code for code, *_ in found] == [0, 0], found
    other = Report.load(here / "other.json")
    assert other.loss == report.loss[:1]
    assert [each.loading.loaders for each in (report, other) if each.loading] == [0, 2]
    until(lambda: not any(map(alive, processes_in(here))))
    assert other.notes == ("an epoch leaves out 16 of 64 samples, which do not fill a mini-batch (--last drop)",)


@pytest.mark.parametrize(("count", "words"), [(1, "fewer than the 2"), (3, "more than the 2")])
def test_another_number_of_ranks_is_said_once(here: Path, count: int, words: str) -> None:
    plan_for(here, [1, 1])
    found = ended(launch(count, ["-m", "autopar", "worker", "plan.json", "--steps", "3"]))
    assert all(code for code, *_ in found)
    said = "".join(errors for *_, errors in found)
    assert said.count(f"the number of ranks started is {count}, {words} that the plan needs") == 1
    assert not (here / "report.json").exists()


@pytest.mark.reliability(9)
def test_a_layer_that_fails_is_named_with_rank_stage_step_and_action(here: Path, command: Command) -> None:
    text = (here / "words.py").read_text().replace("UNKNOWN_AT = -1", "UNKNOWN_AT = 7")
    (here / "words.py").write_text(text)
    plan_for(here, [1, 1])
    code, _, said = command("run", "--steps", "9", "--trace", "t.json")
    assert code == 5
    last = said.strip().splitlines()[-1]
    assert re.match(r"autopar: rank 0 \(stage 0, step \d, F\d@0\): layer 0: IndexError: index out of range", last)
    assert last.endswith("`autopar show report.blackbox.json` shows the last actions of every rank")
    assert jsons(here) == ["plan.json", "report.blackbox.json"]
    assert "Traceback" not in said


def in_steps(here: Path, *arguments: str) -> tuple[warm.Popen, list[int]]:
    """Start a run without an end; return it and its ranks, once they take steps."""
    run = warm.Popen([*RUN, "1000000", *arguments], stderr=-1, text=True)
    assert run.stderr is not None
    assert any(line.startswith("step ") for line in run.stderr), run.wait()
    every = [each for each in psutil.Process(run.pid).children(recursive=True) if each.status() != "zombie"]
    # A rank is what descends from the run and has started nothing.
    return run, sorted({each.pid for each in every} - {each.ppid() for each in every})


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.reliability(27)
def test_a_run_that_is_asked_to_end_ends_behind_its_step_and_is_resumed(here: Path, command: Command) -> None:
    plan_for(here, [1, 1])
    run, _ = in_steps(here, "--checkpoint", "saved")
    run.send_signal(signal.SIGTERM)
    rest = run.communicate(timeout=100)[1]
    assert run.returncode == 143
    assert "ending behind this step; once more ends at once" in rest
    until(lambda: not processes_in(here))
    report = Report.load(here / "report.json")
    assert f"was asked to end, and has trained {report.steps} of 1000000 steps" in report.notes
    assert report.checkpoints is not None
    assert report.checkpoints.steps[-1] == report.steps
    code, _, said = command("run", "--steps", str(report.steps + 2), "--checkpoint", "saved", "--resume")
    assert code == 0, said
    assert Report.load(here / "report.json").first_step == report.steps


@pytest.mark.slow
@pytest.mark.reliability(28)
def test_a_run_that_is_interrupted_twice_leaves_no_process_and_no_file(here: Path) -> None:
    sleeps = "def __getitem__(self, index):\n        import time; time.sleep(0.3)"
    (here / "words.py").write_text((here / "words.py").read_text().replace("def __getitem__(self, index):", sleeps))
    plan_for(here, [1, 1])
    run, _ = in_steps(here)
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    while "once more ends at once" not in (line := run.stderr.readline()):
        assert line
    run.send_signal(signal.SIGINT)
    rest = run.communicate(timeout=100)[1]
    assert run.returncode == 130
    assert "Traceback" not in rest
    assert jsons(here) == ["plan.json"]
    until(lambda: not processes_in(here))


@pytest.mark.slow
@pytest.mark.reliability(7)
def test_a_rank_that_becomes_slow_is_said_of_a_run(
    here: Path, pool: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = save_plan(here, [1, 1], cuts=[1])
    times = {"forward_s": (0.001, 0.001), "backward_s": (0.002, 0.002)}
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=times)})
    run(plan, str(here / "words.py"), RunOptions(30, inject_fault=(Fault.parse("slow@1:4"),)), pool=pool)
    # Where the machine is busy, the other one may be slow, too, and this one slow again.
    told = [line for line in capfd.readouterr().err.splitlines() if "rank 1 (stage 1) computes" in line]
    line = next(line for line in told if "if no other work" in line)
    said = r"autopar: rank 1 \(stage 1\) computes [\d.e+]+ times as long as planned, the others [\d.]+ times; "
    remedy = "if no other work there is why, `autopar plan profile.json --gpus 1` plans without its device"
    assert re.fullmatch(said + remedy, line)


@pytest.mark.reliability(32)
def test_too_few_gpus_and_wrong_plans_are_said_once_a_host(
    command: Command, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    port = f"{free_port()}"
    for local_rank, said in (("0", "autopar: no-plan.json: no such plan file"), ("1", "")):
        place = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with monkeypatch.context() as launched:
            for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
                launched.setenv(name, value)
            code, _, stderr = command("worker", "no-plan.json")
        assert code == 4
        assert stderr.startswith(said)
        assert bool(stderr) == bool(said)
    plan = plan_for(here, [1, 2]).model_copy(update={"device_type": "cuda"})
    for count, remedy in ((0, "`device='cpu'`"), (2, "plan again with `gpus=2`, or pass `share_gpus=True`")):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        with pytest.raises(UsageError, match=rf"the plan needs 3 GPUs, this host has {count}; .*{remedy}"):
            run(plan, "words.py", RunOptions(1))


@pytest.mark.reliability(55)
def test_a_plan_for_other_nodes_than_this_host_is_refused_before_a_model_is_built_and_another_cpu_is_a_note(
    here: Path, command: Command, pool: RankPool
) -> None:
    plan, words = plan_for(here, [1, 2]), (here / "words.py").read_text()

    def on(*nodes: int) -> Plan:
        own = tuple(NodeDevices(node=node, type="a CPU", memory_bytes=2**30, count=1) for node in nodes)
        return plan.model_copy(update={"nodes": own})

    (note,) = run(on(7, 7, 7), str(here / "words.py"), RunOptions(1), pool=pool).report.notes[-1:]
    assert note.startswith("the plan is for a CPU, and ran on ")
    on(0, 0, 1).save(here / "plan.json")
    (here / "words.py").write_text(f"{words}\nprint('built')\n")
    code, stdout, stderr = command("run", "plan.json", "--steps", "1")
    assert (code, "built" in stdout + stderr) == (2, False)
    assert "the plan is for 1 node (2 x a CPU) and 1 node (1 x a CPU), and its ranks are on " in stderr
    assert re.search(
        r"`autopar cluster probe --device cpu --ranks 3` and `autopar plan \S+ --cluster cluster.json`", stderr
    )


def test_ranks_of_one_host_keep_their_numbers_and_take_the_gpus_of_their_kinds(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    found = [SimpleNamespace(name=name, total_memory=2**35) for name in names]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: found[device.index])

    def run_job(target: str, *, ranks: int, **asked: list[int]) -> list[object]:
        if "devices" in asked:
            assert asked["devices"] == [1, 0, 2]
            raise UsageError("placed")
        assert (target, ranks) == ("autopar.ranks.device:gpus_of_rank", 1)
        return [json.loads(json.dumps(gpus_of_host()))]

    plan = plan_for(here, [1, 2])
    kinds = ("V100", "H100", "H100")
    nodes = tuple(NodeDevices(node=0, type=kind, memory_bytes=2**35, count=1) for kind in kinds)
    placed = plan.model_copy(update={"nodes": nodes, "device_type": "cuda"})
    pool: Any = SimpleNamespace(run=lambda target, task=None, **asked: run_job(target, **{"ranks": 0, **asked}))
    with pytest.raises(UsageError, match="placed"):
        run(placed, "words.py", RunOptions(1, loaders=0), pool=pool)


def edited(here: Path, **changes: object) -> None:
    content = json.loads((here / "plan.json").read_text())
    content.update(changes)
    (here / "plan.json").write_text(json.dumps(content))


@pytest.mark.reliability(16, 32, 53, 54)
def test_what_does_not_fit_is_one_line_and_the_right_exit_code(here: Path, command: Command) -> None:
    plan_for(here, [1, 1])
    content = json.loads((here / "plan.json").read_text())
    stages = content["stages"]

    def refused(code: int, said: str, *arguments: str) -> None:
        found, _, stderr = command("run", "--steps", "1", *arguments)
        assert found == code, stderr
        assert re.search(said, stderr.strip().splitlines()[-1]), stderr
        assert "Traceback" not in stderr
        assert not (here / "report.json").exists()

    refused(4, r"no-plan.json: no such plan file", "no-plan.json")
    refused(2, r"^autopar: --steps must be at least 1, found 0$", "--steps", "0")
    refused(2, r"r.json is written by this command and cannot", "--report", "r.json", "--trace", "r.json")
    refused(2, r"--share-gpus: the plan is for CPUs, which have none; leave it out", "--share-gpus")
    refused(4, r"nowhere: holds neither model.safetensors nor", "--weights", "nowhere")
    refused(4, r"cannot write nowhere/t.json: no such folder", "--trace", "nowhere/t.json")
    refused(2, r"plan.json.*cannot be its output", "--trace", "plan.json", "--overwrite")
    edited(here, batch=True)
    refused(4, r"plan.json: \$.batch: .*found true")
    edited(here, batch=8, stages=[{**stages[0], "layers": ["0", "x"]}, stages[1]])
    refused(4, r"the plan does not fit .*words.py: layer 1 is 'x' in the plan, '1' in the model; run")
    edited(here, stages=stages, tensors=[])
    refused(4, r"the plan does not fit .*words.py: tensor '0:embedding' .* absent in the plan")
    edited(here, tensors=[{**tensor, "dtype": "int8"} for tensor in content["tensors"]])
    refused(4, r"the plan does not fit .*words.py: tensor '0:embedding' .* in the plan, .* in the model")
    edited(here, tensors=content["tensors"], tied=[{"parameter": "1.weight", "stages": [0, 1], "bytes": 4}])
    refused(4, r"the plan does not fit .*words.py: tied parameter '1.weight' .* in the plan, absent in the model")
    edited(here, tied=[], model={**content["model"], "source": "/dev/null"})
    refused(4, r"plan.json: \$.model.source: expected a .py file, hf: and a configuration")
    edited(here, model=content["model"], device_type="cuda")
    refused(2, r"the plan needs 2 GPUs, this host has \d+")
    refused(2, r"the plan needs 2 GPUs, this host has 0; run it where they are", "--share-gpus")
    edited(here, device_type="cpu")
    with (here / "words.py").open("a") as file:
        file.write("# changed\n")
    refused(4, r"words.py has changed since it was profiled; run `autopar profile` and `autopar plan` again")
    (here / "words.py").unlink()
    refused(4, r"plan.json: \$.model.source: no such file: words.py")
