"""The model of the tests of scripts, and what their ranks run."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from torch import nn

import autopar
from autopar.capture.graph import LayerGraph
from autopar.capture.layers.export import capture
from autopar.capture.model.batch import given_model
from autopar.capture.model.source import UserModel
from autopar.errors import AutoparError
from autopar.ownership import Shard
from autopar.ranks.context import RankContext
from dictated import dictate
from in_teams import in_teams
from labelled import loss, sgd

LEARNING_RATE = 0.1
BATCH = 12


def make_model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(BATCH, 5, dtype=torch.float64, generator=generator)
        return inputs, torch.randint(0, 3, (BATCH,), generator=generator)

    return [batch() for _ in range(count)]


def make_random_model() -> nn.Module:
    """Return a model that draws, and has running statistics."""
    layers = [*make_model(), nn.BatchNorm1d(3), nn.Dropout(0.5)]
    return nn.Sequential(*layers[:4], nn.Dropout(0.5), *layers[4:]).double()


def described(make: Callable[[], nn.Module] = make_model) -> UserModel:
    return given_model(make(), batches(1)[0], loss=loss)


@cache
def captured(make: Callable[[], nn.Module]) -> tuple[UserModel, LayerGraph]:
    user = described(make)
    return user, capture(user, user.build())


def script_plan(
    widths: list[int],
    shard: Shard | Sequence[Shard] = "none",
    turns: Sequence[int] = (),
    sizes: Sequence[int] = (),
    make: Callable[[], nn.Module] = make_model,
    count: int | None = None,
) -> autopar.Plan:
    (user, graph), count = captured(make), count or (1 if turns else 2)
    plan = dictate(graph, user, widths, count, BATCH // count, shard=shard, turns=turns)
    plan = in_teams(graph, plan, sizes) if sizes else plan
    return autopar.Plan.parse(plan.dumps(), Path("plan.json"))


def train_and_refuse(context: RankContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train, with batches between that ranks refuse; write what rank 0 is given."""
    plan = autopar.Plan.parse(arguments["plan"], Path("plan.json"))
    model = make_model()
    if context.rank:
        # Rank 0's values count.
        model = model.to("meta")
    folder, said = Path(arguments["folder"]), []
    steps = batches(arguments["steps"])
    job = autopar.materialize(model, plan, steps[0], loss=loss, optimizer=sgd)
    inputs, targets = steps[0]
    reads = context.rank in (*plan.stages[0].devices, *plan.stages[-1].devices)
    wrong = (inputs[:5], targets[:5]) if context.rank == 0 else (inputs, targets)
    for batch in (wrong, (inputs + context.rank, targets)):
        try:
            job.step(batch)
        except AutoparError as error:
            said.append(str(error))
    losses = [job.step(batch if reads else None).loss for batch in steps]
    evaluated, predicted = job.evaluate(steps[0]), job.predict(steps[0])
    state = job.state_dict()
    job.save_weights(folder)
    if predicted is not None:
        save_file(predicted, folder / "predicted.safetensors")
    if state is not None:
        save_file(state, folder / "state.safetensors")
    job.close()
    return {"losses": losses, "evaluated": evaluated, "said": said}


