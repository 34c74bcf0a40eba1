"""Examples trained by rank processes and by a plain loop."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._pytree import tree_map_only

from autopar.capture.graph import LayerGraph
from autopar.capture.layers.export import capture
from autopar.capture.model.batch import model_arguments, named_outputs
from autopar.capture.model.source import UserModel, load
from autopar.capture.plain.loop import train_plainly
from autopar.capture.plain.mini_batch import PlainRun
from autopar.formats.plan import Plan
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace
from dictated import dictate
from paths import EXAMPLES
from rank_jobs import real
from threads import own, train_in_threads

STEPS = 5
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# The GPT keeps its twelve blocks and is made narrow, so that many plans can be tried.
NARROW = {
    "gpt": {"WIDTH": 32, "CONTEXT": 16},
    "resnet": {"WIDTHS": (4, 8, 8), "BLOCKS_PER_WIDTH": 1},
    "mlp": {"WIDTHS": (64, 48, 96, 24, 64)},
}


OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9)",
    "adamw": "torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)",
}


FILE = """
import importlib.util
import torch

spec = importlib.util.spec_from_file_location("base", {base!r})
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
for name, value in {narrow!r}.items():
    setattr(base, name, value)
data = base.dataset()


class Double(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        sample = data[index]
        cast = lambda value: value.double() if value.is_floating_point() else value
        return {{k: cast(v) for k, v in sample.items()}} if isinstance(sample, dict) else tuple(map(cast, sample))


def model():
    return base.model().double()


def dataset():
    return Double()


loss = base.loss


def optimizer(parameters):
    return {optimizer}
"""


@dataclass(frozen=True)
class Case:
    """A model file, captured."""

    file: Path
    model: UserModel
    graph: LayerGraph
    state: dict[str, torch.Tensor]
    """Parameters and buffers that training begins with."""

    @cached_property
    def workspace(self) -> Path:
        """Prepare what ranks read: it does not depend on how the model is cut."""
        folder = self.file.with_suffix("")
        folder.mkdir()
        Workspace(folder).prepare(self.model, self.plan((1,), 1, 2), None)
        return folder

    def plan(self, *how: Any, **more: Any) -> Plan:  # noqa: ANN401
        """Dictate a plan: widths, micro-batches, rows, and more."""
        return dictate(self.graph, self.model, *how, **more)

    def train(self, plan: Plan, folder: Path, steps: int = STEPS, *how: Any, **more: Any) -> list[float]:  # noqa: ANN401
        """Train with ranks as threads; files of what they keep are in the folder, which is made."""
        folder.mkdir(exist_ok=True)
        return train_in_threads(plan, self.graph, self.model, self.state, folder, steps, *how, **more)

    def truth(self, plan: Plan, steps: int = STEPS, device: str = "cpu") -> PlainRun:
        """Train plainly what a plan trains, divided as its stages divide it; the same once only."""
        divided = frozenset((layer, stage.rows, stage.division) for stage in plan.stages for layer in stage.layers)
        size = plan.micro_batches, plan.micro_batch_size
        key = self.file.read_text(), *size, steps, plan.seed, plan.precision, divided, device
        if key not in _TRUTHS:
            cuda = {"get_rng_state": torch.cuda.get_rng_state, "set_rng_state": torch.cuda.set_rng_state}
            if device == "cuda":
                torch.cuda.init()
                cuda["default_generator"] = torch.cuda.default_generators[0]
            with patch.multiple(torch, **cuda) if device == "cuda" else nullcontext():
                found = train_plainly(_computing_on(self.model, device, plan.precision), plan, steps)
            every = (found.gradients, found.parameters, found.buffers)
            tensors = ({name: each.cpu() for name, each in of.items() if each is not None} for of in every)
            _TRUTHS[key] = PlainRun(found.losses, *tensors)
        return _TRUTHS[key]

    def evaluate(self, state: dict[str, torch.Tensor], rows: range) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the plain model's loss and outputs of some samples, with these weights."""
        model, batch = self.model.build(), self.model.load_batch(self.model.dataset(), rows)
        model.load_state_dict(state, strict=False)
        with torch.no_grad():
            positional, named = model_arguments(model.eval(), batch, has_loss=True)
            output = model(*positional, **named)
            loss = self.model.loss(output, batch)  # type: ignore[misc]
        outputs = {name: value for name, value in named_outputs(output).items() if value.dim()}
        return float(loss[0] / loss[1] if isinstance(loss, tuple) else loss), outputs


_TRUTHS: dict[object, PlainRun] = {}


def _computing_on(user: UserModel, device: str, precision: str) -> UserModel:
    """Return a file whose model is that of seed 0, on a device; under autocast in half precision.

    There losses are scaled, and gradients scaled back, as torch's scaler does where nothing overflows.
    """
    dtype, scale = TYPES.get(precision), 2.0**16 if precision == "fp16" else 1.0

    def model() -> nn.Module:
        torch.manual_seed(0)
        made = user.factory().to(device)  # type: ignore[attr-defined]
        if dtype is not None:
            made.forward = torch.autocast(device, dtype)(made.forward)
            for each in made.parameters():
                each.register_hook(lambda gradient: gradient / scale)
        return made

    def loss(output: object, batch: object) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return scale * user.functions["loss"](output, batch)

    def collate(samples: Sequence[object]) -> object:
        return tree_map_only(torch.Tensor, lambda value: value.to(device), user.collate(samples))

    more = {"collate": collate} if device != "cpu" else {}
    more |= {"loss": loss} if dtype is not None else {}
    return replace(user, factory=model, functions={**user.functions, **more})


_FOLDER = tempfile.TemporaryDirectory(prefix="autopar-models-")
_CAPTURED: dict[str, tuple[LayerGraph, dict[str, torch.Tensor]]] = {}


def make_case(file: Path, text: str | None = None) -> Case:
    """Capture a file, into which text is written if there is any; what has the same text is captured once.

    Each case has a graph of its own: it holds parameters.
    """
    if text is not None:
        file.write_text(text)
    model, text = load(str(file)), file.read_text()
    if text not in _CAPTURED:
        module, fresh = model.build(0), model.build(0)
        state = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
        _CAPTURED[text] = capture(model, module), {name: value.detach().clone() for name, value in state.items()}
    graph, state = _CAPTURED[text]
    return Case(file, model, own(graph), state)


@cache
def text_case(name: str, text: str) -> Case:
    """Return the case of a file of this name, which is written once."""
    folder = Path(_FOLDER.name) / f"{len(list(Path(_FOLDER.name).iterdir()))}"
    folder.mkdir()
    return make_case(folder / f"{name}.py", text)


def text_of(example: str, optimizer: str = OPTIMIZERS["adamw"], **narrow: object) -> str:
    """Return the file of a narrow example in float64, narrower still if that is asked for."""
    base = str(EXAMPLES / f"{example}.py")
    return FILE.format(base=base, narrow={**NARROW[example], **narrow}, optimizer=optimizer)


def train(pool: RankPool, case: Case, plan: Plan, folder: Path, steps: int = STEPS, **settings: Any) -> list[float]:  # noqa: ANN401
    """Train with rank processes; return the losses' parts summed over them."""
    folder.mkdir(exist_ok=True)
    paths = {"model": str(case.file), "workspace": str(case.workspace), "folder": str(folder)}
    arguments = {"plan": plan.dumps(), "steps": steps, "settings": settings, **paths}
    parts = pool.run("rank_jobs:train_and_keep", arguments, ranks=len(plan.devices))
    return [sum(step) for step in zip(*parts, strict=True)]  # type: ignore[call-overload]


def check(
    plan: Plan, truth: PlainRun, folder: Path, losses: Sequence[float] | None = None, *, every: bool = False
) -> None:
    """Hold what ranks keep against plain training, and their losses, if they are given; ``every`` replica's buffers."""
    assert losses is None or losses == pytest.approx(truth.losses, rel=1e-12)
    largest = max(_largest(gradient) for gradient in truth.gradients.values())
    seen: set[str] = set()
    for rank in range(len(plan.devices)):
        gradients = load_file(folder / f"gradients-{rank}")
        for name, gradient in gradients.items():
            off = gradient - own_part(plan, rank, name, real(truth.gradients[name]))
            assert _largest(off) <= 1e-12 * largest, f"gradient of {name} on rank {rank}"
        parameters = load_file(folder / f"parameters-{rank}")
        assert gradients.keys() == parameters.keys() & truth.gradients.keys()
        seen |= parameters.keys()
        for name, parameter in parameters.items():
            expected = own_part(plan, rank, name, real(truth.parameters[name]))
            assert parameter.shape == expected.shape
            bound = 1e-10 * _largest(expected) + 1e-10
            assert _largest(parameter - expected) <= bound, f"parameter {name} on rank {rank}"
        if every or plan.ownership.ranks[rank].replica == 0:
            # Running statistics are the first replica's.
            for name, value in load_file(folder / f"buffers-{rank}").items():
                torch.testing.assert_close(value, truth.buffers[name], rtol=1e-10, atol=1e-10, msg=name)
    # What no layer uses is nobody's.
    assert truth.gradients.keys() <= seen <= truth.parameters.keys()


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def trains_as_plain(pool: RankPool, case: Case, plan: Plan, folder: Path, steps: int = 2) -> None:
    """Train with rank processes, as plainly."""
    losses = train(pool, case, plan, folder, steps)
    check(plan, case.truth(plan, steps), folder, losses if case.graph.loss == "mean" else None)


def bits(plan: Plan, folder: Path) -> dict[str, torch.Tensor]:
    """Return all that ranks have kept, by kind, rank and name."""
    kinds = ("gradients", "parameters", "buffers")
    files = [f"{kind}-{rank}" for kind in kinds for rank in range(len(plan.devices))]
    return {f"{file}: {name}": value for file in files for name, value in load_file(folder / file).items()}


def same_bits(plan: Plan, one: Path, other: Path) -> None:
    """Hold what ranks have kept in one folder against another's."""
    found, expected = bits(plan, one), bits(plan, other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def own_part(plan: Plan, rank: int, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return what a rank has of a parameter that its team may cut, by the plan's own numbers."""
    own = plan.ownership.ranks[rank]
    for stage in (plan.stages[index] for index in own.stages):
        for cut in (cut for cut in stage.cuts if cut.parameter == name):
            indices = [at for start, stop in cut.parts[own.part] for at in range(start, stop)]
            return whole.index_select(cut.dim, torch.tensor(indices))
    return whole
