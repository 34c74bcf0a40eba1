"""``autopar show``: every kind of file, pictures, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from autopar import inputs
from autopar.cli import main
from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.plan import Plan
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, Tensor
from autopar.formats.program import Action, Program, RankProgram
from autopar.formats.timeline import Origin, Timeline
from autopar.inputs import predict
from autopar.schedules.expand import action_count

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run ``autopar show`` in an empty folder; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return partial(command, "show")


def _trace(path: str, origin: Origin, factor: float = 1.0, micro_batches: int = 2) -> None:
    timeline = Timeline(origin)
    for micro_batch in range(micro_batches):
        timeline.add(0, Action("F", 0, micro_batch), micro_batch * 0.1 * factor, (micro_batch + 1) * 0.1 * factor)
    timeline.save(path)


def _cluster() -> Cluster:
    device = Device(type="cpu", memory_bytes=2**30)
    return Cluster(devices=(device,), links=(Link(level="node", latency_s=1e-5, bytes_per_s=1e9),))


def test_a_cluster_goes_to_stderr_as_tables_and_to_stdout_as_json(run: Run) -> None:
    _cluster().save("cluster.json")
    code, out, err = run("cluster.json", "--json")
    assert code == 0
    assert Cluster.parse(out, Path("stdout")) == _cluster()
    assert "1 GiB" in err


def test_a_program_is_shown(run: Run) -> None:
    Program((RankProgram.of([Action("F", 0, 0), Action("B", 0, 0), Action("U", 0)]),)).save("program.json")
    code, out, err = run("program.json")
    assert (code, out) == (0, "")
    assert "F0@0 B0@0 U@0" in err


def test_a_trace_is_drawn_where_asked(run: Run, tmp_path: Path) -> None:
    _trace("trace.json", "measured")
    code, out, _ = run("trace.json", "--png", "picture.png", "--json")
    assert code == 0
    assert json.loads(out)["step_s"] == pytest.approx(0.2)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("order", [("measured.json", "simulated.json"), ("simulated.json", "measured.json")])
def test_two_traces_are_laid_over_each_other_in_either_order(run: Run, tmp_path: Path, order: tuple[str, str]) -> None:
    _trace("measured.json", "measured", factor=2.0)
    _trace("simulated.json", "simulated")
    for _ in range(2):  # the default picture of the working folder is replaced
        code, out, err = run(order[0], "--over", order[1], "--json")
        assert code == 0, err
    assert json.loads(out)["error"] == pytest.approx(-0.5)
    assert (tmp_path / "timeline.png").exists()


def test_two_traces_of_the_same_origin_are_refused(run: Run, tmp_path: Path) -> None:
    _trace("a.json", "measured")
    _trace("b.json", "measured")
    code, _, err = run("a.json", "--over", "b.json")
    assert code == 2
    assert err == (
        "autopar: a.json and b.json are both measured; --over needs one that ranks recorded (`autopar run --trace`, "
        "`autopar rehearse --steps 1 --trace`) and a simulated one (`autopar simulate --trace`)\n"
    )
    assert not (tmp_path / "timeline.png").exists()


def test_traces_of_different_plans_are_refused(run: Run) -> None:
    _trace("a.json", "measured")
    _trace("b.json", "simulated", micro_batches=3)
    code, _, err = run("a.json", "--over", "b.json")
    assert code == 2
    assert "do not hold the same computations" in err


def test_an_existing_picture_is_replaced_only_with_overwrite(run: Run, tmp_path: Path) -> None:
    _trace("trace.json", "measured")
    (tmp_path / "mine.png").write_text("precious")
    code, _, err = run("trace.json", "--png", "mine.png")
    assert code == 2
    assert "--overwrite" in err
    assert (tmp_path / "mine.png").read_text() == "precious"
    assert run("trace.json", "--png", "mine.png", "--overwrite")[0] == 0
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "file.json:1:2: not JSON"),
        ("[]", "$.format: expected one of"),
        ('{"format": "autopar.dream", "version": 1}', 'found "autopar.dream"'),
        ('{"traceEvents": []}', "$.otherData.format"),
        ('{"format": "autopar.cluster", "version": 1, "format": "x"}', "$.format: key is given twice"),
        ('{"format": "autopar.cluster", "version": 2}', "$.version"),
    ],
)
def test_what_is_no_file_of_autopar_gets_one_line_and_exit_code_4(run: Run, content: str, expected: str) -> None:
    Path("file.json").write_text(content)
    code, out, err = run("file.json")
    assert (code, out) == (4, "")
    assert expected in err
    assert err.count("\n") == 1


def test_a_missing_file_gets_exit_code_4(run: Run) -> None:
    assert run("nowhere.json")[0] == 4


def test_only_what_has_a_timeline_is_drawn(run: Run) -> None:
    _cluster().save("cluster.json")
    code, _, err = run("cluster.json", "--png", "cluster.png")
    assert code == 2
    assert "cluster.json is a cluster, which has no timeline to draw" in err


def test_showing_imports_no_torch_and_draws_only_when_asked(tmp_path: Path) -> None:
    _cluster().save(tmp_path / "cluster.json")
    script = (
        "import sys; sys.argv = ['autopar', 'show', 'cluster.json']\n"
        "from autopar.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr


def _profile() -> Profile:
    cost = Cost(micro_batch=1, forward_s=0.01, backward_s=0.02, saved=(), peak_bytes=10, output_bytes=10)
    sizes = {"parameters_bytes": 8, "trainable_bytes": 8, "gradient_bytes": 8, "optimizer_bytes": 0}
    return Profile(
        model=ModelSource(source="model.py", sha256="0" * 64),
        batch=4,
        device=DeviceKind(type="cpu", name="cpu", memory_bytes=2**30),
        precision="fp32",
        layers=tuple(Layer(name=name, modules=(name,), costs=(cost,), **sizes) for name in "ab"),
        tensors=(Tensor(name="t", producer="a", consumers=("b",), bytes_per_sample=8, dtype="float32", gradient=True),),
        noise=Noise(median_spread=0.0, max_spread=0.0),
    )


@pytest.fixture
def plan_file(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A plan of two stages with its profile beside it, in the working folder."""
    _profile().save("profile.json")
    monkeypatch.setattr(sys, "argv", ["autopar", "plan", "profile.json", "--gpus", "2", "--stages", "a:1,b:1"])
    with pytest.raises(SystemExit):
        main()
    capsys.readouterr()
    return Path("plan.json")


