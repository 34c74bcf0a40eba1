"""Bytes of stages, all at once and of huge models, against one stage after the other."""

import random

import numpy as np
import pytest

from autopar.errors import FileError
from autopar.formats.plan import SHARDS
from autopar.formats.profile import Profile, SavedStorage, TiedParameter
from autopar.planner import PlanOptions, plan
from autopar.planner.costs.communication import Flows
from autopar.planner.costs.layers import LayerCosts
from autopar.planner.costs.memory import MemoryModel, PeakTerms, peak_of, state_of
from autopar.planner.costs.model import CostModel
from random_problems import gpt_profile, local_cluster, random_profile

SIZES = ("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes")


def divided(size: int, count: int) -> int:
    """Return the largest of so many parts."""
    return -(-size // count)


def tied_by(profile: Profile, size: int, optimizer: int) -> Profile:
    """Return a profile whose first and last layer share a parameter of so many bytes."""
    layers = list(profile.layers)
    for at in (0, len(layers) - 1):
        values = dict(zip(SIZES, (size, size, size, optimizer), strict=True))
        layers[at] = layers[at].model_copy(update=values)
    tied = TiedParameter(parameter="table", layers=(layers[0].name, layers[-1].name), bytes=size)
    return profile.model_copy(update={"layers": tuple(layers), "tied": (tied,)})


@pytest.mark.some(4)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("stages", [None, "0-1:2,2-3:2"])
def test_a_tied_table_of_three_billion_parameters_is_planned(shard: str, stages: str | None) -> None:
    profile = tied_by(gpt_profile(blocks=2, batch=4), 12 * 10**9, 24 * 10**9)
    options = PlanOptions(gpus=4, shard=shard, stages=stages)  # type: ignore[arg-type]
    found = plan(profile, local_cluster(4, memory_bytes=200 * 10**9), options)
    assert all(peak < 200 * 10**9 for peak in found.predicted.peak_bytes)


@pytest.mark.some(12)
@pytest.mark.parametrize("seed", range(40))
def test_sums_of_arrays_are_those_of_single_stages_and_of_whole_numbers(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(seed, most_layers=6)
    if len(profile.layers) > 1:
        size = rng.randrange(2**30, 2**54)
        profile = tied_by(profile, size, rng.randrange(size, 3 * size))
    costs = CostModel(profile, local_cluster(4), PlanOptions(gpus=4))
    memory, layers = costs.memory[0], costs.layer_count
    for shard in SHARDS:
        held = PeakTerms(1, 1, 2, 1 if shard == "none" else 3, 0, frozenset(), shard)
        peaks = np.asarray(peak_of(memory.arrays(1, frozenset(), layers), held))
        for first in range(layers):
            for stop in range(first + 1, layers + 1):
                parts = memory.parts(first, stop, 1)
                assert peaks[first, stop - first - 1] == peak_of(parts, held)
                if shard == "optimizer":
                    whole = parts.optimizer * parts.lasting // max(parts.gradients, 1)
                    state = whole + divided(parts.optimizer - whole, 3)
                    gathered = parts.parameters + divided(parts.parameters - parts.lasting, 3)
                    assert state_of(parts, held)[0] == state + gathered


@pytest.mark.parametrize("field", ["parameters_bytes", "optimizer_bytes", "buffers_bytes", "update_bytes"])
def test_sizes_that_no_64_bits_hold_are_refused_with_the_layer(field: str) -> None:
    profile = gpt_profile(blocks=3)
    layers = tuple(
        layer.model_copy(update={field: 2**62 + at}) if at in (1, 2, 3) else layer
        for at, layer in enumerate(profile.layers)
    )
    with pytest.raises(FileError, match=r"the layers may hold \d+ bytes .* \$\.layers\[\d\] \(.*\) holds most"):
        plan(profile.model_copy(update={"layers": layers}), local_cluster(4), PlanOptions(gpus=4))


def _model(profile: Profile) -> MemoryModel:
    return MemoryModel(LayerCosts(profile.layers), Flows(profile), profile.updates_at_once)


def _compare(profile: Profile, rows: float, recompute: frozenset[int], longest: int) -> None:
    arrays = _model(profile).arrays(rows, recompute, longest)
    count = len(profile.layers)
    for first in range(count):
        for stop in range(first + 1, min(count, first + longest) + 1):
            # A model of its own, which has looked at no other stage.
            own = frozenset(layer for layer in recompute if first <= layer < stop)
            alone = _model(profile).parts(first, stop, rows, own)
            assert [int(np.asarray(each)[first, stop - first - 1]) for each in arrays] == [*map(int, alone)]


@pytest.mark.parametrize("rows", [1, 3, 2.5])
def test_all_stages_at_once_hold_what_each_does(rows: float) -> None:
    for seed in range(12):
        profile = random_profile(seed, most_layers=8, skips=0.4)
        layers = len(profile.layers)
        rng = random.Random(seed)
        _compare(profile, rows, frozenset(layer for layer in range(layers) if rng.random() < 0.4), layers)
        _compare(profile, rows, frozenset(), max(1, layers // 2))


def test_a_storage_named_like_a_later_tensor_is_followed_layer_by_layer() -> None:
    for seed in range(12):
        profile = random_profile(seed, most_layers=6, skips=0.3)
        made = [tensor.name for tensor in profile.tensors if tensor.producer is not None][-1:]
        named, first = tuple(SavedStorage(storage=name, bytes=12_345) for name in made), profile.layers[0]
        kept = [[each for each in cost.saved if each.storage not in made] for cost in first.costs]
        pairs = zip(first.costs, kept, strict=True)
        costs = tuple(cost.model_copy(update={"saved": (*saved, *named)}) for cost, saved in pairs)
        layers = (first.model_copy(update={"costs": costs}), *profile.layers[1:])
        _compare(profile.model_copy(update={"layers": layers}), 2, frozenset({1}), len(layers))
