"""Random scripts: a model, a loss, and what a script changes between steps, trained plainly or by a job.

A script is drawn from a number, twice: once for the plain loop, once for the job, so that neither sees what the other
changes. Whatever draws random numbers in forward is either off or drops all (rates of 0 and 1), so that they agree.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.capture.layers.export import capture
from autopar.capture.model.batch import given_model
from autopar.errors import AutoparError
from autopar.ranks.context import RankContext
from dictated import dictate
from in_teams import in_teams

Batch = tuple[torch.Tensor, ...]
ROWS, WIDTH, STEPS = 8, 6, 6
SETTINGS = {"weight": 0.0, "smooth": 0.0}
SCALE = 1.0


class Frozen(nn.BatchNorm1d):
    """Stays in evaluation mode: statistics of micro-batches are not those of mini-batches."""

    def train(self, mode: bool = True) -> nn.BatchNorm1d:
        return super().train(False)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.norm = Frozen(WIDTH)
        self.gain, self.options = 1.0, {"residual": 1.0, "skip": [1.0, 0.5]}
        self.register_buffer("temperature", torch.ones(1))
        self.calls_of_nobody = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.drop(torch.tanh(self.linear(x))) * self.gain / self.temperature
        return self.norm(made) + self.options["residual"] * x * self.options["skip"][0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)
        self.sharpness = torch.tensor(1.0, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.sharpness


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0

    def forward(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output, batch[1]) + self.weight * output.square().mean()


@dataclass
class Trainer:
    """Whose method is the loss."""

    weight: float = 0.0
    epoch: int = 0
    step: int = 0
    history: list[float] = field(default_factory=list)

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        late = max(0.0, self.epoch - 1.0)
        return F.cross_entropy(output, batch[1]) + (self.weight + late) * output.abs().mean()


def _penalty(output: torch.Tensor, batch: Batch, weight: float = 0.0) -> torch.Tensor:
    return F.cross_entropy(output, batch[1]) + weight * output.square().mean()


@dataclass
class Script:
    """What a script has, and what it does before a step."""

    model: Net
    loss: Callable[..., torch.Tensor]
    changes: Sequence[tuple[int, str, Callable[[], None]]]
    """At which step, what it is called, and the change itself."""
    optimizer: Callable[..., torch.optim.Optimizer]
    layers: Callable[[nn.Module], list[nn.Module]] | None
    """Lists the layers, where they are not captured."""

    def before(self, step: int) -> None:
        for at, _, change in self.changes:
            if at == step:
                change()


def draw(number: int) -> Script:
    """Return a script; equal numbers give equal ones that share nothing."""
    chance = random.Random(number)
    torch.manual_seed(number)
    model, state = Net().double(), {"weight": 0.0}
    settings, trainer, criterion = SimpleNamespace(weight=0.0), Trainer(), Criterion()
    scale = 1.0

    def closing(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return scale * F.cross_entropy(output, batch[1]) + state["weight"] * output.square().mean()

    def configured(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output, batch[1], label_smoothing=settings.weight) * SETTINGS["smooth"] + output.mean()

    kept, factor = chance.sample(range(3), chance.randint(1, 3)), chance.randint(0, 2)

    def several(output: torch.Tensor, batch: Batch) -> dict[str, Any]:
        """Return the entropy of some classes, each divided by its own number, a weighted mean, and a figure."""
        entropy, found = F.cross_entropy(output, batch[1], reduction="none"), dict[str, Any]()
        for label in kept:
            mask = batch[1] == label
            found[f"of {label}"] = (entropy * mask).sum(), mask.sum() * (1.0, 0.5, 2.0)[factor]
        found["size"] = (0.1 + state["weight"]) * output.square().mean()
        right = (output.argmax(1) == batch[1]).double()
        return {**found, "log": {"right": right.mean(), "of 0 logged": (right.sum(), (batch[1] == 0).sum())}}

    partly = functools.partial(_penalty, weight=0.0)

    def rescale() -> None:
        nonlocal scale
        scale *= 0.5

    value = lambda: chance.choice([0.0, 0.1, 0.25, 0.5])  # noqa: E731
    amounts = [value() for _ in range(STEPS)]
    losses: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], None]]] = {
        "terms": (several, lambda at: state.update(weight=amounts[at])),
        "closure": (closing, lambda at: state.update(weight=amounts[at])),
        "scale": (closing, lambda at: rescale()),
        "namespace": (configured, lambda at: setattr(settings, "weight", amounts[at])),
        "global": (configured, lambda at: SETTINGS.update(smooth=1.0 + amounts[at])),
        "method": (trainer.loss, lambda at: setattr(trainer, "weight", amounts[at])),
        "epoch": (trainer.loss, lambda at: setattr(trainer, "epoch", at // 2)),
        "module": (criterion, lambda at: setattr(criterion, "weight", amounts[at])),
        "partial": (partly, lambda at: partly.keywords.update(weight=amounts[at])),
    }
    SETTINGS["smooth"] = 1.0
    named = chance.choice(sorted(losses))
    loss, anneal = losses[named]
    model.train()
    changes: list[tuple[int, str, Callable[[], None]]] = []
    if chance.random() < 0.8:
        changes += [(at, named, functools.partial(anneal, at)) for at in range(STEPS) if chance.random() < 0.7]
    for _ in range(chance.randint(0, 4)):
        block, at = chance.choice(list(model.blocks)), chance.randrange(STEPS)
        amount, rate, mode = value(), chance.choice([0.0, 1.0]), chance.random() < 0.5
        kinds: dict[str, Callable[[], object]] = {
            "rate": lambda block=block, rate=rate: setattr(block.drop, "p", rate),
            "gain": lambda block=block, amount=amount: setattr(block, "gain", 1.0 + amount),
            "item": lambda block=block, amount=amount: block.options.update(residual=amount),
            "deep": lambda block=block, amount=amount: block.options["skip"].__setitem__(0, amount),
            "buffer": lambda block=block, amount=amount: block.temperature.fill_(1.0 + amount),
            "tensor": lambda amount=amount: model.sharpness.fill_(1.0 + amount),
            "other tensor": lambda amount=amount: setattr(model, "sharpness", torch.tensor(1.0 + amount).double()),
            "mode": lambda block=block, mode=mode: block.drop.train(mode),
            "whole": lambda: model.eval() if model.training else None,
            "freeze": lambda block=block: block.linear.requires_grad_(False),
            "thaw": lambda block=block: block.linear.requires_grad_(True),
            "counter": lambda block=block: setattr(block, "calls_of_nobody", block.calls_of_nobody + 1),
        }
        kind = chance.choice(sorted(kinds))
        changes.append((at, kind, kinds[kind]))
    rate = chance.choice([0.05, 0.1])
    kind = chance.choice([torch.optim.SGD, torch.optim.AdamW])
    # Several quotients are of captured layers alone.
    listed = named != "terms" and chance.random() < 0.2
    return Script(model, loss, changes, functools.partial(kind, lr=rate), _layers if listed else None)


class _Head(nn.Module):
    """Ends the list of layers, and reads a tensor of the model's."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.head, self.net = net.head, [net]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * self.net[0].sharpness


