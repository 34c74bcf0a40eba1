"""``autopar verify``: ranks that train what the plain loop trains are found equal, and no others."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.capture.layers.export import capture
from autopar.capture.model.source import load
from autopar.capture.plain.mini_batch import PlainRun
from autopar.errors import UsageError
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.formats.report import Verification
from autopar.ownership import Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.start import verify as room
from autopar.runtime.start.verify import PROMISED, Holder, compare, verify
from dictated import dictate
from families import tiny_config
from in_teams import in_teams
from paths import MODELS, ROOT
from played import small_plan
from policy_cases import TOLD
from training_cases import text_of

# With the dropout that the library has it have.
CONFIGS = {name: tiny_config(name, 3) for name in ("llama", "gpt2")}
Command = Callable[..., tuple[int, str, str]]
WIDTHS, SHARDS = (1, 3, 2), ("none", "parameters", "optimizer")


def planned(folder: Path, source: str, widths: Sequence[int] = WIDTHS, **options: Any) -> Plan:  # noqa: ANN401
    model = load(source)
    plan = dictate(capture(model, model.build(0)), model, widths, options.pop("micro_batches", 2), 6, **options)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"source": source})})
    plan.save(folder / "plan.json")
    return plan


def verified(plan: Plan, pool: RankPool, steps: int = 2) -> Verification:
    return verify(plan, plan.model.source, None, steps, 60.0, pool=pool)


def source_of(folder: Path, name: str, more: str = "", **narrow: Any) -> str:  # noqa: ANN401
    """Write an example or a configuration of the library, and return where it is."""
    if name in CONFIGS:
        pytest.importorskip("transformers", reason="needs the extra autopar[hf]")
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
        return f"hf:{folder / 'config.json'}"
    narrow = {"BLOCKS": 3, **narrow} if name == "gpt" else narrow
    (folder / "model.py").write_text(text_of(name, **narrow) + more)
    return str(folder / "model.py")


VERIFY = ("verify", "plan.json", "--steps", "2", "--json")
SUMMED = ("ctx.sums.sum(gradient, ctx.parts)", "gradient")
UNEQUAL: dict[str, Any] = {"shares": [[2, 4], [6], [4, 2]], "recompute": True}


def _unequal(folder: Path) -> None:
    # Tests import the helper, too; what can be imported anyway is never taken from a model's folder.
    (folder / "labels.py").write_text((MODELS.parent / "labelled.py").read_text())
    text = (MODELS / "otherwise.py").read_text()
    (folder / "otherwise.py").write_text(text.replace("from labelled import", "from labels import"))
    plan = planned(folder, str(folder / "otherwise.py"), (2, 1, 2), **UNEQUAL)
    model = plan.model.model_copy(update={"source": "otherwise.py"})
    update = {"device_type": "cuda", "precision": "bf16", "model": model}
    plan.model_copy(update=update).save(folder / "plan.json")


@pytest.mark.slow
def test_the_command_compares_a_plan_for_gpus_on_cpus_in_float64(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unequal(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, said = command(*VERIFY)
    assert code == 0, said
    found = json.loads(out)
    assert found["equal"]
    assert [each["what"] for each in found["differences"]] == ["losses", "gradients", "parameters", "buffers"]
    assert all(each["equal"] and each["largest"] <= each["allowed"] for each in found["differences"])
    assert [note.partition(";")[0] for note in found["notes"]] == ["the plan is for GPUs", "the plan computes in bf16"]
    assert "gradients" in said


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("runtime/execute.py", "return len(self._own.rows) /", "return plan.stages[max(self._stages)].rows[0] /"),
        ("autopar/capture/split/sums.py", *("return " + each + ", None, None" for each in SUMMED)),
    ],
    ids=["a share's weight", "parts"],
)
def test_the_command_fails_on_a_runtime_with_a_fault(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    if "split" in name:
        _of_teams(tmp_path, (1,), (2,))
    else:
        _unequal(tmp_path)
    for each in ("autopar", "runtime", "planner", "profiler", "examples"):
        shutil.copytree(ROOT / each, tmp_path / each, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / name
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    # Started anew: what is warm has imported the tree without a fault.
    how: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}, "capture_output": True}
    done = subprocess.run([sys.executable, "-m", "autopar", *VERIFY], text=True, check=False, **how)
    assert done.returncode == 5, done.stderr
    assert not json.loads(done.stdout)["equal"]
    assert "the ranks did not train what plain training does" in done.stderr.splitlines()[-1]


def _of_teams(folder: Path, widths: Sequence[int], sizes: Sequence[int], **options: Any) -> Plan:  # noqa: ANN401
    """Plan the narrow GPT in teams, and write it beside the plan."""
    source = source_of(folder, "gpt", BLOCKS=2)
    model = load(source)
    plan = in_teams(capture(model, model.build(0)), planned(folder, source, widths, **options), sizes)
    relative = plan.model.model_copy(update={"source": "model.py"})
    plan.model_copy(update={"model": relative}).save(folder / "plan.json")
    return plan


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("widths", "sizes", "shard"),
    [((1, 1), (2, 4), "none"), ((2,), (2,), "parameters"), ((2, 1), (2, 2), ("optimizer", "none"))],
)
def test_what_every_rank_of_a_team_has_is_compared(
    widths: Sequence[int], sizes: Sequence[int], shard: Shard | Sequence[Shard], tmp_path: Path, pool: RankPool
) -> None:
    plan = _of_teams(tmp_path, widths, sizes, shard=shard)
    found = verified(plan, pool)
    assert found.equal, found
    compared = {each.what: each.compared for each in found.differences}
    held = sum(len(plan.stages[index].cuts) for own in plan.ownership.ranks for index in own.stages)
    assert compared["parameters"] >= held > 0


@pytest.mark.parametrize(("off", "equal"), [(0.0, True), (1e-6, False)])
def test_a_part_is_held_against_its_indices_of_the_whole(off: float, equal: bool) -> None:
    truth = _run()
    cut = ParameterCut(parameter="w", dim=0, parts=(((1, 2),), ((0, 1),)))
    gradients, values = {"w": torch.tensor([-4.0]), "b": None}, {"w": torch.tensor([2.0 + off], dtype=torch.float32)}
    first = Holder("", gradients, {**values, "b": truth.parameters["b"]}, {}, {"w": cut}, 0)
    assert all(each.equal for each in compare(truth.losses, [first], truth, PROMISED)) == equal


SINGLE = """
import torch
class Single(torch.nn.Module):
    def forward(self, x): return torch.tanh(x) @ torch.eye(4)
