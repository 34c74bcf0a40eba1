"""Bytes of stages, of whole numbers and of huge models, against one stage after the other."""

import random

import numpy as np
import pytest

from autopar.errors import FileError
from autopar.formats.profile import Cost, Layer, Profile, SavedStorage, TiedParameter
from autopar.formats.program import BACKWARD, RECEIVE_GRADIENT, Program
from autopar.ownership import SHARDS, Shard
from autopar.planner import PlanOptions, plan
from autopar.planner.costs.memory import PeakTerms, peak_of, state_of
from autopar.planner.costs.model import CostModel
from autopar.runtime.messages.mailbox import receives_ahead
from autopar.schedules.expand import expand
from random_problems import gpt_profile, local_cluster, profile_of, random_profile

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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_as_many_gradients_are_counted_as_a_rank_awaits(schedule: str, micro_batches: int) -> None:
    options = PlanOptions(stages="0:1,1:1,2-3:1,4-5:1", schedule=schedule, batch=24, micro_batches=micro_batches)
    made = plan(gpt_profile(blocks=4), local_cluster(4), options)
    program = expand(made)
    for rank, stage in enumerate(made.stages[:-1]):
        assert awaited(program, rank) == PeakTerms(1, stage.warmup, micro_batches).returned


def awaited(program: Program, rank: int) -> int:
    """Return how many micro-batches' gradients there are, or receives posted for them, while a backward runs."""
    actions, due, posted, most = program.ranks[rank], receives_ahead(program, rank), 0, 0
    for position, action in enumerate(actions):
        posted += sum(actions[at].kind == RECEIVE_GRADIENT for at in due.get(position, ()))
        if action.kind == BACKWARD:
            most = max(most, posted)
            posted -= 1
    return most


@pytest.mark.parametrize("shard", SHARDS[2:])
@pytest.mark.parametrize("replicas", [2, 3])
def test_what_a_sharded_stage_holds_is_the_most_of_all_moments_of_a_backward(shard: Shard, replicas: int) -> None:
    """Layers keep 100 a micro-batch and hold 50 more as they run; no tensor goes between them."""
    parameters = (1000, 4000, 300)
    profile = profile_of([made(name, each) for name, each in zip("abc", parameters, strict=True)], [], 4)
    memory, gathers = CostModel(profile, local_cluster(4), PlanOptions(gpus=4)).memory[0], shard == "parameters"
    steady, begun = [], []
    for layer in range(3):
        before = sum(parameters[layer - 1 : layer]) if gathers else 0
        own, later = parameters[layer] if gathers else 0, parameters[layer + 1 :]
        # The buffer of the reduction before: that of the layer behind, or of the last backward's first layer.
        computing = 100 * (layer + 1) + max(50 + own + before, 2 * own)
        reducing = 100 * layer + 2 * parameters[layer] + before
        steady.append(max(computing + (later or parameters)[0], reducing))
        begun.append(max(computing + sum(later[:1]), reducing) + divided(sum(parameters), replicas))
        begun[-1] -= divided(sum(parameters[: layer + 1]), replicas) if later else divided(sum(parameters), replicas)
    parts = memory.parts(0, 3, 1, sharded=PeakTerms(1, 1, 2, replicas, shard=shard).sharded)
    assert (parts.peak, parts.first_peak) == (max(steady), max(begun))


def made(name: str, parameters: int) -> Layer:
    """Return a layer with so many bytes of trained parameters."""
    cost = Cost(
        micro_batch=1,
        forward_s=1.0,
        backward_s=2.0,
        saved=(SavedStorage(storage=f"{name}#0", bytes=100),),
        peak_bytes=150,
        output_bytes=0,
    )
    sizes = dict.fromkeys(("parameters_bytes", "trainable_bytes", "gradient_bytes"), parameters)
    return gpt_profile(blocks=1).layers[0].model_copy(update={"name": name, "costs": (cost,), **sizes})


@pytest.mark.parametrize("field", ["parameters_bytes", "optimizer_bytes", "buffers_bytes", "update_bytes"])
def test_sizes_that_no_64_bits_hold_are_refused_with_the_layer(field: str) -> None:
    profile = gpt_profile(blocks=3)
    layers = tuple(
        layer.model_copy(update={field: 2**62 + at}) if at in (1, 2, 3) else layer
        for at, layer in enumerate(profile.layers)
    )
    with pytest.raises(FileError, match=r"the layers may hold \d+ bytes .* \$\.layers\[\d\] \(.*\) holds most"):
        plan(profile.model_copy(update={"layers": layers}), local_cluster(4), PlanOptions(gpus=4))
