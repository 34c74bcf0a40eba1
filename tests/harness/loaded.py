"""Random datasets, collates and plans, whose mini-batches loaders read and every rank by itself; both are compared."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from autopar.capture.graph import TensorSpec
from autopar.capture.model.batch import named_tensors
from autopar.capture.model.source import UserModel, load
from autopar.errors import AutoparError, FileError
from autopar.formats.plan import Plan
from autopar.formats.profile import ModelSource
from autopar.options.train import Last
from autopar.ranks.pool import RankPool
from autopar.runtime.data import Batch, Batches, ShareLoader, steps_of_epoch
from autopar.runtime.loaders.client import LoadedShares
from autopar.runtime.loaders.server import loading
from autopar.runtime.loaders.work import ReadingDivision
from drawn_plans import chain, make
from fake_copies import FakeCopies

HEAD = """
import random
import numpy as np
import torch

def model():
    return torch.nn.Identity()

class Drawn(torch.utils.data.Dataset):
    def __init__(self):
        self.scale = np.random.rand() + random.random()

    def __len__(self):
        return {samples}

    def __getitem__(self, index):
        with open({reads!r}, "ab", 0) as file:
            file.write(b".")
        if index in {bad!r}:
            raise KeyError(f"sample {{index}}")
        x = torch.rand(3, 2, 4) * self.scale + random.random() + np.random.rand()
        width = 2 if index in {ragged!r} else 3
        y = torch.full((width,), float(index)) + torch.rand(width)
        return {sample}

def dataset():
    return Drawn()
"""
SAMPLES = (
    "(x, y)",
    "{'x': x, 'y': y.to(torch.bfloat16), 'index': index}",
    "[x.permute(1, 2, 0), (y, x[0, 0] > 1)]",
    "{'nested': {'z': torch.complex(y, y)}, 'x': x.permute(2, 0, 1).contiguous().permute(1, 2, 0)}",
    "y",
)
COLLATES = (
    "",
    "def collate(samples):\n    samples = samples[::-1] if random.random() < 0.5 else samples\n"
    "    return torch.utils.data.default_collate(samples)\n",
    "def collate(samples):\n    made = torch.utils.data.default_collate(samples)\n"
    "    rows = torch.rand(2, len(samples)).t()\n"
    "    wide = torch.rand(len(samples), 3, 2, 2).to(memory_format=torch.channels_last)\n"
    "    return made, rows, wide, torch.rand(1).expand(len(samples), 3), torch.empty(len(samples), 0)\n",
)
WHOLE = "whole_batches = True\n"


@dataclass(frozen=True)
class LoadingCase:
    """What is loaded, and how."""

    user: UserModel
    plan: Plan
    specs: tuple[tuple[TensorSpec, ...], ...]
    """By rank, the inputs that its stages read."""
    last: Last
    loaders: int
    first: int
    """The step that loading begins with."""
    steps: int
    copies: bool
    """Whether ranks have memory of their own to which mini-batches are copied."""

    @property
    def reads(self) -> int:
        """How many samples have been read so far."""
        file = self.user.path.with_name(self.user.path.stem.replace("drawn", "reads"))
        return file.stat().st_size

    @property
    def needed(self) -> int:
        """How many a host has to read."""
        readers = tuple(rank for rank, specs in enumerate(self.specs) if specs)
        whole, collates = self.user.whole_batches, self.user.collates
        division = ReadingDivision(self.plan, readers, self.loaders, collates or whole, whole)
        last = self.steps * max((stage.period for stage in self.plan.stages), default=1)
        asked = {step for rank in readers for step in steps_of(self, rank)}
        return sum(
            task.stop - task.start
            for step in range(self.first, self.first + last)
            if step in asked
            for task in division.tasks(step, self.first)
        )


def draw(seed: int, folder: Path) -> LoadingCase:
    """Draw a dataset, a collate and a plan; some samples cannot be read, or are of another shape, at times."""
    rng = random.Random(seed)
    plan, samples = draw_plan(rng), rng.randint(24, 60)
    few = lambda chance: rng.sample(range(samples), 1) if rng.random() < chance else []  # noqa: E731
    reads = str(folder / f"reads_{seed}")
    text = HEAD.format(samples=samples, reads=reads, bad=few(0.25), ragged=few(0.2), sample=rng.choice(SAMPLES))
    collate = rng.choice(COLLATES)
    file = folder / f"drawn_{seed}.py"
    file.write_text(text + collate + (WHOLE if rng.random() < 0.2 else ""))
    user = load(str(file))
    plan = plan.model_copy(update={"model": ModelSource(source=str(file), sha256=user.sha256), "seed": seed})
    last: Last = rng.choice(["drop", "pad"])
    specs = _specs(user)
    of_rank = [tuple(spec for spec in specs if rng.random() < 0.6) for _ in plan.devices]
    ahead = steps_of_epoch(user, samples, plan, last)
    return LoadingCase(
        user, plan, tuple(of_rank), last, rng.randint(1, 4), rng.randrange(2 * ahead), 4, rng.random() < 0.5
    )


def draw_plan(rng: random.Random) -> Plan:
    """Draw a plan of up to three stages, whose replicas split micro-batches or take turns."""
    micro_batches, rows, stages = rng.randint(1, 4), rng.randint(2, 5), rng.randint(1, 3)
    shares = []
    for _ in range(stages):
        edges = sorted(rng.sample(range(1, rows), rng.randint(0, min(2, rows - 1))))
        shares.append(tuple(stop - start for start, stop in zip([0, *edges], [*edges, rows], strict=True)))
    plan = make("1f1b", micro_batches, shares, [1] * stages, chain(stages))
    policy = rng.choice(["sync", "stash"])
    placed = []
    for stage in plan.stages:
        turning = {"division": "round-robin", "shares": (rows,) * len(stage.devices)}
        changed = stage.model_copy(update=turning if rng.random() < 0.3 else {})
        most = micro_batches if policy == "sync" else 6 * (stages - len(placed))
        placed.append(changed.model_copy(update={"warmup": max(1, most // changed.period)}))
    found = plan.model_copy(update={"weight_policy": policy, "stages": tuple(placed)})
    try:
        return Plan.parse(found.dumps(), Path("plan.json"))
    except FileError:
        # More in flight than the stage before lets through.
        return draw_plan(rng)


def _specs(user: UserModel) -> list[TensorSpec]:
    """Return what a model's inputs would be captured as; not as samples are that are of another shape."""
    dataset = user.dataset()
    for first in range(4):
        try:
            values = named_tensors(user.load_batch(dataset, [first]))
        except AutoparError:
            continue
        return [
            TensorSpec(name, None, (), tuple(value.shape[1:]), 0, value.dtype, gradient=False)
            for name, value in values.items()
        ]
    raise AssertionError("no sample can be read")