def model(): return torch.nn.Sequential(torch.nn.Linear(4, 4), Single(), torch.nn.Linear(4, 4))
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
def dataset(): return torch.utils.data.TensorDataset(X, X.sum(1))
def loss(output, batch): return (output.sum(1) - batch[-1]).square().mean()
"""


def test_float32_is_allowed_rounding_and_what_one_process_cannot_show_refused(
    tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "single.py"
    file.write_text(SINGLE)
    found = verified(planned(tmp_path, str(file), (2, 1)), pool)
    assert found.equal, found
    assert found.computed == "the types of the model"
    assert "moved by the last bit of float32" in found.rounding
    assert "does not compute in float64" in found.notes[0]
    assert all(each.allowed < 1e-3 for each in found.differences)
    plan = planned(tmp_path, source_of(tmp_path, "gpt", BLOCKS=2), (1, 1), warmup=[1, 1])
    with pytest.raises(UsageError, match=r"wte.weight is shared between stages .*`policy='2bw'`"):
        verified(unflushed(plan, "stash", (2, 1)), pool)
    plan = planned(tmp_path, source_of(tmp_path, "resnet"), (1, 1), warmup=[1, 1], recompute=True)
    with pytest.raises(UsageError, match=r"numbers depend on what is recomputed.*`recompute='none'`"):
        verified(unflushed(plan, "predict", (2, 1)), pool)
    plan = planned(tmp_path, str(MODELS / "otherwise.py"), (2, 1, 2), **UNEQUAL)
    monkeypatch.setattr(room, "available_bytes", lambda: 2**29)
    with pytest.raises(UsageError, match=r"5 ranks beside the plain loop, this host has 0.5 GiB of memory left"):
        verified(plan, pool)
    monkeypatch.setattr(room, "available_bytes", lambda: 2**10)
    with pytest.raises(UsageError, match=r"for the plain loop of a model"):
        verified(plan, pool)
    # The plain loop's copies stand beside what all ranks hold.
    small, whole = small_plan((2, 1), 4), 2**30
    needed = room.RANK_BYTES * 3 + 3 * 2**20 + room.COPIES * whole
    monkeypatch.setattr(room, "available_bytes", lambda: needed)
    room.check_memory(small, {"w": whole}, 1.0)
    monkeypatch.setattr(room, "available_bytes", lambda: needed - 1)
    with pytest.raises(UsageError, match="3 ranks beside the plain loop"):
        room.check_memory(small, {"w": whole}, 1.0)


def _run(**changed: Any) -> PlainRun:  # noqa: ANN401
    values = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5])}
    gradients = {"w": torch.tensor([0.1, -4.0]), "b": None}
    whole: dict[str, Any] = {"losses": [2.0, 1.0], "gradients": gradients, "parameters": values, "buffers": {}}
    return PlainRun(**{**whole, **changed})


@pytest.mark.parametrize(
    ("what", "changed", "largest"),
    [
        ("losses", {"losses": [2.0, 1.3]}, 0.1),
        ("gradients", {"gradients": {"w": torch.tensor([0.1, -3.0]), "b": None}}, 0.25),
        ("gradients", {"gradients": {"w": torch.tensor([0.1, -4.0]), "b": torch.zeros(1)}}, None),
        ("gradients", {"gradients": {"w": None, "b": None}}, None),
        ("parameters", {"parameters": {"w": torch.tensor([1.0, 2.3]), "b": torch.tensor([0.5])}}, 0.1),
        ("parameters", {"parameters": {"w": torch.tensor([1.0, 2.0])}}, None),
        ("parameters", {"parameters": {"w": torch.tensor([1.0, math.nan]), "b": torch.tensor([0.5])}}, None),
        ("parameters", {"parameters": {"w": torch.ones(3), "b": torch.tensor([0.5])}}, None),
        ("buffers", {"buffers": {"n": torch.tensor(3)}}, None),
    ],
)
def test_a_difference_is_told_with_its_kind_and_equal_runs_have_none(
    what: str, changed: dict[str, Any], largest: float | None
) -> None:
    one, truth = _run(**changed), _run()
    found = compare(one.losses, [Holder("", one.gradients, one.parameters, one.buffers)], truth, PROMISED)
    assert [each.what for each in found if not each.equal] == [what]
    (told,) = [each.largest for each in found if not each.equal]
    assert told == (None if largest is None else pytest.approx(largest, rel=1e-6))
    same = _run(buffers={"n": torch.tensor(3), "x": torch.tensor([math.nan, math.inf])})
    found = compare(same.losses, [Holder("", same.gradients, same.parameters, same.buffers)], same, PROMISED)
    assert all(each.equal and each.largest == 0 for each in found)


UNFLUSHED: list[tuple[str, str, Sequence[int], Sequence[int], dict[str, Any]]] = [
    ("gpt", "2bw", (1, 2, 1), (3, 2, 1), {"recompute": True}),
    ("resnet", "predict", (1, 1, 1), (5, 3, 1), {}),
    ("resnet", "vertical-sync", (1, 1), (3, 1), {"recompute": True}),
    ("gpt2", "2bw", (1, 1, 2), (3, 2, 1), {}),
    ("llama", "stash", (1, 3), (3, 1), {"turns": [1], "micro_batches": 1, "recompute": True}),
    ("resnet", "stash", (1, 1, 2), (4, 3, 1), {"turns": [2], "micro_batches": 1}),
    # Whose optimizer is told of its stage.
    *(("mlp told", policy, (2, 1, 3), (3, 2, 1), {}) for policy in ("stash", "pipemare", "sync")),
]


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "policy", "widths", "depths", "options"), UNFLUSHED)
def test_without_flushes_the_rule_is_trained(
    name: str,
    policy: str,
    widths: Sequence[int],
    depths: Sequence[int],
    options: dict[str, Any],
    tmp_path: Path,
    pool: RankPool,
) -> None:
    source = source_of(tmp_path, name.removesuffix(" told"), TOLD if "told" in name else "")
    plan = planned(tmp_path, source, widths, warmup=[1] * len(widths), **options)
    found = verified(plan if policy == "sync" else unflushed(plan, policy, depths), pool, steps=4)
    assert found.equal, found
    assert found.computed == "float64"


@pytest.mark.parametrize(("policy", "asked"), [("2bw", "delay"), ("sync", "replicas")])
def test_copies_of_a_parameter_are_not_told_apart(policy: str, asked: str, tmp_path: Path, pool: RankPool) -> None:
    plan = planned(tmp_path, source_of(tmp_path, "gpt", TOLD), (1, 2), warmup=[1, 1])
    plan = plan if policy == "sync" else unflushed(plan, policy, (2, 1))
    with pytest.raises(
        UsageError, match=rf"optimizer\(\) asks for {asked}, which is .* that share .*wte.weight, whose"
    ):
        verified(plan, pool)


def unflushed(plan: Plan, policy: str, depths: Sequence[int]) -> Plan:
    stages = [each.model_copy(update={"warmup": depth}) for each, depth in zip(plan.stages, depths, strict=True)]
    more = {"anneal_steps": 3, "synchronous_steps": 1} if policy == "pipemare" else {}
    return plan.model_copy(update={"stages": tuple(stages), "weight_policy": policy, **more})
