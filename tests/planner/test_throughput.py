"""A plan's step in tokens, utilisation, hours, energy and cost, against closed forms."""

import random
from dataclasses import replace

import pytest

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import DeviceKind, Profile, Tensor
from autopar.hardware.clusters import cluster_named
from autopar.options.plan import PlanOptions
from autopar.planner import plan
from autopar.planner.comparison import compare
from autopar.planner.throughput import flops_per_sample, measured_throughput, plan_throughput, tokens_of
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds

H100 = DeviceKind(type="cuda", name="H100-SXM", memory_bytes=80 * 10**9)


def _with_inputs(profile: Profile, *inputs: tuple[str, int]) -> Profile:
    """The same profile whose model reads inputs of some types and bytes per sample."""
    first = profile.layers[0].name
    read = [
        Tensor(name=f"in{at}", producer=None, consumers=(first,), bytes_per_sample=size, dtype=dtype, gradient=False)
        for at, (dtype, size) in enumerate(inputs)
    ]
    return profile.model_copy(update={"tensors": (*read, *(each for each in profile.tensors if each.producer))})


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ((("int64", 1024), ("int64", 1024)), 128),
        ((("int32", 512), ("bool", 128), ("int64", 8)), 128),
        # Images with a class, and with a class for each pixel; of bytes.
        ((("float32", 3 * 224 * 224 * 4), ("int64", 8)), None),
        ((("float32", 3 * 64 * 64 * 4), ("int64", 64 * 64 * 8)), None),
        ((("uint8", 3 * 32 * 32), ("int64", 8)), None),
        # An encoder and a decoder that read sequences of unlike length.
        ((("int64", 4096), ("int64", 1024)), None),
        ((("int64", 1024), ("float32", 4)), 128),
        ((("int64", 8),), None),
        ((("bool", 64), ("int64", 8)), None),
        ((), None),
    ],
)
def test_tokens_are_counted_where_all_inputs_are_integers_of_one_length(
    inputs: tuple[tuple[str, int], ...], tokens: int | None
) -> None:
    profile = _with_inputs(gpt_profile(blocks=2), *inputs)
    assert tokens_of(profile) == tokens
    said = profile.model.model_copy(update={"sequence": 77})
    assert tokens_of(profile.model_copy(update={"model": said})) == 77
    if tokens is None:
        with pytest.raises(UsageError, match=r"pass `tokens_per_sample`, too, or `samples` in place of `tokens`"):
            plan(profile, local_cluster(2), PlanOptions(tokens=1e9))
        made = plan(profile, local_cluster(2), PlanOptions(tokens=1e9, tokens_per_sample=10))
        assert made.predicted.throughput.tokens_per_sample == 10
        assert made.predicted.throughput.whole.samples == 1e8


def _question(seed: int) -> tuple[Profile, Cluster]:
    """Up to five devices of one or two kinds, of which all, some or none have a price and a power."""
    rng = random.Random(seed)
    profile, cluster = random_profile(seed, most_layers=6), random_cluster(seed, rng.randint(1, 5))
    profile, cluster = two_kinds(profile, cluster, seed) if seed % 2 else (profile, cluster)
    known = rng.choice((0.0, 0.7, 1.0))
    devices = [
        device.model_copy(
            update={
                "price_per_hour": rng.choice((0.0, 0.5, 2.0, 11.0)) if rng.random() < known else None,
                "power_w": rng.choice((75.0, 700.0)) if rng.random() < known else None,
            }
        )
        for device in cluster.devices
    ]
    if rng.random() < 0.7:
        profile = _with_inputs(profile, ("int64", 8 * rng.choice((2, 100, 4096))))
    return profile, cluster.model_copy(update={"devices": tuple(devices)})


