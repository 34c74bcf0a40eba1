"""One contest: what ranks learn is what the plan's policy says, whatever the plan; trouble is a result."""

import random
from pathlib import Path

import pytest

from autopar.capture.cache.recall import build_and_capture
from autopar.capture.model.source import load
from autopar.capture.plain.loop import train_plainly
from autopar.errors import UsageError
from autopar.options.contest import ContestOptions
from autopar.runtime.stage.parameters import first_stages
from autopar.runtime.start import contest as room
from autopar.runtime.start.contest import check_host, contest
from dictated import dictate
from policy_cases import planned
from training_cases import text_of


def _drawn(folder: Path, seed: int) -> tuple[object, str]:
    """Return a plan of drawn depths, widths and micro-batches under a drawn policy, and its model."""
    draw = random.Random(seed)
    policy = draw.choice(["sync", "stash", "vertical-sync", "2bw"])
    micro_batches, stages = draw.randint(2, 4), draw.randint(2, 3)
    depths = [stages - at for at in range(stages)]
    widths = [draw.randint(1, 2) for _ in range(stages)]
    plan = planned(folder, draw.choice(["sgd", "adamw"]), policy, depths, micro_batches, widths=widths)
    return plan.model_copy(update={"seed": draw.randrange(100)}), str(folder / "model.py")


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(21))
def test_what_is_learned_is_what_the_policy_says_in_one_process(tmp_path: Path, seed: int) -> None:
    plan, model = _drawn(tmp_path, seed)
    found = contest(plan, model, None, ContestOptions(8))  # type: ignore[arg-type]
    user = load(model)
    stage_of = first_stages(plan, build_and_capture(user, plan.seed)[1])  # type: ignore[arg-type, attr-defined]
    truth = train_plainly(user, plan, 8, stage_of=stage_of)  # type: ignore[arg-type]
    assert (found.failure, found.diverged) == (None, None)
    assert found.loss == pytest.approx(truth.losses, rel=1e-12)
    assert found.step_s is not None
    assert found.peak_bytes is not None


@pytest.mark.slow
def test_replicas_that_take_mini_batches_in_turn_give_the_losses_of_all(tmp_path: Path) -> None:
    plan = planned(tmp_path, "sgd", "stash", [2, 2, 1], 1, widths=[2, 1, 2], turns=[0, 2])
    model = str(tmp_path / "model.py")
    found = contest(plan, model, None, ContestOptions(8))
    user = load(model)
    stage_of = first_stages(plan, build_and_capture(user, plan.seed)[1])
    assert found.failure is None
    assert found.loss == pytest.approx(train_plainly(user, plan, 8, stage_of=stage_of).losses, rel=1e-12)


@pytest.mark.slow
def test_the_plain_loop_learns_what_it_is_the_truth_of_and_is_measured(tmp_path: Path) -> None:
    plan, model = _drawn(tmp_path, 1)
    told = list[int]()
    asked = ContestOptions(5, double=True)
    found = contest(plan, model, None, asked, lambda step, _: told.append(step), is_plain=True)  # type: ignore[arg-type]
    assert found.loss == pytest.approx(train_plainly(load(model), plan, 5).losses, rel=1e-12)  # type: ignore[arg-type]
    assert told == [0, 1, 2, 3, 4]
    assert found.step_s
    assert found.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("is_plain", [True, False])
def test_what_diverges_or_fails_is_a_result(tmp_path: Path, is_plain: bool) -> None:
    text = text_of("mlp", WIDTHS=(64, 8, 8, 8, 8))
    rate = "\n\ndef optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=1e300)\n"
    raises = "\n\ndef loss(output, batch):\n    raise ValueError('no such loss')\n"
    for at, more in enumerate((rate, raises)):
        file = tmp_path / f"model{at}.py"
        file.write_text(text)
        user = load(str(file))
        plan = dictate(build_and_capture(user, 0)[1], user, (1, 1), 2, 8)
        file.write_text(text + more)
        update = {"model": plan.model.model_copy(update={"sha256": load(str(file)).sha256})}
        found = contest(plan.model_copy(update=update), str(file), None, ContestOptions(20), is_plain=is_plain)
        assert found.step_s is None
        if more == rate:
            assert found.failure is None
            assert "not finite" in str(found.diverged) or "the loss of step" in str(found.diverged)
            assert 0 < len(found.loss) < 20
        else:
            assert "no such loss" in str(found.failure)


def test_a_host_without_the_memory_or_the_devices_is_said_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = _drawn(tmp_path, 2)
    check_host(plan, ContestOptions(on="8xH100"))  # type: ignore[arg-type]
    monkeypatch.setattr(room, "available_bytes", lambda: 2**20)
    with pytest.raises(UsageError, match=r"emulating \d ranks takes about .* GiB, and this host has"):
        check_host(plan, ContestOptions(on="8xH100"))  # type: ignore[arg-type]
    gpus = plan.model_copy(update={"device_type": "cuda"})  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="`double`: GPUs are not compared in float64"):
        check_host(gpus, ContestOptions(double=True))
