"""Windows of layers that are alike: the planner with what they share, against the planner that shares nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.formats.profile import Layer, Profile, Tensor, TiedParameter
from autopar.planner import PlanOptions, plan
from autopar.planner.costs import activations
from autopar.planner.costs.activations import Repeats
from autopar.planner.costs.flows import Flows
from autopar.planner.costs.layers import LayerCosts
from autopar.planner.costs.memory import MemoryModel, PeakTerms
from random_problems import random_cluster, random_profile


def _plain(codes: Sequence[str], first: int, stop: int) -> int:
    return next(at for at in range(first + 1) if codes[at : at + stop - first] == codes[first:stop])


def test_the_earliest_of_all_windows_that_are_alike_is_found() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        block = "".join(rng.choices("abc", k=rng.randint(1, 4)))
        codes = "".join(rng.choices("abz", k=rng.randint(0, 3))) + block * rng.randint(1, 8) + rng.choice(["", "z"])
        repeats, longest = Repeats(codes), rng.randint(1, len(codes))
        windows = repeats.windows(longest)
        values = np.array([[first * 100 + length for length in range(1, longest + 1)] for first in windows.rows])
        spread = windows.spread(values)
        for first in range(len(codes)):
            for length in range(1, min(longest, len(codes) - first) + 1):
                earliest = _plain(codes, first, first + length)
                assert repeats.earliest(first, first + length) == earliest
                assert spread[first, length - 1] == earliest * 100 + length
        assert windows.rows.tolist() == sorted(set(windows.rows.tolist()))
        assert repeats.any == (len(set(codes)) < len(codes))


def repeated(seed: int) -> Profile:
    """Blocks of some layers one after the other, with skips in them and past them, and layers of other costs around.

    Layers of a block differ in their times, as measured ones do, and in what they hold among each other.
    """
    rng = random.Random(seed)
    block = random_profile(seed, most_layers=3, batches=(2, 4))
    count = rng.randint(2, 5)
    layers: list[Layer] = []
    tensors = [block.tensors[0].model_copy(update={"name": "x", "consumers": (f"0.{block.layers[0].name}",)})]
    for at in range(count):
        named = {tensor.name: f"{at}.{tensor.name}" for tensor in block.tensors}
        layers += [_copied(rng, layer, at, named) for layer in block.layers]
        for tensor in block.tensors[1:]:
            readers = tuple(f"{at}.{name}" for name in tensor.consumers)
            tensors.append(
                tensor.model_copy(
                    update={"name": named[tensor.name], "producer": f"{at}.{tensor.producer}", "consumers": readers}
                )
            )
        if at:
            before = f"{at - 1}.{block.layers[-1].name}"
            tensors.append(_handed(f"h{at}", before, (f"{at}.{block.layers[0].name}",)))
    names = [layer.name for layer in layers]
    if rng.random() < 0.3 and len(names) > 2:
        # What the first layer makes is read far behind, and by several.
        tensors.append(_handed("far", names[0], tuple(names[at] for at in sorted({len(names) // 2, len(names) - 1}))))
    if rng.random() < 0.4:
        layers[-1] = layers[-1].model_copy(update={"parameters_bytes": layers[-1].parameters_bytes + 4096})
    tied = (TiedParameter(parameter="w", layers=(names[0], names[-1]), bytes=1000),) if rng.random() < 0.3 else ()
    if tied:
        sizes = ("parameters_bytes", "trainable_bytes", "gradient_bytes")
        for at in (0, -1):
            layers[at] = layers[at].model_copy(update={size: getattr(layers[at], size) + 1000 for size in sizes})
    order = {name: at for at, name in enumerate(names)}
    tensors.sort(key=lambda tensor: -1 if tensor.producer is None else order[tensor.producer])
    update = {"layers": tuple(layers), "tensors": tuple(tensors), "tied": tied}
    return Profile.model_validate({**dict(block), **update})


def _copied(rng: random.Random, layer: Layer, at: int, named: dict[str, str]) -> Layer:
    factor = rng.choice([1.0, 1.0, rng.uniform(0.9, 1.1)])
    costs = tuple(
        cost.model_copy(
            update={
                "forward_s": factor * cost.forward_s,
                "saved": tuple(
                    saved.model_copy(update={"storage": named.get(saved.storage, f"{at}.{saved.storage}")})
                    for saved in cost.saved
                ),
            }
        )
        for cost in layer.costs
    )
    return layer.model_copy(update={"name": f"{at}.{layer.name}", "modules": (f"{at}.{layer.name}",), "costs": costs})


def _handed(name: str, producer: str, consumers: tuple[str, ...]) -> Tensor:
    return Tensor(
        name=name, producer=producer, consumers=consumers, bytes_per_sample=40_000, dtype="f32", gradient=True
    )


def _apart(layers: Sequence[Layer], flows: Flows) -> Repeats:
    return Repeats(range(len(layers)))


def _model(profile: Profile) -> MemoryModel:
    return MemoryModel(LayerCosts(profile.layers), Flows(profile), profile.updates_at_once)


@pytest.mark.parametrize("seed", range(40))
def test_stages_hold_what_they_hold_by_themselves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, rng = repeated(seed), random.Random(seed)
    with monkeypatch.context() as patched:
        patched.setattr(Repeats, "of", _apart)
        apart = _model(profile)
    monkeypatch.setattr(activations, "FEW_ROWS", 1)
    together = _model(profile)
    layers = len(profile.layers)
    there = np.arange(layers)[:, None] + np.arange(1, layers + 1) <= layers
    for rows in (2, 1.5):
        every = frozenset(range(layers))
        for recompute in (frozenset[int](), every, frozenset(at for at in every if rng.random() < 0.5)):
            for one, other in zip(
                apart.arrays(rows, recompute, layers), together.arrays(rows, recompute, layers), strict=True
            ):
                assert np.array_equal(np.asarray(one)[there], np.asarray(other)[there])
            for first in range(layers):
                for stop in range(first + 1, layers + 1):
                    own = frozenset(at for at in recompute if first <= at < stop)
                    held = PeakTerms(rows, rng.randint(1, 3), 3, rng.randint(1, 3), rng.randint(0, 1), own)
                    cuts = sorted(rng.sample(range(stop + 1, layers + 1), rng.randint(0, layers - stop)))
                    assert apart.peak(first, stop, held, cuts) == together.peak(first, stop, held, cuts)


def test_blocks_that_repeat_have_few_windows_of_their_own() -> None:
    for seed in range(40):
        profile = repeated(seed)
        repeats = Repeats.of(profile.layers, Flows(profile))
        period = next(at for at, layer in enumerate(profile.layers) if layer.name.startswith("1."))
        if not profile.tied and all(tensor.name != "far" for tensor in profile.tensors):
            # The first block reads the model's input, and the last one hands nothing on.
            longest = min(2, period)
            assert len(repeats.windows(longest).rows) <= 3 * period + 2 * longest


def _planned(seed: int, gap: float) -> str:
    limit = None if seed % 3 == 0 else 4_000_000 + 1_000_000 * (seed % 5)
    options = PlanOptions(memory_bytes=limit, shard="auto" if seed % 4 == 0 else "none", gap=gap)
    try:
        return plan(repeated(seed), random_cluster(seed, seed % 3 + 1), options).model_dump_json()
    except InfeasibleError as error:
        return str(error)


@pytest.mark.parametrize("gap", [0.02, 0.0])
def test_plans_are_equal_byte_for_byte(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "FEW_ROWS", 1)
    for seed in range(20):
        with monkeypatch.context() as patched:
            patched.setattr(Repeats, "of", _apart)
            apart = _planned(seed, gap)
        assert apart == _planned(seed, gap), f"seed {seed}"