def test_a_plan_is_shown_with_its_predicted_step_as_a_picture(run: Run, plan_file: Path) -> None:
    code, out, err = run(str(plan_file), "--json", "--png", "step.png")
    assert code == 0, err
    assert json.loads(out)["format"] == "autopar.plan"
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")


def test_a_measured_trace_is_laid_over_the_plan(run: Run, plan_file: Path) -> None:
    predicted = predict(plan_file)
    measured = Timeline("measured")
    for event in predicted:
        measured.add(event.rank, event.action, event.start_s * 2, event.end_s * 2)
    measured.save("trace.json")
    code, out, err = run("trace.json", "--over", str(plan_file), "--json")
    assert code == 0, err
    assert json.loads(out)["error"] == pytest.approx(-0.5, abs=1e-6)
    assert Path("timeline.png").exists()


def test_a_plan_whose_profile_has_changed_is_not_drawn(run: Run, plan_file: Path) -> None:
    Path("profile.json").write_text(Path("profile.json").read_text() + "\n")
    code, _, err = run(str(plan_file), "--png", "step.png")
    assert code == 4
    assert "has changed since the plan was made" in err
    assert not Path("step.png").exists()


def test_a_step_of_too_many_actions_is_not_drawn_and_a_long_one_is_announced(
    run: Run, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = action_count(Plan.load(plan_file))
    monkeypatch.setattr(inputs, "MANY_ACTIONS", count - 1)
    code, _, err = run(str(plan_file), "--png", "step.png")
    assert code == 0, err
    assert f"Simulating {count:,} actions of" in err
    monkeypatch.setattr(inputs, "MOST_ACTIONS", count - 1)
    code, _, err = run(str(plan_file), "--png", "other.png")
    assert code == 2
    assert f"a timeline of {count:,} actions of" in err
    assert not Path("other.png").exists()


def test_a_profile_is_drawn_and_made_a_page(run: Run) -> None:
    _profile().save("profile.json")
    code, out, err = run("profile.json", "--png", "bars.png", "--html", "page.html", "--json")
    assert code == 0, err
    assert Profile.parse(out, Path("stdout")) == _profile()
    assert Path("bars.png").read_bytes().startswith(b"\x89PNG")
    text = Path("page.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<svg") == 1
    assert "Where time and memory are" in text


def test_every_kind_of_file_becomes_a_page(run: Run, plan_file: Path) -> None:
    _cluster().save("cluster.json")
    _trace("measured.json", "measured")
    _trace("simulated.json", "simulated")
    pictures = {"cluster.json": 0, str(plan_file): 1, "measured.json": 1}
    for name, count in pictures.items():
        code, _, err = run(name, "--html", f"{name}.html")
        assert code == 0, err
        assert Path(f"{name}.html").read_text().count("<svg") == count
    assert run("measured.json", "--over", "simulated.json", "--html", "both.html")[0] == 0
    assert "Measured step" in Path("both.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--html", "page.txt"), "--html page.txt: the page is HTML; give a name that ends in .html"),
        (("--html", "old.html"), "old.html exists; pass --overwrite"),
        (("--png", "picture.svg"), "--png picture.svg: the picture is a PNG"),
        (("--html", "profile.json"), "--html profile.json: the page is HTML"),
    ],
)
def test_a_page_replaces_nothing_unasked(run: Run, arguments: tuple[str, ...], message: str) -> None:
    _profile().save("profile.json")
    Path("old.html").write_text("precious")
    code, out, err = run("profile.json", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert Path("old.html").read_text() == "precious"
