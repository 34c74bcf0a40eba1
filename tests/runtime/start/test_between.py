"""Evaluation between the steps of a run: the plain model's loss, and training that goes on as if nothing had been."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from autopar.capture.model.source import UserModel, load
from autopar.errors import ModelError, UsageError
from autopar.formats.plan import Plan
from autopar.options.train import RunOptions
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint import weights
from autopar.runtime.log import LINES
from autopar.runtime.outcome import Outcome
from autopar.runtime.start.launch import run
from autopar.runtime.start.workspace import evaluation_samples
from paths import MODELS
from words_plans import save_plan

EVALUATED = 38


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(here: Path, name: str, widths: list[int], *, more: str = "") -> Plan:
    text = (MODELS / f"{name}.py").read_text()
    (here / f"{name}.py").write_text(f"{text}\n\n{more}")
    return save_plan(here, widths, name, cuts=[1, 2, 3][: len(widths) - 1])


DATA = f"""
def evaluation_dataset():
    draws = torch.rand(1)
    return [(each[0] + draws, *each[1:]) for each in list(samples({EVALUATED}, 5))]
"""


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "widths"), [("otherwise", [2, 1]), ("otherwise_listed", [1, 1])])
def test_a_run_evaluates_as_the_plain_model_and_trains_as_without(
    name: str, widths: list[int], here: Path, pool: RankPool
) -> None:
    plan = planned(here, name, widths, more=DATA)

    def outcome(saved: str, steps: int, **options: object) -> Outcome:
        asked = RunOptions(steps=steps, save=here / saved, **options)  # type: ignore[arg-type]
        return run(plan, str(here / f"{name}.py"), asked, pool=pool)

    without = outcome("without", 4).report
    found = outcome("with", 4, eval_every=2, log_dir=here / "logs").report
    assert [each.step for each in found.evaluations] == [2, 4]
    assert (found.loss, without.evaluations) == (without.loss, ())
    user = load(f"{name}.py")
    model = user.build(0)
    state = model.state_dict()
    trained = weights.read(here / "with", state)
    for key, value in weights.read(here / "without", state).items():
        assert torch.equal(trained[key], value), key
    model.load_state_dict({**state, **trained})
    data = evaluation_samples(user, plan.seed)
    batch = default_collate([data[index] for index in range(EVALUATED)])  # type: ignore[arg-type]
    with torch.no_grad():
        assert user.loss is not None
        expected = user.loss(model.eval()(*batch[:-1]), batch).item()
    assert found.evaluations[1].loss == pytest.approx(expected, rel=1e-12)
    entries = [json.loads(line) for line in (here / "logs" / LINES).read_text().splitlines()]
    logged = [(entry["step"], entry["evaluation"]["loss"]) for entry in entries if "evaluation" in entry]
    assert logged == [(each.step, each.loss) for each in found.evaluations]
    assert [entry["step"] for entry in entries] == [0, 1, 2, 2, 3, 4]


def test_what_cannot_be_evaluated_is_refused_before_any_step(here: Path, pool: RankPool) -> None:
    asked, words = RunOptions(steps=4, eval_every=1), str(here / "words.py")
    plan = planned(here, "words", [1])
    with pytest.raises(ModelError, match=r"defines no evaluation_dataset\(\); add a function that returns a map-style"):
        run(plan, words, asked, pool=pool)
    unflushed = plan.model_copy(update={"weight_policy": "stash"})
    with pytest.raises(UsageError, match="`eval_every` takes a flush, which weight policy stash has none of"):
        run(unflushed, words, asked, pool=pool)
    plan = planned(here, "words", [2], more="def evaluation_dataset():\n    return [dataset()[0]] * 5\n")
    with pytest.raises(UsageError, match="leaves 1 samples for its last micro-batch, which the 2 replicas"):
        run(plan, words, asked, pool=pool)
    with pytest.raises(ModelError, match=r"hf:config.json: has no evaluation_dataset\(\); profile it with `data`"):
        UserModel("hf:config.json", Path("config.json"), "", lambda: None, {}).dataset("evaluation_dataset")
    with pytest.raises(UsageError, match="`eval_every` must be at least 1"):
        RunOptions(steps=4, eval_every=0)