def test_what_a_step_is_follows_from_its_seconds_and_the_devices_that_are_used() -> None:
    priced = powered = sequences = idle = 0
    for seed in range(12):
        profile, cluster = _question(seed)
        length = {"samples": 12345.0} if tokens_of(profile) is None else {"tokens": 3e9}
        options = PlanOptions(gap=0.1)
        made = plan(profile, cluster, options)
        asked = plan(profile, cluster, replace(options, **length))  # type: ignore[arg-type]
        assert asked.model_copy(update={"predicted": made.predicted}) == made
        if made.predicted.step_s == 0:
            assert asked.predicted.throughput is None
            continue
        assert "throughput" not in made.dumps()
        found, step_s = asked.predicted.throughput, made.predicted.step_s
        used = [cluster.devices[device] for device in made.devices]
        prices, watts = ([getattr(each, name) for each in used] for name in ("price_per_hour", "power_w"))
        assert (found.devices, found.samples_per_s) == (len(used), made.batch / step_s)
        tokens = tokens_of(profile)
        if tokens is not None:
            assert found.tokens_per_s == pytest.approx(tokens * made.batch / step_s)
            assert found.tokens_per_s_per_device == pytest.approx(found.tokens_per_s / len(used))
            assert (found.unit.tokens, found.whole.tokens) == (1e9, 3e9)
        else:
            assert (found.unit.samples, found.whole.samples, found.tokens_per_s) == (1e6, 12345, None)
        for each in (found.unit, found.whole):
            hours = each.samples / made.batch * step_s / 3600
            assert each.duration_s == pytest.approx(3600 * hours)
            assert each.device_hours == pytest.approx(len(used) * hours)
            assert each.cost == (None if None in prices else pytest.approx(sum(prices) * hours))
            assert each.energy_kwh == (None if None in watts else pytest.approx(sum(watts) / 1000 * hours))
        assert Plan.parse(asked.dumps(), "plan.json") == asked  # type: ignore[arg-type]
        slower = measured_throughput(found, 1.5)
        assert slower.unit.duration_s == pytest.approx(1.5 * found.unit.duration_s)
        assert slower.samples_per_s == pytest.approx(found.samples_per_s / 1.5)
        priced, powered = priced + (None not in prices), powered + (None not in watts)
        sequences, idle = sequences + (tokens is not None), idle + (len(used) < len(cluster.devices))
    assert min(priced, powered, sequences, idle) >= 1


def test_utilisation_is_of_the_devices_that_are_used_in_the_profiles_precision() -> None:
    profile, cluster = gpt_profile(blocks=4), cluster_named("4xH100")
    profile = profile.model_copy(update={"device": H100, "precision": "bf16"})
    assert flops_per_sample(profile) is None
    # Without operations, hours and energy are known, and no utilisation.
    made = plan(profile, cluster, PlanOptions(gpus=3, samples=1e6))
    assert made.predicted.throughput.flops_utilisation is None
    layers = [layer.model_copy(update={"flops_per_sample": 10**9}) for layer in profile.layers]
    counted = profile.model_copy(update={"layers": tuple(layers)})
    assert flops_per_sample(counted) == 6 * 10**9
    assert flops_per_sample(counted.model_copy(update={"layers": (profile.layers[0], *layers[1:])})) is None
    found = plan_throughput(made, counted, cluster, PlanOptions())
    peak = len(made.devices) * 989e12
    assert found.peak_flops_per_s == peak
    assert found.flops_utilisation == pytest.approx(6e9 * made.batch / (made.predicted.step_s * peak))
    assert found.power_w == 700 * len(made.devices)
    for precision in ("fp64", "fp32"):
        other = counted.model_copy(update={"precision": precision})
        known = plan_throughput(made, other, cluster, PlanOptions())
        assert (known.flops_utilisation is None) == (precision == "fp64")
    rows = {row.name: row for row in compare(counted, cluster, PlanOptions(gpus=3)).rows if row.step_s is not None}
    for row in rows.values():
        if row.throughput is not None:
            assert row.throughput.samples_per_s == pytest.approx(counted.batch / row.step_s)
            assert row.as_dict()["throughput"]["devices"] == row.throughput.devices
    assert rows["autopar"].throughput is not None


@pytest.mark.parametrize("name", ["tokens", "samples"])
def test_lengths_are_read_as_people_write_them_and_odd_ones_are_refused(name: str) -> None:
    read = {"15T": 15 * 10**12, "2B": 2 * 10**9, "1e15": 10**15, "1.5m": 1_500_000, "7": 7, " 3 k ": 3000}
    for text, count in read.items():
        assert getattr(PlanOptions.of("plan", {name: text}), name) == count
    for text in ("0", "-3", "0.2", "2e18", "99e99"):
        with pytest.raises(UsageError, match=f"^`{name}` must be (positive|at most 1000000000000000000), found "):
            PlanOptions.of("plan", {name: text})
    for text in ("", "T", "15TB", "1e", "nan", "inf", "1_000", "0x10", "1" * 30):
        with pytest.raises(UsageError, match=f"^`{name}` '{text}': write a number, such as 15T, 2B, 300M or 1e15$"):
            PlanOptions.of("plan", {name: text})
    with pytest.raises(UsageError, match="both say how long training is"):
        PlanOptions(tokens=1e9, samples=1e6)
    with pytest.raises(UsageError, match="`tokens_per_sample` must be at least 1, found 0"):
        PlanOptions(tokens_per_sample=0)
