"""Runs with loaders, with real processes: they train the same weights, and leave nothing behind however they end."""

from pathlib import Path

import pytest

from autopar.errors import TrainingError
from autopar.options.train import RunOptions
from autopar.runtime.checkpoint.weights import read
from autopar.runtime.start.launch import run
from launched import alive, processes_in, until
from training_cases import Case, make_case

DRAWN = """
import os, random, signal, time, numpy as np, torch
END = {end!r}
class Drawn(torch.utils.data.Dataset):
    def __init__(self): self.scale = np.random.rand()
    def __len__(self): return 26
    def __getitem__(self, index):
        if index == 17 and END:
            os.kill(getattr(os, END)(), signal.SIGKILL)
            time.sleep(600)
        x = torch.rand(4) + random.random() + np.random.rand() * self.scale
        return x, x.sum(0, keepdim=True)
def model(): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
def dataset(): return Drawn()
def loss(output, batch): return (output - batch[1]).square().mean()
def collate(samples):
    x = torch.stack([x for x, _ in samples]) + torch.rand(len(samples), 1)
    return x, x.sum(1, keepdim=True)
"""


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Case:
    monkeypatch.chdir(tmp_path)
    return make_case(tmp_path / "drawn.py", DRAWN.format(end=getattr(request, "param", "")))


@pytest.mark.core
@pytest.mark.slow
def test_weights_are_the_same_bit_for_bit_also_from_the_middle_of_an_epoch_on(case: Case, tmp_path: Path) -> None:
    plan, settings = case.plan((2, 1), 2, 4, shares=[[1, 3], [4]]), {"last": "pad"}

    def trained(name: str, steps: int, **more: object) -> None:
        run(plan, str(case.file), RunOptions(steps, save=tmp_path / name, **settings, **more))  # type: ignore[arg-type]

    trained("alone", 7)
    for steps in (2, 7):
        trained(f"loaded-{steps}", steps, checkpoint=tmp_path / "checkpoints", resume=True, loaders=2)
    one, other = (read(tmp_path / name, case.state) for name in ("alone", "loaded-7"))
    assert one.keys() == other.keys()
    assert all(value.equal(other[name]) for name, value in one.items())
    until(lambda: not any(map(alive, processes_in(tmp_path))))


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("getpid", r"loader \d \(of 2\) was killed by SIGKILL .* while it read samples of step \d, micro-batch \d"),
        ("getppid", r"the process that deals out the loaders' work has ended"),
    ],
    indirect=["case"],
)
def test_a_loader_that_is_lost_ends_the_run_which_says_so_and_leaves_nothing(
    case: Case, said: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=rf"rank \d \(stage \d, step \d, micro-batch \d\): {said}"):
        run(case.plan((1, 1), 2, 4), str(case.file), RunOptions(4, loaders=2))
    until(lambda: not any(map(alive, processes_in(tmp_path))))