Outcome = Batch | str
"""A mini-batch, or what was said of it."""


def in_loaders(case: LoadingCase, pool: RankPool, folder: Path) -> list[list[Outcome]]:
    """Return what every rank is given by loaders, step by step."""
    ranks = range(len(case.plan.devices))
    found: list[list[Outcome]] = [[] for _ in ranks]

    def work(rank: int) -> None:
        def opened() -> Batches:
            copies = FakeCopies() if case.copies else None
            place = case.user, case.plan, rank, case.specs[rank]
            return Batches(LoadedShares(*place, folder, case.last, copies), copies)

        found[rank] = _outcomes(case, rank, opened)

    reading = {"plan": case.plan.dumps(), "model": str(case.user.path), "data": None, "last": case.last}
    with loading(pool, folder, case.loaders, ranks, {**reading, "double": False, "several_hosts": False}) as come:  # type: ignore[typeddict-item]
        come()
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return found


def alone(case: LoadingCase) -> list[list[Outcome]]:
    """Return what every rank reads by itself, step by step."""

    def opened(rank: int) -> Batches:
        loader = ShareLoader(case.user, case.plan, rank, case.specs[rank], torch.device("cpu"), case.last)
        return Batches(loader, None)

    return [_outcomes(case, rank, partial(opened, rank)) for rank in range(len(case.plan.devices))]


def steps_of(case: LoadingCase, rank: int) -> range:
    """Return the mini-batches that a rank has."""
    own = case.plan.ownership.ranks[rank]
    return range(case.first + own.turn, case.first + case.steps * own.turns, own.turns)


def _outcomes(case: LoadingCase, rank: int, opened: Callable[[], Batches]) -> list[Outcome]:
    try:
        batches = opened()
    except AutoparError as error:
        return [str(error)]
    found, steps = list[Outcome](), steps_of(case, rank)
    for at, step in enumerate(steps):
        try:
            found.append(batches.load(step, steps[at + 1 :], case.first))
        except AutoparError as error:
            found.append(f"{error.exit_code}: {error}")
        batches.look_ahead()
    batches.close()
    return found


def differences(one: Sequence[Sequence[Outcome]], other: Sequence[Sequence[Outcome]]) -> list[str]:
    """Return where ranks were given other things, or told otherwise."""
    found = []
    for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if len(mine) != len(theirs):
            found.append(f"rank {rank}: {len(mine)} mini-batches for {len(theirs)}")
        for step, (left, right) in enumerate(zip(mine, theirs, strict=False)):
            if isinstance(left, str) or isinstance(right, str):
                if left != right:
                    found.append(f"rank {rank}, its mini-batch {step}: {left!r} for {right!r}")
            else:
                found += [f"rank {rank}, its mini-batch {step}: {each}" for each in _unlike(left, right)]
    return found


def _unlike(left: Batch, right: Batch) -> list[str]:
    if [list(each) for each in left] != [list(each) for each in right]:
        return ["other names"]
    pairs = [(m, name, a[name], b[name]) for m, (a, b) in enumerate(zip(left, right, strict=True)) for name in a]
    return [
        f"micro-batch {m}: {name}"
        for m, name, mine, theirs in pairs
        if mine.dtype != theirs.dtype
        or not torch.equal(mine, theirs)
        or mine.stride() != torch.empty_like(theirs).stride()
    ]