def _layers(net: Any) -> list[nn.Module]:  # noqa: ANN401
    return [*net.blocks, _Head(net)]


def batches(number: int) -> Iterator[Batch]:
    """Yield two epochs of a loader that shuffles."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(ROWS * STEPS // 2, WIDTH, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 3, (len(inputs),), generator=generator)
    torch.manual_seed(number)
    data = torch.utils.data.TensorDataset(inputs, targets)
    loader = torch.utils.data.DataLoader(data, ROWS, shuffle=True)
    for _ in range(2):
        yield from map(tuple, loader)


def train_plainly(number: int) -> dict[str, Any]:
    script = draw(number)
    model, losses = script.model, []
    optimizer = script.optimizer(model.parameters())
    for step, batch in enumerate(batches(number)):
        script.before(step)
        if not model.training:
            # It trains all the same.
            model.train()
        optimizer.zero_grad()
        value = _plain_value(script.loss(model(batch[0]), batch))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    return {"losses": losses, "weights": _sums(model.state_dict())}


def _plain_value(found: Any) -> torch.Tensor:  # noqa: ANN401
    """Return the loss of a whole mini-batch."""
    if isinstance(found, torch.Tensor):
        return found
    terms = [each if isinstance(each, tuple) else (each, 1.0) for name, each in found.items() if name != "log"]
    return torch.stack([value / count if count else 0.0 * value for value, count in terms]).sum()


def _sums(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value.double().abs().sum()) for name, value in state.items()}


def turning_plan(number: int, count: int) -> autopar.Plan:
    """Return a plan whose last stage has two replicas that take so many micro-batches in turn."""
    script = draw(number)
    user = given_model(script.model, next(batches(number)), loss=script.loss)
    plan = dictate(capture(user, user.build()), user, [1, 2], count, ROWS // count, turns=[1])
    return autopar.Plan.parse(plan.dumps(), Path("plan.json"))


def plan_of(number: int, given: Sequence[int] = ()) -> autopar.Plan:
    """Return a plan of one to four ranks for a script, or of stages of given widths."""
    chance = random.Random(f"plan {number}")
    script = draw(number)
    user = given_model(script.model, next(batches(number)), loss=script.loss, layers=script.layers)
    graph = capture(user, user.build())
    widths = given or chance.choice([[1], [1], [1, 1], [2], [1, 2], [2, 1], [1, 1, 1]])
    count = chance.choice([1, 2, 4])
    shard = chance.choice(["none", "none", "parameters"]) if max(widths) > 1 else "none"
    # Fewer micro-batches than stages cannot fill a pipeline that divides backwards.
    schedule = chance.choice(["1f1b", "gpipe", "zb-h1"] if count >= len(widths) and shard == "none" else ["1f1b"])
    recompute = chance.random() < 0.3
    options: dict[str, Any] = {"shard": shard, "schedule": schedule, "recompute": recompute and schedule != "zb-h1"}
    if shard == "none" and schedule != "zb-h1" and chance.random() < 0.3:
        options["turns"] = [stage for stage, width in enumerate(widths) if width > 1]
    plan = dictate(graph, user, widths, count, ROWS // count, **options)
    sizes = [
        chance.choice([1, 2]) if graph.portable and not given and sum(widths) < 3 and shard == "none" else 1
        for _ in widths
    ]
    teams = in_teams(graph, plan, sizes) if max(sizes) > 1 else plan
    if all(stage.cuts for stage in teams.stages if stage.tensor_parallel > 1):
        plan = teams
    return autopar.Plan.parse(plan.dumps(), Path("plan.json"))


def train_by_a_job(context: RankContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train a script; a refusal is what it says."""
    number, plan = arguments["number"], autopar.Plan.parse(arguments["plan"], Path("plan.json"))
    script, losses = draw(number), []
    started = next(batches(number))
    try:
        functions: dict[str, Any] = {"loss": script.loss, "optimizer": script.optimizer, "layers": script.layers}
        with autopar.materialize(script.model, plan, started, **functions) as job:
            for step, batch in enumerate(batches(number)):
                script.before(step)
                metrics = job.step(batch)
                losses.append(metrics.loss)
                trained = [value for name, value in metrics.losses.items() if name not in ("right", "of 0 logged")]
                assert not trained or abs(sum(trained) - metrics.loss) < 1e-12
                if step == STEPS // 2:
                    job.evaluate(batch)
            state = job.state_dict()
    except AutoparError as error:
        return {"refused": str(error), "changes": [name for _, name, _ in script.changes]}
    return {"losses": losses, "weights": None if state is None else _sums(state)}


def change_alone(context: RankContext, arguments: dict[str, Any]) -> str:
    """Change a number on one rank."""
    script, plan = draw(3), autopar.Plan.parse(arguments["plan"], Path("plan.json"))
    batch = next(batches(3))
    with autopar.materialize(script.model, plan, batch, loss=script.loss, optimizer=script.optimizer) as job:
        job.step(batch)
        script.model.blocks[0].gain = 1.0 + context.rank
        try:
            job.step(batch)
        except AutoparError as error:
            return str(error)
    return ""


def difference(plainly: dict[str, Any], by_job: dict[str, Any]) -> float:
    """Return the largest relative difference of losses, and of sums of what is trained."""
    pairs = list(zip(plainly["losses"], by_job["losses"], strict=True))
    pairs += [(value, by_job["weights"][name]) for name, value in plainly["weights"].items()]
    return max(abs(one - other) / max(1e-3, abs(one)) for one, other in pairs)
