"""What forwards write, and gradients that do not exist, are as in plain training: recomputed, cut and in flight."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import training_cases
from autopar.capture.plain.loop import train_plainly
from autopar.errors import CaptureError, FileError, ModelError
from autopar.runtime.start.workspace import fit_to_plan
from training_cases import Case, make_case

STEPS = 3
FILE = """
import torch
from torch import nn
{block}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = {first}, nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)
    def forward(self, x):
        {entry}
        x = self.first(x)
        for block in self.blocks: x = block(x)
        return self.head(x)
def model(): return Net().double()
def dataset():
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset({data}, torch.randint(0, 3, (90,), generator=generator))
def loss(output, batch): return nn.functional.cross_entropy(output, batch[-1])
def optimizer(parameters): return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
{listing}
"""
LISTING = "def layers(model): return [model.first, *model.blocks, model.head]"
FLOATS = "torch.randn(90, 6, generator=generator, dtype=torch.float64)"
INTEGERS = "torch.randint(0, 9, (90,), generator=generator)"
LINEAR = "nn.Linear(6, 6)"


def block(initial: str, forward: str) -> str:
    start = f"class Block(nn.Module):\n    def __init__(self): super().__init__(); {initial}\n"
    return f"{start}    def forward(self, x): {forward}"


MEAN = 'self.lin = nn.Linear(6, 6); self.register_buffer("mean", torch.zeros(6))'
SCALE = 'self.lin = nn.Linear(6, 6); self.register_buffer("scale", torch.ones(6))'
BLOCKS = {
    "spectral norm": block("self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))", "return self.lin(x)"),
    "old spectral norm": block("self.lin = nn.utils.spectral_norm(nn.Linear(6, 6))", "return self.lin(x).tanh()"),
    "average before reading": block(
        MEAN, "self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1); return self.lin(x - self.mean.clone()).tanh()"
    ),
    "average after reading": block(
        MEAN, "y = self.lin(x - self.mean).tanh(); self.mean.copy_(0.9 * self.mean + y.detach().mean(0)); return y"
    ),
    "saved for the backward": block(SCALE, "self.scale.mul_(0.9); return x + self.lin(x).tanh() * self.scale"),
    "written after a copy was read": block(
        SCALE, "y = x + self.lin(x).tanh() * self.scale.clone(); self.scale.mul_(0.9); return y"
    ),
    "a part of a buffer": block(
        SCALE, "self.scale[2:].mul_(0.9); return x + self.lin(x).tanh() * self.scale * self.scale"
    ),
    "a buffer of two names": block(
        f'{MEAN}; self.register_buffer("other", self.mean)',
        "self.mean.mul_(0.9).add_(x.detach().mean(0)); y = self.lin(x - self.other.clone()).tanh(); "
        "self.other.add_(0.1); return y * self.mean",
    ),
    "a counter": block(
        'self.lin = nn.Linear(6, 6); self.register_buffer("count", torch.zeros((), dtype=torch.int64))',
        "self.count.add_(1); return self.lin(x).tanh() / self.count",
    ),
    "statistics that only are kept": block(
        'self.lin = nn.Linear(6, 6); self.register_buffer("most", torch.zeros(6))',
        "torch.maximum(self.most, x.detach().amax(0), out=self.most); return self.lin(x).tanh()",
    ),
    "clamped parameter": block(
        "self.lin = nn.Linear(6, 6)", "_ = self.lin.weight.detach().clamp_(-0.3, 0.3); return self.lin(x).tanh() + x"
    ),
    "running statistics that are read": block(
        "self.norm = nn.BatchNorm1d(6); self.lin = nn.Linear(6, 6)",
        "y = self.norm(x); return self.lin(y).tanh() - self.norm.running_mean.clone()",
    ),
}
DETACHED = block("self.lin = nn.Linear(6, 6)", "return self.lin(x).tanh()")


def case(
    folder: Path, block: str, *, first: str = LINEAR, entry: str = "pass", data: str = FLOATS, listed: bool = False
) -> Case:
    listing = LISTING if listed else ""
    return make_case(
        folder / "model.py", FILE.format(block=block, first=first, entry=entry, data=data, listing=listing)
    )


def check(found: Case, folder: Path, *how: Any, **more: Any) -> None:  # noqa: ANN401
    """Train a plan in threads and plainly; gradients, where there are any, parameters and buffers are equal."""
    plan = found.plan(*how, **more)
    fit_to_plan(found.graph, plan, found.model)
    losses = found.train(plan, folder, STEPS)
    training_cases.check(plan, found.truth(plan, STEPS), folder, losses)


HOW = {"gpipe": False, "zb-h1": False, "listed": True}


@pytest.mark.some(8)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", sorted(BLOCKS))
@pytest.mark.reliability(43)
def test_buffers_and_parameters_that_forwards_write_train_as_in_one_process(
    kind: str, recompute: bool, how: str, tmp_path: Path
) -> None:
    if (kind, how) == ("old spectral norm", "listed"):
        pytest.skip("once it ran, it holds a weight that cannot be copied, as threads would have to")
    found = case(tmp_path, BLOCKS[kind], listed=HOW[how])
    writers = {layer.name: layer.writes for layer in found.graph.layers if layer.writes is not None}
    assert list(writers) == [f"blocks.{index}" for index in range(3)]
    again = {layer.name for layer in found.graph.layers if recompute}
    again -= {name for name, writes in writers.items() if writes.once}
    check(found, tmp_path, [1, 1], 3, 4, "gpipe" if HOW[how] else how, recompute=again)


@pytest.mark.parametrize("recompute", [False, True])
def test_written_inputs_and_buffers_assigned_anew_are_as_in_one_process(recompute: bool, tmp_path: Path) -> None:
    found = case(tmp_path, block(SCALE, "self.scale = self.scale * 0.9; return self.lin(x) * self.scale"), listed=True)
    check(found, tmp_path, [1, 1], 3, 4, recompute=recompute)
    found = case(tmp_path, DETACHED, entry="x.mul_(0.5).add_(1.0)")
    assert found.graph.layers[0].writes is not None
    assert found.graph.layers[0].writes.inputs == ("batch.0",)
    check(found, tmp_path, [1], 3, 4, recompute=recompute)


def test_limited_rows_and_modules_that_decide_train_as_the_model_does(tmp_path: Path) -> None:
    found = case(tmp_path, DETACHED, first="nn.Embedding(9, 6, max_norm=0.5)", data=INTEGERS)
    check(found, tmp_path, [1, 1], 2, 2)
    deciding = block(
        "self.lin = nn.Linear(6, 6)",
        "x = x.detach() if float(x.detach().sum()) > THRESHOLD else x; return self.lin(x).tanh()",
    )
    for threshold in (-1e9, 0.0):
        found = case(tmp_path, f"THRESHOLD = {threshold}\n\n\n{deciding}", listed=True)
        check(found, tmp_path, [1, 1, 1], 3, 4)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("listed", [False, True])
def test_no_gradient_stays_none_across_cuts_and_replicas(cut: int, schedule: str, listed: bool, tmp_path: Path) -> None:
    detaching = block("self.lin = nn.Linear(6, 6)", "return self.lin(x.detach()).tanh()")
    widths = [2, 1] if schedule == "1f1b" else [1, 1]
    check(case(tmp_path, detaching, listed=listed), tmp_path, widths, 3, 4, schedule, cuts=[cut])


@pytest.mark.reliability(41, 43)
def test_edited_plans_and_writes_to_others_are_refused(tmp_path: Path) -> None:
    found = case(tmp_path, BLOCKS["average before reading"])
    with pytest.raises(FileError, match=r"replicas of layer blocks.0, .* changes the buffer blocks.0.mean"):
        fit_to_plan(found.graph, found.plan([2, 1], 3, 4), found.model)
    clamped = case(tmp_path, BLOCKS["clamped parameter"])
    plan = clamped.plan([1, 1], 3, 4, recompute=True)
    with pytest.raises(FileError, match=r"recomputes layer blocks.0, .* the parameter blocks.0.lin.weight"):
        fit_to_plan(clamped.graph, plan, clamped.model)
    shared = block(MEAN, "self.mean.mul_(0.9); return self.lin(x)")
    text = case(tmp_path, shared, listed=True).file.read_text()
    sharing = "\n    model.blocks[1].mean = model.blocks[0].mean\n    return [model.first"
    with pytest.raises(ModelError, match=r"blocks.0 writes blocks.0.mean, which blocks.1 is given too"):
        make_case(tmp_path / "shared.py", text.replace(" return [model.first", sharing))
    drawing = block(
        "self.lin = nn.Linear(6, 6); self.generator = torch.Generator().manual_seed(3)",
        "return self.lin(x) + torch.empty_like(x).normal_(generator=self.generator)",
    )
    with pytest.raises(CaptureError, match="generator"):
        case(tmp_path, drawing)


@pytest.mark.parametrize("how", ["first", "average"])
@pytest.mark.parametrize("turns", [(), (0,)])
@pytest.mark.reliability(41)
def test_replicas_that_are_asked_for_have_equal_buffers_after_every_step(
    how: str, turns: tuple[int, ...], tmp_path: Path
) -> None:
    found = case(tmp_path, BLOCKS["average before reading"])
    plan = found.plan([2, 1], 4, 4, turns=turns).model_copy(update={"replicate_state": how})
    fit_to_plan(found.graph, plan, found.model)
    found.train(plan, tmp_path, STEPS)
    one, other = (load_file(tmp_path / f"buffers-{rank}") for rank in range(2))
    assert one.keys() == other.keys()
    truth = train_plainly(found.model, plan, STEPS)
    for name, value in one.items():
        assert torch.equal(value, other[name])
        assert torch.allclose(value, truth.buffers[name], rtol=1e-10), name
    for name, value in load_file(tmp_path / "parameters-0").items():
        assert torch.allclose(value, truth.parameters[name], rtol=1e-10, atol=1e-10), name


NUMBERS = "torch.complex(x.detach()[:, :4], x.detach()[:, 2:])"
WRITTEN = {
    "a mean of complex numbers": (
        "torch.zeros(4, dtype=torch.complex128)",
        f"self.NAME.mul_(0.9).add_({NUMBERS}.mean(0), alpha=0.1); y = self.NAME.clone(); "
        "x = x + torch.cat([y.real, y.imag[:2]])",
    ),
    "few digits": (
        "torch.zeros(4, dtype=torch.complex64)",
        f"self.NAME.mul_(0.9).add_({NUMBERS}.mean(0), alpha=0.1); x = x * self.NAME.clone().real.double().sum().exp()",
    ),
    "a complex number": (
        "torch.ones((), dtype=torch.complex128)",
        f"self.NAME.mul_(0.5j).add_({NUMBERS}.mean()); x = x - self.NAME.clone().abs()",
    ),
    "every other column of a table": (
        "torch.zeros(3, 8, dtype=torch.complex128)[:, ::2]",
        f"self.NAME.add_({NUMBERS}.var(0) * (1 + 2j)); x = x + self.NAME.clone().imag.sum()",
    ),
    "a mean": ("torch.zeros(6).double()", "self.NAME.mul_(0.9).add_(x.detach().mean(0)); x = x - self.NAME.clone()"),
    "a count": ("torch.zeros((), dtype=torch.int64)", "self.NAME.add_(1); x = x / self.NAME.clone()"),
    "a flag": ("torch.zeros(6, dtype=torch.bool)", "self.NAME.logical_or_(x.detach().amax(0) > 1); x = x + 1"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.reliability(41)
def test_buffers_of_any_numbers_are_averaged_over_replicas_as_in_one_process(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    # Of complex numbers in every case.
    kinds = [rng.choice(list(WRITTEN)[:4]), *rng.sample(list(WRITTEN), rng.randint(0, 2))]
    made = [f"self.register_buffer('b{at}', {WRITTEN[kind][0]})" for at, kind in enumerate(kinds)]
    acts = [WRITTEN[kind][1].replace("NAME", f"b{at}") for at, kind in enumerate(kinds)]
    text = block("; ".join(["self.lin = nn.Linear(6, 6)", *made]), "; ".join([*acts, "return self.lin(x).tanh()"]))
    # Torch exports no mean over any number of complex rows.
    found, width = case(tmp_path, text, listed=True), rng.choice((2, 3))
    turns = (0,) if rng.random() < 0.5 else ()
    plan = found.plan([width, 1], 2 * width, 6, rng.choice(("gpipe", "1f1b")), turns=turns)
    plan = plan.model_copy(update={"replicate_state": rng.choice(("average", "average", "first"))})
    fit_to_plan(found.graph, plan, found.model)
    found.train(plan, tmp_path, STEPS)
    truth, kept = (
        train_plainly(found.model, plan, STEPS),
        [load_file(tmp_path / f"buffers-{at}") for at in range(width)],
    )
    assert {name.rpartition(".")[2] for name in kept[0]} == {f"b{at}" for at in range(len(kinds))}
    for name, value in kept[0].items():
        assert all(torch.equal(value, other[name]) for other in kept)
        expected = truth.buffers[name]
        few = expected.dtype is torch.complex64
        # Files have complex numbers in two parts.
        mine = torch.view_as_complex(value) if expected.is_complex() else value
        torch.testing.assert_close(mine, expected, rtol=1e-5 if few else 1e-10, atol=1e-6 if few else 1e-12)
    exact = "few digits" not in kinds
    for name, value in load_file(tmp_path / "parameters-0").items():
        bound = 1e-10 if exact else 1e-5
        torch.testing.assert_close(value, truth.parameters[name], rtol=bound, atol=bound)
