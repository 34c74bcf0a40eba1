"""What all stages keep of micro-batches, at once, against one stage after the other."""

import random

import numpy as np
import pytest

from autopar.formats.profile import Profile, SavedStorage
from autopar.planner.costs.activations import WHOLE, Sharded
from autopar.planner.costs.communication import Flows
from autopar.planner.costs.layers import LayerCosts
from autopar.planner.costs.memory import MemoryModel
from random_problems import random_profile


def _model(profile: Profile) -> MemoryModel:
    return MemoryModel(LayerCosts(profile.layers), Flows(profile), profile.updates_at_once)


def _compare(profile: Profile, rows: float, recompute: frozenset[int], longest: int, sharded: Sharded = WHOLE) -> None:
    arrays = _model(profile).arrays(rows, recompute, longest, sharded)
    count = len(profile.layers)
    for first in range(count):
        for stop in range(first + 1, min(count, first + longest) + 1):
            # A model of its own, which has looked at no other stage.
            own = frozenset(layer for layer in recompute if first <= layer < stop)
            alone = _model(profile).parts(first, stop, rows, own, sharded)
            assert [int(np.asarray(each)[first, stop - first - 1]) for each in arrays] == [*map(int, alone)]


@pytest.mark.parametrize("rows", [1, 3, 2.5])
def test_all_stages_at_once_hold_what_each_does(rows: float) -> None:
    for seed in range(12):
        profile = random_profile(seed, most_layers=8, skips=0.4)
        layers = len(profile.layers)
        rng = random.Random(seed)
        again = frozenset(layer for layer in range(layers) if rng.random() < 0.4)
        for sharded in (WHOLE, Sharded("gradients", 2), Sharded("parameters", 3)):
            _compare(profile, rows, again, layers, sharded)
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
