"""Models of the Transformers library that teams train, in threads or in rank processes, and a pairwise cover of both.

    differences(family_case("gpt2", "sdpa", folder), variant, folder)

What one rank a replica ends with is the truth: that it trains as a plain loop does is shown elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from autopar.formats.plan import Plan
from autopar.options.train import TrainSettings
from autopar.ranks.pool import RankPool
from autopar.runtime.job import DEFAULTS
from families import EAGER
from in_teams import in_teams
from suite.tiers import pair_cover
from training_cases import STEPS, Case, make_case, own_part, train

FILE = """
import torch
from families import VOCABULARY, example_of, family

batch, objective = example_of({name!r})


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        sample = {{}}
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                sample[name] = torch.rand(tensor.shape[1:], generator=chance, dtype=tensor.dtype)
            else:
                most = 7 if name == "labels" else VOCABULARY
                sample[name] = torch.randint(3, most, tensor.shape[1:], generator=chance)
        return sample


def model():
    return family({name!r}, {attention!r}).double()


def dataset():
    return Samples()


def loss(output, batch):
    return objective(output, batch)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
"""
NAMES = ("gpt2", "llama", "llama-2", "qwen2", "mistral", "gemma", "phi3", "phi3-2", "neox", "opt", "bert", "t5", "vit")
CLOSE = 1e-12
SINGLE = {"gemma": 1e-7}
"""Those whose norms compute in float32 whatever the model does: slices add their gradients up in another order."""


class Layout(NamedTuple):
    """Replicas and ranks of each, by group of devices."""

    widths: tuple[int, ...]
    sizes: tuple[int, ...]


class Variant(NamedTuple):
    """A model, and how teams train it."""

    name: str
    attention: str
    layout: Layout
    sequence: bool
    schedule: tuple[str, int]
    """With the number of model chunks."""
    recompute: bool
    shard: str


FACTORS: Mapping[str, Sequence[Any]] = {
    "name": NAMES,
    "attention": ("eager", "sdpa"),
    "layout": (Layout((1,), (2,)), Layout((1, 1), (2, 4)), Layout((2, 1), (2, 2)), Layout((1, 2), (4, 2))),
    "sequence": (False, True),
    "schedule": (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)),
    "recompute": (False, True),
    "shard": ("none", "optimizer", "gradients", "parameters"),
}


def pairwise_cover() -> list[Variant]:
    """Return variants in which every two values of two factors meet that may."""
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    possible = [each for each in every if is_possible(each)]
    return [Variant(**possible[at]) for at in pair_cover(possible)]


def is_possible(chosen: Mapping[str, Any]) -> bool:
    """Tell whether values go together: some models have no fused attention, replicas are what divides states."""
    if chosen.get("attention") == "sdpa" and chosen.get("name") in EAGER:
        return False
    layout = chosen.get("layout")
    return layout is None or max(layout.widths) > 1 or chosen.get("shard", "none") == "none"


def family_case(name: str, attention: str, folder: Path) -> Case:
    """Write a model file, and capture the model."""
    file = folder / f"{name.replace('-', '_')}_{attention}.py"
    return make_case(file, FILE.format(name=name, attention=attention))


def plan_of(case: Case, variant: Variant, *, teams: bool = True) -> Plan:
    """Return a variant's plan, or the same with one rank for each replica."""
    schedule, chunks = variant.schedule
    more = {"recompute": variant.recompute, "shard": variant.shard} if teams else {}
    alone = case.plan(variant.layout.widths, 2, 3, schedule, chunks=chunks, **more)
    if not teams:
        return alone
    groups = (next(at for at, each in enumerate(alone.groups) if stage in each) for stage in range(len(alone.stages)))
    return in_teams(case.graph, alone, [variant.layout.sizes[at] for at in groups], sequence=variant.sequence)


def train_threads(case: Case, plan: Plan, folder: Path, settings: TrainSettings = DEFAULTS) -> list[float]:
    """Train with ranks as threads, and keep what they end with."""
    return case.train(plan, folder, STEPS, settings)


def train_processes(pool: RankPool) -> Callable[[Case, Plan, Path], list[float]]:
    """Return what trains with rank processes, and keeps what they end with."""
    return partial(train, pool)


def largest_difference(plan: Plan, folder: Path, alone: Plan, truth: Path, what: str) -> float:
    """Return how far what ranks end with is from what single ranks do, relative to the largest of all."""
    files = [load_file(truth / f"{what}-{rank}") for rank in range(len(alone.devices))]
    whole = {name: each for file in files for name, each in file.items()}
    seen, apart = set[str](), 0.0
    for rank in range(len(plan.devices)):
        for name, each in load_file(folder / f"{what}-{rank}").items():
            seen.add(name)
            apart = max(apart, float((each - own_part(plan, rank, name, whole[name])).abs().max()))
    assert seen == whole.keys()
    return apart / max(float(each.abs().max()) for each in whole.values())


class Differences(NamedTuple):
    """How far a variant is from single ranks."""

    losses: float
    gradients: float
    parameters: float

    def within(self, variant: Variant) -> bool:
        """Tell whether that is within what is promised of the variant."""
        close = SINGLE.get(variant.name, CLOSE) if variant.sequence else CLOSE
        return self.losses < max(close, 1e-10) and self.gradients < close and (close > CLOSE or self.parameters < 1e-10)


def differences(
    case: Case, variant: Variant, folder: Path, trained: Callable[[Case, Plan, Path], list[float]] = train_threads
) -> Differences:
    """Train a variant, and what it is held against, in a folder that has no files yet, and compare them."""
    alone, plan = plan_of(case, variant, teams=False), plan_of(case, variant)
    assert any(stage.cuts for stage in plan.stages)
    truth, found = folder / "alone", folder / "teams"
    expected, losses = train_threads(case, alone, truth), trained(case, plan, found)
    apart = max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))
    each = (largest_difference(plan, found, alone, truth, what) for what in ("gradients", "parameters"))
    return Differences(apart, *each)


def thread_variants() -> Iterator[Variant]:
    """Yield what is tried of every model with ranks as threads: both kinds of attention, whole and in slices."""
    layouts = [(Layout((1,), (2,)), False), (Layout((1, 1), (2, 4)), False), (Layout((1, 1), (4, 4)), True)]
    for name, attention in product(NAMES, FACTORS["attention"]):
        for layout, sequence in layouts:
            if is_possible({"name": name, "attention": attention}):
                yield Variant(name, attention, layout, sequence, ("1f1b", 1), False, "none")
