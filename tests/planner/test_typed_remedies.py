"""What errors of random questions that nothing answers advise, typed."""

from __future__ import annotations

import random
import re
import shlex
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile, Writes
from random_problems import random_cluster, random_profile, two_kinds

Run = Callable[..., tuple[int, str, str]]
SWITCHES = ("--use-all",)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    monkeypatch.chdir(tmp_path)
    return command


def _halved(profile: Profile) -> Profile:
    """With the halves of backwards that some schedules need."""
    layers = []
    for layer in profile.layers:
        costs = []
        for cost in layer.costs:
            halves = dict.fromkeys(("backward_input_s", "backward_weight_s"), 0.6 * cost.backward_s)
            costs.append(cost.model_copy(update={**halves, "weight_saved_bytes": cost.saved_bytes // 2}))
        layers.append(layer.model_copy(update={"costs": tuple(costs)}))
    return profile.model_copy(update={"layers": tuple(layers)})


def _limited(profile: Profile, rng: random.Random) -> Profile:
    """With layers of which there is one replica, or that take so many samples; a context; an optimizer of the whole."""
    layers = []
    for layer in profile.layers:
        update: dict[str, object] = {}
        if rng.random() < 0.1:
            update["writes"] = Writes(buffers=("b",)) if rng.random() < 0.7 else Writes(parameters=("b",))
        if rng.random() < 0.08:
            update |= {"least_samples": 2} if rng.random() < 0.5 else {"most_samples": rng.randint(1, 4)}
        layers.append(layer.model_copy(update=update))
    device = profile.device.model_copy(update={"reserved_bytes": rng.choice([0, 0, 100_000])})
    indivisible = "it normalises" if rng.random() < 0.1 else None
    return profile.model_copy(update={"layers": tuple(layers), "device": device, "indivisible": indivisible})


def _question(seed: int, run: Run) -> list[str] | None:
    """Save a profile and a cluster, and return options; none where layers are not connected."""
    rng = random.Random(seed)
    profile = random_profile(seed, most_layers=rng.choice([3, 5, 7]), batches=(1, 2, 4, 6, 8))
    profile = _limited(_halved(profile) if rng.random() < 0.5 else profile, rng)
    cluster = random_cluster(seed, rng.randint(1, 4))
    if rng.random() < 0.25:
        profile, cluster = two_kinds(profile, cluster, seed)
    if profile.disconnected_layers():
        return None
    objective = rng.choice(["step"] * 6 + ["cost"] * 2 + ["throughput"])
    typed = [] if objective == "step" else ["--objective", objective]
    if objective == "cost":
        cluster = _with(cluster, "price_per_hour", rng.choice([1.0, 2.5]))
        typed += ["--deadline", f"{10 ** rng.uniform(-3, -0.5):.4g}"] if rng.random() < 0.5 else []
    typed += _options(rng, objective, len(profile.layers))
    profile.save("profile.json")
    cluster.save("cluster.json")
    least = re.search(r"--memory (\d+)(MiB)?", run("plan", *typed, "--memory", "1000")[2])
    base = int(10 ** rng.uniform(4.5, 7.3)) if least is None else int(least[1]) * (2**20 if least[2] else 1)
    if rng.random() < 0.5:
        # So much in the cluster's file, where devices may differ, in place of an option.
        _with(cluster, "memory_bytes", max(1, int(base * rng.choice([0.95, 0.6])))).save("cluster.json")
        return typed
    return [*typed, "--memory", str(max(1, int(base * rng.choice([0.99, 0.9, 0.7, 0.4]))))]


def _with(cluster: Cluster, name: str, value: float) -> Cluster:
    """The cluster, with twice as much of something in its first device."""
    devices = [device.model_copy(update={name: value}) for device in cluster.devices]
    devices[0] = devices[0].model_copy(update={name: 2 * value})
    return cluster.model_copy(update={"devices": tuple(devices)})


def _options(rng: random.Random, objective: str, layers: int) -> list[str]:
    typed: list[str] = []

    def maybe(share: float, *values: object) -> None:
        if rng.random() < share:
            typed.extend(map(str, values))

    maybe(0.4, "--gpus", rng.randint(1, 6))
    maybe(0.3, "--recompute", rng.choice(["none", "full", "auto"]))
    maybe(0.25, "--use-all")
    maybe(0.1, "--batch", rng.randint(1, 8))
    if objective == "throughput":
        return typed
    maybe(0.4, "--shard", rng.choice(["none", "auto", "optimizer", "gradients", "parameters"]))
    maybe(0.3, "--micro-batches", rng.choice([1, 2, 4]))
    maybe(0.15, "--max-stages", rng.randint(1, 3))
    maybe(0.15, "--min-stages", rng.randint(1, 3))
    maybe(0.1, "--forbid-cut", rng.randrange(layers))
    pair = f"{rng.randrange(layers)},{rng.randrange(layers)}"
    maybe(0.1, "--pin", f"{pair} {rng.choice(['same', 'different'])} {'stage'}")
    maybe(0.1, "--replicate-state", "first")
    others = ["interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"] if objective == "step" else []
    schedule = rng.choice(["auto", "gpipe", "1f1b", *others])
    maybe(0.5, "--schedule", schedule)
    if schedule == "interleaved" and "--schedule" in typed:
        maybe(0.4, "--chunks", rng.choice([2, 3]))
    if objective == "step":
        edges = [0, *sorted(rng.sample(range(1, layers), min(layers - 1, rng.randint(0, 2)))), layers]
        maybe(0.15, "--stages", ",".join(f"{a}-{b - 1}:{rng.randint(1, 2)}" for a, b in pairwise(edges)))
        maybe(0.2, "--gap", "0")
        if not {"--stages", "--gap"} & {*typed}:
            maybe(0.3, "--equal-widths")
    return typed


def _changed(typed: list[str], remedy: str) -> list[str]:
    """The options with a remedy: ``with`` what to type, and ``without`` what to leave out."""
    how, _, rest = remedy.partition(" ")
    if how == "with":
        return [*typed, *shlex.split(rest)]
    left, _, more = rest.partition(" and with ")
    kept, skip = list[str](), False
    for at, word in enumerate(typed):
        skip = word in left.split(" and ") if word.startswith("--") else skip
        if not skip:
            kept.append(typed[at])
    return [*kept, *shlex.split(more)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_remedy_that_is_printed_works_when_it_is_typed(run: Run, part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(2000 + 30 * part, 2000 + 30 * (part + 1)):
        typed = _question(seed, run)
        if typed is None:
            continue
        code, _, err = run("plan", *typed)
        assert code in (0, 2, 3), f"seed {seed}: {shlex.join(typed)}: {err}"
        if code != 3:
            continue
        assert err.count("\n") == 1
        found = re.search(r"; a plan fits ((?:with|without) .*)\n$", err)
        assert found is not None or "no options were found with which a plan would fit" in err, err
        for remedy in re.split(r", or (?=with(?:out)? )", found[1]) if found else ():
            changed = _changed(typed, remedy)
            code, _, err = run("plan", *changed)
            assert code == 0, f"seed {seed}: {shlex.join(typed)}: {remedy}: {err}"
            seen[remedy.split()[1]] += 1
    assert seen.total() >= 5
    assert len(seen) >= 2


def test_a_schedule_that_is_found_by_trying_names_what_was_tried(run: Run) -> None:
    _halved(random_profile(4, most_layers=7, batches=(8,), skips=0.0)).save("profile.json")
    random_cluster(4, 2).save("cluster.json")
    code, _, err = run("plan", "--schedule", "zb-h1", "--min-stages", "2", "--memory", "5000")
    assert (code, err.count("\n")) == (3, 1)
    assert " try " not in err
    assert re.search(r"; a plan fits with --\S+ \S+", err) is not None


def test_what_no_plan_obeys_names_the_options_to_leave_out(run: Run) -> None:
    random_profile(4, most_layers=3, batches=(1,), skips=0.0).save("profile.json")
    random_cluster(4, 1).save("cluster.json")
    code, _, err = run("plan", "--gpus", "6", "--use-all", "--max-stages", "1")
    assert (code, err.count("\n")) == (3, 1)
    assert "no plan for 6 devices obeys all of --max-stages, --forbid-cut, --pin and --use-all that were asked" in err
    assert "without --use-all" in err
