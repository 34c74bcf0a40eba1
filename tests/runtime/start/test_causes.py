"""Whatever an error says, and wherever it is raised: the rank, its place and the whole cause are said, in one line."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autopar.errors import AutoparError, FileError, TrainingError, first_line, printable
from autopar.formats.program import Action
from autopar.formats.report import BlackBox, RankActions
from autopar.options.train import RunOptions
from autopar.ranks.failure import Failure, is_of_connection
from autopar.ranks.pool import RankPool
from autopar.runtime.device import is_out_of_memory
from autopar.runtime.interpret import located_error
from autopar.runtime.start.launch import run
from autopar.runtime.update import _stepping
from drawn_models import model_case
from odd_errors import HEAD, ODD_ERRORS, odd_error
from training_cases import make_case

PLACES = {
    "a layer": r"rank \d \(stage \d, step \d, F\d@\d\): layer \d: ",
    "a backward": r"rank \d \(stage \d, step \d, B\d@\d\): ",
    "a sample": r"rank \d \(stage \d, step \d, micro-batch \d\): .*/raising.py:\d+: dataset\(\)\[17\] raised ",
    "collate": r"rank \d \(stage \d, step \d, micro-batch \d\): .*/raising.py:\d+: collate raised ",
    "the optimizer": r"rank \d \(stage \d, step \d, U@\d\): the optimizer's step raised ",
    "the scheduler": r"rank \d \(stage \d, step \d, U@\d\): the scheduler's step raised ",
    "set-up": r".*/raising.py:\d+: optimizer raised ",
}
MODEL = (
    HEAD
    + """
from pathlib import Path
import torch, torch.distributed as dist
from torch import library
count = 0
def come(place):
    global count
    if place == PLACE and (dist.is_initialized() or "autopar-load" in Path("/proc/self/comm").read_text()):
        count += 1
        if count > (0 if PLACE == "set-up" else 4):
            raise ERROR
@library.custom_op("raising::LAYER", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    come("a layer")
    return x.clone()
op.register_fake(torch.empty_like)
def setup(ctx, inputs, output): pass
def backward(ctx, gradient):
    come("a backward")
    return gradient
op.register_autograd(backward, setup_context=setup)
class Through(torch.nn.Module):
    def forward(self, x): return op(x)
class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        come("the optimizer")
        return super().step(closure)
class Scheduler(torch.optim.lr_scheduler.ConstantLR):
    def step(self, *arguments):
        come("the scheduler")
        super().step(*arguments)
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, index):
        if PLACE == "a sample" and index == 17:
            raise ERROR
        return torch.rand(4), torch.rand(1)
def model(): return torch.nn.Sequential(Through(), torch.nn.Linear(4, 4), Through(), torch.nn.Linear(4, 1))
def dataset(): return Samples()
def loss(output, batch): return (output - batch[1]).square().mean()
def collate(samples):
    come("collate")
    return torch.utils.data.default_collate(samples)
def optimizer(parameters):
    come("set-up")
    return Optimizer(parameters, lr=0.1)
def scheduler(optimizer): return Scheduler(optimizer)
"""
)
# Every error comes about somewhere, and one of several lines everywhere.
PAIRS = [(place, list(ODD_ERRORS)[at]) for at, place in enumerate(PLACES)]
PAIRS += [(place, name) for (place, _), name in zip(PAIRS, list(ODD_ERRORS)[len(PLACES) :], strict=False)]


@pytest.mark.some(2)
@pytest.mark.parametrize(("place", "name"), PAIRS)
@pytest.mark.reliability(9)
def test_where_user_code_raises_is_said_with_the_whole_cause(
    place: str, name: str, tmp_path: Path, living_pool: Callable[[], RankPool]
) -> None:
    made, words = ODD_ERRORS[name]
    number = PAIRS.index((place, name))
    text = MODEL.replace("PLACE", repr(place)).replace("ERROR", made).replace("LAYER", f"layer_{number}")
    case = make_case(tmp_path / "raising.py", text)
    box, loaders = tmp_path / "box.json", 2 if place == "collate" else 0
    asked = RunOptions(8, black_box=box, loaders=loaders)
    with pytest.raises(TrainingError if place != "set-up" else FileError) as raised:
        run(case.plan([1, 1], 2, 4), str(case.file), asked, pool=living_pool() if not loaders else None)
    said = str(raised.value)
    assert re.match(PLACES[place], said), said
    assert all(each in said for each in words), said
    assert printable(said) == said
    # Of what fails before the first action, there are no last ones.
    if box.exists() or place not in ("set-up", "a sample", "collate"):
        assert said == f"{BlackBox.load(box).message}; `autopar show {box}` shows the last actions of every rank"


@pytest.mark.parametrize("name", ODD_ERRORS)
@pytest.mark.reliability(9)
def test_an_error_of_any_text_crosses_processes_and_files_whole(name: str, tmp_path: Path) -> None:
    error, words = odd_error(name), ODD_ERRORS[name][1]
    plan, action, cpu = model_case("resumed").plan([1, 1], 2, 4), Action("F", 1, 3), torch.device("cpu")
    with pytest.raises(TrainingError, match=r"the optimizer's step raised ") as stepping, _stepping("optimizer"):
        raise error
    located = [located_error(each, "rank 1 (here)", plan, [action], cpu) for each in (error, stepping.value)]
    for each in (error, *located):
        failure = Failure(**json.loads(json.dumps(Failure.of(each).as_dict())))
        assert all(word in printable(failure.message) for word in words)
        again = failure.as_error("rank 1: ")
        assert again.exit_code == 5
        said = printable(str(again))
        BlackBox(message=said, date="now", ranks=(RankActions(rank=0, doing="here"),)).save(tmp_path / "box.json")
        assert BlackBox.load(tmp_path / "box.json").message == said
        assert not is_out_of_memory(each)
        assert not is_of_connection(each)
    assert first_line(error).isprintable()


@pytest.mark.slow
@pytest.mark.reliability(6)
def test_setting_up_ends_where_it_stands_still_and_not_where_it_takes_its_time(
    tmp_path: Path, living_pool: Callable[[], RankPool]
) -> None:
    spin = "[None for _ in iter(lambda: __import__('time').process_time() < end, False)]"
    busy = f"(end := __import__('time').process_time() + 2.0) and {spin} and RuntimeError('behind it')"
    for number, (made, said) in enumerate(
        (
            ("__import__('time').sleep(600)", r"rank \d \(setting up\) made no progress for 1 s; raise `timeout_s`"),
            (busy, r".*raising_1.py:\d+: optimizer raised RuntimeError: behind it"),
        )
    ):
        text = MODEL.replace("PLACE", repr("set-up")).replace("ERROR", made).replace("LAYER", f"set_up_{number}")
        case = make_case(tmp_path / f"raising_{number}.py", text)
        began_s = time.monotonic()
        with pytest.raises(AutoparError, match=said):
            run(case.plan([1, 1], 2, 4), str(case.file), RunOptions(8, timeout_s=1.0), pool=living_pool())
        assert time.monotonic() - began_s < 100.0
