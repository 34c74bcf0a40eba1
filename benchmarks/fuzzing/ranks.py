"""Ranks: trains a plan with ranks as threads of this process, or as processes, and keeps what they end with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from autopar.capture import UserModel, load
from autopar.errors import AutoparError
from autopar.formats.plan import Plan
from autopar.ranks.context import RankContext
from autopar.ranks.failure import PeerLostError
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.runtime.data import ShareLoader
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.stage.parameters import Team, whole
from autopar.runtime.stage.stage import Segment
from autopar.runtime.start.worker import build
from autopar.runtime.start.workspace import Workspace
from autopar.runtime.update import Update

__all__ = ["HungError", "Kept", "in_processes", "in_threads", "train"]

PATIENCE_S = 60.0


class HungError(Exception):
    """Ranks wait for each other, or stand still."""


@dataclass(frozen=True)
class Kept:
    """What a rank ends with."""

    losses: list[tuple[float, float]]
    """Its part of every step's, and what that counted."""
    gradients: dict[str, torch.Tensor | None]
    """Of the first step."""
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    replica: int


def in_threads(plan: Plan, user: UserModel, folder: Path, steps: int) -> list[Kept]:
    """Train with ranks as threads, which take turns where they would share a generator of random numbers.

    Raises:
        HungError: a rank waited for another in vain.
        Exception: a rank failed; of several, what is no consequence of another's.
    """
    workspace, size = Workspace(folder), len(plan.devices)
    exchange, drawing = Exchange(PATIENCE_S), threading.RLock()
    kept: dict[int, Kept] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            context = RankContext(rank, size, rank, size, torch.device("cpu"), PATIENCE_S)
            with drawing:
                job = build(context, plan, user, workspace.graph(user, plan), workspace)
            kept[rank] = _trained(job, steps)
        except BaseException as error:
            errors.append(error)
            exchange.break_off()

    with ExitStack() as patches:
        connected: Callable[..., object] = lambda context, *_: InProcessTransport(exchange, context.rank)  # noqa: E731
        patches.enter_context(patch("autopar.runtime.start.worker.connect", connected))
        if any(layer.random for layer in workspace.graph(user, plan).layers):
            patches.enter_context(patch.object(Segment, "run", _one_at_a_time(Segment.run, drawing)))
            for name in ("sum", "gather", "reduce_scatter"):
                patches.enter_context(patch.object(Team, name, _leaving(getattr(Team, name), drawing)))
        patches.enter_context(patch.object(ShareLoader, "load", _one_at_a_time(ShareLoader.load, drawing)))
        patches.enter_context(patch.object(Update, "_apply", _one_at_a_time(Update._apply, drawing)))
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
    if any(thread.is_alive() for thread in threads):
        raise HungError("a rank stands still")
    _raise_first(errors)
    return [kept[rank] for rank in range(size)]


def _raise_first(errors: list[BaseException]) -> None:
    """Raise what is no consequence of another rank's failure, if ranks failed."""
    first = next((error for error in errors if not isinstance(_root(error), PeerLostError)), None)
    if first is not None:
        raise first
    if errors:
        raise HungError(str(errors[0])) from errors[0]


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _leaving(meet: Callable[..., object], lock: threading.RLock) -> Callable[..., object]:
    """Let others draw while a thread waits for them, and go on with the generator as it was."""

    def alone(*arguments: object) -> object:
        if not lock._is_owned():  # type: ignore[attr-defined]
            return meet(*arguments)
        state = torch.get_rng_state()
        lock.release()
        try:
            return meet(*arguments)
        finally:
            lock.acquire()
            torch.set_rng_state(state)

    return alone


def _one_at_a_time(run: Callable[..., object], lock: threading.RLock) -> Callable[..., object]:
    def alone(*arguments: object, **options: object) -> object:
        with lock:
            return run(*arguments, **options)

    return alone


def in_processes(pool: RankPool, plan: Plan, user: UserModel, folder: Path, steps: int) -> list[Kept]:
    """Train with ranks as processes.

    Raises:
        HungError: a rank stands still.
        AutoparError: a rank failed.
    """
    arguments = {"plan": plan.dumps(), "model": user.spec, "folder": str(folder), "steps": steps}
    try:
        size = len(plan.devices)
        pool.run("fuzzing.ranks:train", arguments, ranks=size, watch=Watch(PATIENCE_S))
    except AutoparError as error:
        if "stands still" in str(error) or "no progress" in str(error):
            raise HungError(str(error)) from error
        raise
    read: list[dict[str, Any]] = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]
    return [Kept(**each) for each in read]


def train(context: RankContext, arguments: Mapping[str, Any]) -> None:
    """Train as a rank process, and write what is kept."""
    plan, folder = Plan.parse(arguments["plan"], Path("plan.json")), Path(arguments["folder"])
    user, workspace = _loaded(arguments["model"]), Workspace(folder)
    job = build(context, plan, user, workspace.graph(user, plan), workspace)
    torch.save(vars(_trained(job, arguments["steps"])), folder / f"{context.rank}.pt")


@cache
def _loaded(model: str) -> UserModel:
    return load(model)


def _trained(job: Job, steps: int) -> Kept:
    if job.plan.weight_policy != "sync":
        return _trained_unflushed(job, steps)
    losses, gradients = list[tuple[float, float]](), dict[str, torch.Tensor | None]()
    for step in range(steps):
        record = job.step(step)
        losses.append((record.loss, record.count))
        if step == 0:
            gradients = _gradients_of(job)
    return _kept(job, losses, gradients)


def _trained_unflushed(job: Job, steps: int) -> Kept:
    """Train from a fill to a drain, behind what is to be synchronous; gradients are those that are updated with."""
    losses, first = list[tuple[float, float]](), job.plan.synchronous_steps
    gradients = dict[str, torch.Tensor | None]()

    def note(*_: object) -> None:
        if not gradients:
            gradients.update(_gradients_of(job))

    if job.update.optimizer is not None:
        job.update.optimizer.register_step_pre_hook(note)
    for start, stop in [*((step, step + 1) for step in range(first)), (first, steps)]:
        for step in range(start - job.plan.lead, stop):
            record = job.step(step, stop, start)
            if step >= start:
                losses.append((record.loss, record.count))
    return _kept(job, losses, gradients)


def _kept(job: Job, losses: list[tuple[float, float]], gradients: dict[str, torch.Tensor | None]) -> Kept:
    job.finish()
    parameters = {name: job.whole(name).clone() for name in job.parameters}
    gradients = {name: None if each is None else job.team.whole(name, each) for name, each in gradients.items()}
    return Kept(losses, gradients, parameters, {n: b.clone() for n, b in job.buffers.items()}, job.own.replica)


def _gradients_of(job: Job) -> dict[str, torch.Tensor | None]:
    """Return all gradients, a team's of parts; replicas that divide them ask together."""
    return {name: _copied(parameter.grad) for name, parameter in job.parameters.items()}


def _copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return all of a gradient; replicas that divide it ask together."""
    if gradient is None:
        return None
    gathered = whole(gradient)
    return gathered.to_dense() if gathered.is_sparse else gathered.clone()
