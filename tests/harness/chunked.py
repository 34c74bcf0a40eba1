"""Random candidates of schedules whose ranks run several stages, or whose backwards are in halves."""

import random

from autopar.formats.profile import Layer, Profile
from autopar.formats.stage import group_of, layout_of
from autopar.options.plan import PlanOptions
from autopar.planner.candidate import Candidate, CandidateStage, chunk_counts, plain
from autopar.planner.costs.model import CostModel
from autopar.schedules import SCHEDULES
from drawn import shares_of
from random_problems import launched, random_cluster, random_profile, two_kinds

OTHERS = tuple(name for name in SCHEDULES if not plain(name))


def halved(profile: Profile, seed: int) -> Profile:
    """Return a profile whose backwards were measured in halves, too; together they take about as long as the whole."""
    rng = random.Random(seed + 5_000_000)

    def split(layer: Layer) -> Layer:
        part = rng.choice([0.0, rng.uniform(0.2, 0.8), 1.0])
        halves = {"backward_input_s": part, "backward_weight_s": 1 - part}
        updates = [
            {name: share * cost.backward_s * rng.uniform(0.95, 1.2) for name, share in halves.items()}
            for cost in layer.costs
        ]
        costs = [cost.model_copy(update=update) for cost, update in zip(layer.costs, updates, strict=True)]
        return layer.model_copy(update={"costs": tuple(costs)})

    others = tuple(other.model_copy(update={"layers": tuple(map(split, other.layers))}) for other in profile.others)
    return profile.model_copy(update={"layers": tuple(map(split, profile.layers)), "others": others})


def random_costs(seed: int, most_devices: int = 6) -> CostModel:
    """Return costs of a random profile with halves, on one kind of device or two."""
    devices = random.Random(seed).randint(1, most_devices)
    profile, cluster = random_profile(seed, most_layers=10, batches=(2, 4, 6, 12)), random_cluster(seed, devices)
    if seed % 2:
        profile, cluster = two_kinds(profile, cluster, seed)
    profile = halved(profile, seed)
    # Hosts that launch what devices compute, of every third pair of seeds.
    profile = profile if seed // 2 % 3 else launched(profile, seed)
    return CostModel(profile, cluster, PlanOptions(gpus=devices))


def random_chunked(rng: random.Random, costs: CostModel, schedule: str) -> Candidate | None:
    """Return a candidate of a schedule, of any cuts, widths, shares, devices; None where there are too few layers."""
    layers, devices = costs.layer_count, len(costs.devices)
    chunks = rng.choice(chunk_counts(schedule))
    if layers < chunks:
        return None
    groups = rng.randint(1, min(layers // chunks, devices))
    micro_batches = rng.choice([number for number in range(1, costs.batch + 1) if costs.batch % number == 0])
    rows = costs.batch // micro_batches
    cuts = [0, *sorted(rng.sample(range(1, layers), groups * chunks - 1)), layers]
    widths = [1] * groups
    while sum(widths) < devices and rng.random() < 0.7:
        index = rng.randrange(groups)
        widths[index] = min(rows, widths[index] + 1)
    order = list(range(devices))
    if rng.random() < 0.3:
        rng.shuffle(order)
    taken, shares = [], []
    for width in widths:
        taken.append(tuple(order[:width]))
        order = order[width:]
        shares.append(shares_of(rng, rows, width))
    depths = rng.choice(list(SCHEDULES[schedule].warmups(groups, chunks, micro_batches).values()))
    stages = []
    for index, depth in enumerate(depths):
        group = group_of(layout_of(schedule), index, groups)
        recompute = tuple(layer for layer in range(cuts[index], cuts[index + 1]) if rng.random() < 0.2)
        shard = rng.choice(["none", "none", "optimizer", "gradients", "parameters"]) if widths[group] > 1 else "none"
        stages.append(
            CandidateStage(cuts[index], cuts[index + 1], taken[group], shares[group], depth, recompute, shard)
        )
    return Candidate(micro_batches, rows, schedule, tuple(stages))
