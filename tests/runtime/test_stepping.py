"""Each rank's optimizer does what one for the whole model would do, or is refused by name before the first step."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.capture.model.source import stage_traits
from autopar.capture.plain.loop import train_plainly
from autopar.errors import FileError, ModelError, UsageError
from autopar.options.train import RunOptions
from autopar.ownership import Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.weights import read, shapes
from autopar.runtime.start.launch import run
from autopar.runtime.update import check_settings, left_out, whole_settings
from paths import MODELS
from training_cases import Case, make_case

FILE = MODELS / "grouped.py"
STEPS = 3
BY_IDENTITY = """
def optimizer(parameters):
    names = {each: name for name, each in MODEL.named_parameters()} if MODEL is not None else {}
    parameters = list(parameters)
    biases = [each for each in parameters if names.get(each, "").endswith("bias")]
    return grouped(biases, [each for each in parameters if not names.get(each, "").endswith("bias")])
"""
BY_PLACE = """
def optimizer(parameters):
    first, second, *others = parameters
    return grouped([first, second], others)
"""
BY_COUNT = """
def optimizer(parameters):
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=0.1 / len(parameters))
"""
BY_COUNT_AND_DELAY = """
def optimizer(parameters, delay):
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=0.1 / len(parameters) ** delay)
"""
SCHEDULED_BY_PLACE = """
def optimizer(parameters):
    parameters = list(parameters)
    groups = [each for each in (parameters[:4], parameters[4:]) if each]
    return torch.optim.SGD([{"params": each} for each in groups], lr=0.1)
def scheduler(optimizer):
    rates = [lambda step: 1.0, lambda step: 0.5**step]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rates[: len(optimizer.param_groups)])
"""
OTHERS = "\ndef optimizer(parameters): return torch.optim.SGD((MODEL or model()).parameters(), lr=0.1)\n"
LEAVES_OUT_BY_PLACE = "\ndef optimizer(parameters): return torch.optim.SGD(list(parameters)[1:], lr=0.1)\n"
CLIPS = """
class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1e-2)
        super().step()
def optimizer(parameters): return Clipping(parameters, lr=0.1)
"""
NOISY = """
import random
class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for each in (each for group in self.param_groups for each in group["params"]):
            each.add_(torch.randn_like(each), alpha=random.random())
def optimizer(parameters): return Noisy(parameters, lr=0.1)
"""
BY_SHAPE = """
def optimizer(parameters):
    parameters = list(parameters)
    return grouped([each for each in parameters if each.dim() < 2], [each for each in parameters if each.dim() > 1])
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step])
"""
TENSORS = """
def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2, dtype=torch.float64), betas=(0.8, 0.9))
def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4)
"""
NO_BIASES = """
def optimizer(named_parameters):
    return torch.optim.AdamW([each for name, each in named_parameters if not name.endswith("bias")], lr=1e-2)
"""


def _case(folder: Path, text: str) -> Case:
    return make_case(folder / "model.py", FILE.read_text() + text)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("text", "widths", "shard"),
    [
        ("", (1, 1), "none"),
        ("", (2, 1), "parameters"),
        ("", (1, 2), "optimizer"),
        (BY_SHAPE, (1, 2), "none"),
        (TENSORS, (1, 1), "none"),
        (NO_BIASES, (2, 1), "none"),
        (BY_PLACE, (1,), "none"),
        (CLIPS, (2,), "none"),
        (NOISY, (1,), "none"),
        (NOISY, (2,), "none"),
    ],
)
def test_groups_by_name_or_shape_train_as_the_plain_loop(
    text: str, widths: Sequence[int], shard: Shard, pool: RankPool, tmp_path: Path
) -> None:
    case = _case(tmp_path, text)
    plan, file = case.plan(widths, 2, 6, shard=shard), case.file
    outcome = run(plan, str(file), RunOptions(steps=STEPS, save=tmp_path / "saved"), pool=pool)
    found = read(tmp_path / "saved", shapes(tmp_path / "saved"))
    truth = train_plainly(case.model, case.plan((1,), 2, 6), STEPS).parameters
    assert found.keys() == truth.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, truth[name], rtol=1e-10, atol=1e-10, msg=name)
    left = [note for note in outcome.report.notes if "leaves out" in note]
    assert len(left) == (2 if text == NO_BIASES else 0)
    assert all("the optimizer leaves out" in note and "bias and" in note for note in left)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BY_IDENTITY, r"gives \S*bias weight_decay=0.5 when it is given the parameters of rank \d, and"),
        (BY_PLACE, r"gives \S+ weight_decay=0.\d when it is given the parameters of rank \d, and weight"),
        (BY_COUNT, r"gives \S+ lr=\S+ when it is given the parameters of rank \d, and lr=0.00\d+ when it is given all"),
        (BY_COUNT_AND_DELAY, r"gives \S+ lr=\S+ when it is given the parameters of rank \d, and lr=\S+ when it is"),
        (SCHEDULED_BY_PLACE, r"gives \S+ lr=\S+ in step 1 when it is given the parameters of rank \d, and lr=\S+ when"),
        (OTHERS, r"optimizer\(\) steps \d+ parameters that it was not given, the first of shape \(6, 6\)"),
        (LEAVES_OUT_BY_PLACE, r"does not step \S+ when it is given the parameters of rank \d, and does when it is"),
    ],
)
def test_what_a_rank_would_do_otherwise_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    case = _case(tmp_path, text)
    user, module = case.model, case.model.build(0)
    trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    plan = case.plan([1, 1], 2, 2, warmup=[2, 1]).model_copy(update={"weight_policy": "stash"})
    whole = whole_settings(user, module, case.graph, plan)
    assert whole is not None
    refusals = []
    for rank, part in enumerate((trained[:9], trained[9:])):
        # As ranks have them: of the same names and values, and no others' objects.
        given = {name: nn.Parameter(each.detach().clone()) for name, each in part}
        try:
            traits = stage_traits(plan, user.optimizer_options)[rank]
            left_out(user.make_optimizer(given.items(), traits), given, user, whole)
            check_settings(user, given, whole, rank, traits)
        except ModelError as error:
            refusals.append(str(error))
    assert refusals
    assert all(re.search(said, refusal) and "named_parameters" in refusal for refusal in refusals)


TOGETHER = r"the optimizer's step {}.* 2 groups of devices.* `max_stages=1`"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OTHERS, r"optimizer\(\) steps \d+ parameters that it was not given"),
        (CLIPS, TOGETHER.format("takes all parameters together")),
        (NOISY, TOGETHER.format("draws random numbers")),
    ],
)
def test_a_run_is_refused_before_the_first_step(text: str, said: str, pool: RankPool, tmp_path: Path) -> None:
    case = _case(tmp_path, text)
    with pytest.raises((FileError, UsageError), match=said):
        run(case.plan((1, 1), 2, 6), str(case.file), RunOptions(steps=1, save=tmp_path / "saved"), pool=pool)
    assert not (tmp_path / "saved").exists()