def train_with_outputs(context: RankContext, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a model that draws; return every step's metrics, and rank 0's loss of the outputs, where it was given them.

    One step in two has outputs, which must change nothing of what is trained.
    """
    plan, found = autopar.Plan.parse(arguments["plan"], Path("plan.json")), list[dict[str, Any]]()
    scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    functions: dict[str, Any] = {"loss": loss, "optimizer": sgd, "scheduler": scheduler}
    with autopar.materialize(make_random_model(), plan, **functions, clip_norm=1e3) as job:
        for step, batch in enumerate(batches(arguments["steps"])):
            began_s = time.perf_counter()
            metrics = job.step(batch, outputs=arguments["outputs"] and step % 2 == 1)
            took_s, known = time.perf_counter() - began_s, metrics.outputs is not None
            assert not known or context.rank == 0
            found.append(
                {
                    "loss": metrics.loss,
                    "again": loss(metrics.outputs["output"], batch).item() if known else None,
                    "rates": metrics.learning_rates,
                    "norm": metrics.gradient_norm,
                    "seconds": dict(metrics.seconds),
                    "fits": sum(metrics.seconds.values()) <= took_s,
                }
            )
    return found


def train_averaged(context: RankContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Go on from a checkpoint to a step, save one, and write what rank 0 is given of the weights that are used."""
    plan, folder = autopar.Plan.parse(arguments["plan"], Path("plan.json")), Path(arguments["folder"])
    steps = batches(arguments["until"])
    with autopar.materialize(make_model(), plan, steps[0], loss=loss, optimizer=sgd) as job:
        begun, evaluated = job.load(folder / "saved"), list[float]()
        losses = []
        for step in range(begun, arguments["until"]):
            losses.append(job.step(steps[step]).loss)
            # Weights go on as if nobody had looked at their average.
            evaluated.append(job.evaluate(steps[0]))
        evaluated.append(job.evaluate(steps[0]))
        state = job.state_dict()
        job.save(folder / "saved", wait=True)
        job.save_weights(folder / "weights")
        if state is not None:
            save_file(state, folder / "state.safetensors")
        return {"losses": losses, "evaluated": evaluated[-2:], "notes": job.notes}


def train_between(context: RankContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Load what is in a folder, train to a step with momentum and a scheduler, save after every step."""
    plan, folder = autopar.Plan.parse(arguments["plan"], Path("plan.json")), Path(arguments["folder"])
    steps = batches(arguments["until"])

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    with autopar.materialize(make_model(), plan, steps[0], loss=loss, optimizer=sgd, scheduler=scheduler) as job:
        begun = job.load(folder)
        losses, drawn = [], float(torch.rand(()))
        for step in range(begun, arguments["until"]):
            losses.append(job.step(steps[step]).loss)
            torch.manual_seed(step)
            job.save(folder, wait=step % 2 == 0)
        said = ""
        try:
            job.load(folder)
        except AutoparError as error:
            said = str(error)
        return {"begun": begun, "losses": losses, "drawn": drawn, "said": said, "notes": job.notes}


def train_unflushed(context: RankContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train without flushes, and evaluate in between; return (step, loss) of what ended in steps and in drains."""
    plan, folder = autopar.Plan.parse(arguments["plan"], Path("plan.json")), Path(arguments["folder"])
    steps, plainly = batches(arguments["steps"]), partial(torch.optim.SGD, lr=LEARNING_RATE)
    with autopar.materialize(make_model(), plan, steps[0], loss=loss, optimizer=plainly) as job:
        ended, drained = [], []
        for step, batch in enumerate(steps):
            if step == arguments["drains_at"]:
                drained += [(each.step, each.loss) for each in job.drain()]
                job.evaluate(steps[0])
            made = job.step(batch)
            ended += [] if made is None else [(made.step, made.loss)]
        drained += [(each.step, each.loss) for each in job.drain()]
        state = job.state_dict()
        if state is not None:
            save_file(state, folder / "state.safetensors")
    return {"ended": ended, "drained": drained}


def draw_and_shuffle(act: Callable[[object, int], object], seed: int) -> list[float]:
    """Go through three epochs of a loader that shuffles, as scripts do; return what was drawn by then, step by step."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    inputs, targets = map(torch.cat, zip(*batches(3), strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), BATCH, shuffle=True)
    found = []
    for step, batch in enumerate(batch for _ in range(3) for batch in loader):
        act(batch, step)
        found += [float(batch[0][0, 0]), random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    return found


def train_shuffled(context: RankContext, arguments: dict[str, Any]) -> list[float]:
    """Train so, and do between steps whatever a job can do."""
    plan, folder, model = autopar.Plan.parse(arguments["plan"], Path("plan.json")), arguments["folder"], make_model()
    with ExitStack() as left:
        begun: list[Any] = []

        def act(batch: object, step: int) -> None:
            if not begun:
                begun.append(left.enter_context(autopar.materialize(model, plan, loss=loss, optimizer=sgd)))
            (job,) = begun
            job.step(batch)
            more = [lambda: job.evaluate(batch), lambda: job.predict(batch), job.state_dict, lambda: job.save(folder)]
            more[step % 4]()

        return draw_and_shuffle(act, arguments["seed"])


def set_up_with_trouble(context: RankContext, arguments: dict[str, Any]) -> str:
    """Set up a job, with trouble on rank 1 alone; return what this rank's call raises."""
    plan, how = autopar.Plan.parse(arguments["plan"], Path("plan.json")), arguments["how"] if context.rank == 1 else ""

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if how == "raises":
            raise ZeroDivisionError("by 0")
        if how == "stands still":
            time.sleep(4 * arguments["timeout_s"])
        end_s = time.process_time() + 1.5 * arguments["timeout_s"] * (how == "works")
        while time.process_time() < end_s:
            pass
        return sgd(parameters)

    model: Any = make_model() if how != "has no model" else "a model"
    clip_norm = -1.0 if how == "has a bad option" else None
    more = {"loss": loss, "optimizer": optimizer, "clip_norm": clip_norm, "timeout_s": arguments["timeout_s"]}
    try:
        autopar.materialize(model, plan, batches(1)[0], **more).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
