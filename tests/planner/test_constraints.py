"""Constraints of stages, obeyed by every solver, against all plans filtered by what each says; stages as written."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.ownership import Replicas
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate, Family, families, place, within
from autopar.planner.comparison import compare
from autopar.planner.constraints import Constraints, Question
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated import parse
from autopar.planner.infeasible import closest
from autopar.planner.search.best_first import search
from autopar.planner.search.judge import Best, neighbours
from autopar.planner.search.local import judge_even_splits, search_locally
from autopar.planner.simulator.simulate import Simulator
from chunked import random_chunked, random_costs
from oracles.exhaustive import everything, exhaust
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds
from searched import closest_of, least_by_stages


def _drawn(rng: random.Random, layers: int) -> dict[str, object]:
    """Between one and three statements, some by name and some by index."""

    def layer(index: int) -> str:
        return rng.choice([str(index), f"layer.{index}"])

    pins, cuts, found = [], [], dict[str, object]()
    for _ in range(rng.randint(1, 3)):
        what = rng.choice(["same", "different", "on", "cut", "most", "least"])
        some = ",".join(layer(index) for index in rng.sample(range(layers), 2))
        if what in ("same", "different"):
            pins.append(f"{some} {what} stage{'s' if what == 'different' else ''}")
        elif what == "on":
            pins.append(f"{layer(rng.randrange(layers))} on {rng.choice(['test', 'other'])}")
        elif what == "cut":
            cuts.append(layer(rng.randrange(layers - 1)))
        else:
            found["max_stages" if what == "most" else "min_stages"] = rng.randint(1, 3)
    return {**found, "pin": tuple(pins), "forbid_cut": tuple(cuts)}


def _obeys(candidate: Candidate, cluster: Cluster, options: PlanOptions) -> bool:
    """The statements once more, by which stage every layer is in."""
    stage_of = {layer: at for at, stage in enumerate(candidate.stages) for layer in range(stage.first, stage.stop)}

    def index(name: str) -> int:
        return int(name.removeprefix("layer."))

    def holds(pin: str) -> bool:
        names, _, rest = pin.partition(" ")
        stages = [stage_of[index(name)] for name in names.split(",")]
        if not rest.startswith("on "):
            return len(set(stages)) == (1 if rest == "same stage" else len(stages))
        devices = [device for at in stages for device in candidate.stages[at].devices]
        return {cluster.devices[device].type for device in devices} == {rest.removeprefix("on ")}

    return (
        options.min_stages <= len(candidate.stages) <= (options.max_stages or 99)
        and all(stage_of[index(cut)] == stage_of[index(cut) + 1] for cut in options.forbid_cut)
        and all(map(holds, options.pin))
    )


_Asked = tuple[Profile, Cluster, PlanOptions, PlanOptions, CostModel, str | None]
"""A question without and with statements, the costs, and why the statements are refused."""


def _asked(seeds: range, most_layers: int, *, skips: float = 0.12, limited: bool = True) -> Iterator[_Asked]:
    """Yield questions with and without statements; those whose least and most stages contradict are refused at once."""
    for seed in seeds:
        rng = random.Random(seed)
        profile = random_profile(seed, most_layers=most_layers, batches=(2,), skips=skips)
        profile, cluster = two_kinds(profile, random_cluster(seed, 3), seed)
        memory = rng.choice([None, None, 3_000_000]) if limited else None
        free = PlanOptions(gpus=3, gap=0.0, recompute="none", memory_bytes=memory)
        if len(profile.layers) < 2:
            continue
        asked = _drawn(random.Random(seed), len(profile.layers))
        if asked.get("min_stages", 1) > asked.get("max_stages", 9):  # type: ignore[operator]
            with pytest.raises(UsageError, match=r"`min_stages=\d` contradicts `max_stages=\d`"):
                replace(free, **asked)  # type: ignore[arg-type]
            continue
        options, costs = replace(free, **asked), CostModel(profile, cluster, free)  # type: ignore[arg-type]
        yield profile, cluster, free, options, costs, _refused(costs, options)


def _refused(costs: CostModel, options: PlanOptions) -> str | None:
    try:
        Constraints.of(costs, options)
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(13))
def test_both_solvers_find_the_best_of_all_plans_that_obey_and_fit(part: int) -> None:
    compared = changed = 0
    for _, cluster, free, options, costs, refused in _asked(range(16 * part, 16 * (part + 1)), 4):
        if refused:
            continue
        simulator = Simulator(costs)
        least, unconstrained = Best(), Best()
        for candidate in everything(costs, free):
            unconstrained.judge(simulator, candidate)
            if _obeys(candidate, cluster, options):
                least.judge(simulator, candidate)
        best, oracle = Best(), Best()
        search(simulator, families(costs.batch, options), options, best)
        exhaust(simulator, options, oracle)
        assert best.step_s == pytest.approx(least.step_s, rel=1e-9), options
        assert oracle.step_s == least.step_s, options
        assert best.fastest is None or _obeys(best.fastest.candidate, cluster, options)
        compared += least.fastest is not None
        changed += unconstrained.step_s < least.step_s < float("inf")
    assert min(compared / 5, changed) >= 1


def _statements(options: PlanOptions) -> list[tuple[str, PlanOptions]]:
    """Every statement's text, and the options without it."""
    found = []
    for name in ("pin", "forbid_cut"):
        texts = getattr(options, name)
        for at, text in enumerate(texts):
            found.append((f"`{name}={text!r}`", replace(options, **{name: (*texts[:at], *texts[at + 1 :])})))
    for name, usual in (("min_stages", 1), ("max_stages", None)):
        if getattr(options, name) != usual:
            found.append((f"`{name}={getattr(options, name)}`", replace(options, **{name: usual})))
    return found


def test_contradictions_need_every_statement_and_pins_of_many_layers_are_obeyed() -> None:
    met = 0
    for _, cluster, free, options, costs, message in _asked(range(240), 6):
        if message is None or "no device to plan for" in message or "names one layer" in message:
            continue
        met += 1
        plans = everything(costs, replace(free, micro_batches=1))
        assert not any(_obeys(each, cluster, options) for each in plans), options
        # Of the statements that are named, none is without need.
        named = options
        while unneeded := [fewer for text, fewer in _statements(named) if text not in message]:
            named = unneeded[0]
        for text, fewer in _statements(named):
            assert _refused(costs, fewer) is None, f"{text} of {message}"
    assert met >= 12
    options = PlanOptions(gpus=4, pin=("96,97 different stages",), forbid_cut=("95", "100"), max_stages=2)
    costs = CostModel(gpt_profile(blocks=148), local_cluster(4), options)
    edges = Constraints.of(costs, options).edges(64)
    assert {96, 97, 101} & {*edges} == {97}
    assert (edges[0], edges[-1], len(edges) < 80) == (0, costs.layer_count, True)
    _, found = closest(costs, families(costs.batch, options)[-1:], options)  # type: ignore[misc]
    assert found.cuts == (97, 150)
    profile, cluster = two_kinds(gpt_profile(blocks=2, batch=2), local_cluster(2), 1)
    pins = ("wte on other", "head on other", "wte,head different stages")
    with pytest.raises(InfeasibleError, match="no plan for 2 devices obeys all of `max_stages`, `forbid_cut`, `pin`"):
        plan(profile, cluster, PlanOptions(gpus=2, pin=pins))
    options = PlanOptions(gpus=2, pin=("wte,head different stages",), schedule="1f1b")
    found = compare(gpt_profile(blocks=4, batch=4), local_cluster(2), options)
    rows = {row.name: row for row in found.rows}
    assert len(found.plan.stages) == 2
    assert rows["pure data parallelism"].stages == "0-5:2"
    others = [row for row in found.rows if "," in (row.stages or "") and row.schedule != "interleaved"]
    assert all(row.step_s is None or row.step_s >= found.plan.predicted.step_s for row in others)


def test_neighbours_obey_and_what_comes_closest_is_the_least_of_any_number_of_stages() -> None:
    near = compared = 0
    for profile, cluster, _, options, costs, refused in _asked(range(24), 5, skips=0.0, limited=False):
        if refused:
            continue
        rules = Constraints.of(costs, options)
        every, simulator, best = families(costs.batch, options), Simulator(costs), Best()
        judge_even_splits(simulator, every, options, best)
        search(simulator, every, options, best)
        if best.fastest is None:
            continue
        search_locally(simulator, options, best, 0.0)
        for each in neighbours(simulator, best, best.fastest.candidate):
            found = each.simulated_plan
            assert found is None or _obeys(found.candidate, cluster, options), f"{options}: {each.name}"
            near += found is not None
        assert _obeys(best.fastest.candidate, cluster, options), options
        chosen = plan(profile, cluster, options)
        predicted, chunks = chosen.predicted, len(chosen.groups[0]) > 1
        weaker_s = predicted.bounds.work_s if chunks else predicted.bounds.linked_s
        assert weaker_s <= predicted.lower_bound_s <= best.step_s * (1 + 1e-9), options
        least = least_by_stages(costs, options)
        for count in (None, *range(rules.least_stages, rules.most_stages + 1)):
            near_by = closest_of(costs, every, options, count)
            assert (near_by and near_by[0]) == least.get(count), f"{options}: {count}"
            assert near_by is None or _obeys(near_by[1], cluster, options), f"{options}: {count}"
            compared += 1
    assert min(near, compared) >= 9


def test_a_plan_of_others_is_excluded_by_what_it_does_not_obey_and_by_nothing_else() -> None:
    family, cuts, divided = Family(4, 4, "1f1b"), (7, 14), Replicas(2, "split", "gradients")
    every = CostModel(gpt_profile(), local_cluster(4), PlanOptions()).recompute_levels(4)
    even, uneven = (place(family, cuts, map(Replicas, widths)) for widths in ((2, 2), (2, 1)))
    shards = [place(family, cuts, [divided, other]) for other in (divided, Replicas(2))]
    levels = every[-1], every[3]
    again, some = ([each._replace(recompute=within(level, *each[:2])) for each in even] for level in levels)
    for option, value, obeys, breaks in (
        ("use_all", True, even, uneven),
        ("shard", "gradients", shards[0], shards[1]),
        ("shard", "none", even, shards[1]),
        ("schedule", "gpipe", even, [stage._replace(warmup=2) for stage in even]),
        ("recompute", "full", again, some),
        ("recompute", "none", even, some),
    ):
        question = Question.of(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, **{option: value}))  # type: ignore[arg-type]
        said = [question.excluding_option(Candidate(*family, tuple(stages))) for stages in (obeys, breaks)]
        assert said == [None, f"`{option}`" if value is True else f"`{option}={value!r}`"]
    # Two devices run three stages each.
    chunked = Family(4, 4, "interleaved")
    question, stages = Question.of(gpt_profile(), local_cluster(2), PlanOptions()), (3, 6, 8, 10, 12, 14)
    assert question.excluding_option(Candidate(*chunked, place(chunked, stages, map(Replicas, (1, 1))))) is None


def test_no_plan_that_a_device_runs_several_stages_of_is_excluded_by_devices_but_by_how_many_stages_are_asked() -> None:
    many = 0
    for seed in range(60):
        rng, costs = random.Random(seed), random_costs(seed)
        found = random_chunked(rng, costs, rng.choice(("interleaved", "zb-v", "dualpipe-v")))
        if found is None:
            continue
        count = len(found.stages)
        for most in (None, count, count - 1):
            options = PlanOptions(gpus=len(costs.devices), max_stages=most)
            said = Question(Simulator(costs), options).excluding_option(found)
            assert said == (f"`max_stages={most}`" if most == count - 1 else None), seed
        many += count > len(costs.devices)
    assert many >= 9


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"min_stages": 2, "pin": ("wte,head same stage",)}, "`pin='wte,head same stage'` and `min_stages=2` at once"),
        ({"pin": ("wte,h.3 same stage", "1,2 different stages", "0 on test")}, "same stage'` and `pin='1,2 different"),
        ({"pin": ("0,1,2 different stages",)}, "obeys `pin='0,1,2 different stages'` and 2 devices at once"),
        ({"pin": ("wtf,h.1 same stage",)}, "no layer is called 'wtf'; nearest: wte, head"),
        ({"pin": ("wte,17 same stage",)}, "names layer 17; the profile has layers 0..13"),
        ({"pin": ("wte same stage",)}, "`pin='wte same stage'` names one layer; write 'a,b same stage'"),
        ({"pin": ("wte, head",)}, "`pin='wte, head'`: write 'a,b same stage', 'a,b different stages' or 'a on TYPE'"),
        ({"pin": ("wte on H100",)}, "no device to plan for is called 'H100'; there are cpu, test"),
        ({"forbid_cut": ("head",)}, "head is the last layer, and the last stage has to end with it"),
        ({"forbid_cut": ("h.99",)}, "`forbid_cut='h.99'`: no layer is called 'h.99'; nearest: h.9"),
        ({"forbid_cut": ("5",), "stages": "0-5:1,6-13:1"}, "`stages` contradicts `forbid_cut='5'`"),
        ({"max_stages": 1, "stages": "0-5:1,6-13:1"}, "`stages` contradicts `max_stages=1`"),
        ({"max_stages": 0}, "`max_stages` must be at least 1, found 0"),
    ],
    ids=str,
)
def test_a_constraint_that_cannot_be_obeyed_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=2, **asked))  # type: ignore[arg-type]
    assert message in str(caught.value)


NAMES = ["wte", "h.0", "h.1", "h.2", "ln-f", "head"]


@pytest.mark.parametrize(
    ("text", "cuts", "widths"),
    [
        ("0-5:2", (6,), (2,)),
        ("0-2:2,3-5:1", (3, 6), (2, 1)),
        ("wte-h.1:2, h.2-head:3", (3, 6), (2, 3)),
        ("wte-h.2,ln-f,head:2", (4, 5, 6), (1, 1, 2)),
        ("0-ln-f:1,5:2", (5, 6), (1, 2)),
    ],
)
def test_layers_may_be_indices_or_names_or_ranges(text: str, cuts: tuple[int, ...], widths: tuple[int, ...]) -> None:
    assert parse(text, NAMES)[:2] == (cuts, widths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-2:1,4-5:1", "h.2 is in no stage; stage 1 must begin with layer 3"),
        ("0-2:1", "h.2..head (layers 3-5) is in no stage"),
        ("0-2:1,2-5:1", "layer 2 (h.1) is in two stages; stage 1 must begin with layer 3"),
        ("0-9:1", "names layer 9; the profile has layers 0..5"),
        ("wte-h.7:1", "no layer is called 'h.7'; nearest: h."),
        ("0-5:0", "write layers:replicas"),
        ("", "write layers:replicas"),
        ("0-2:1,,3-5:1", "write layers:replicas"),
        ("3-1:1", "ends before it begins"),
        ("hed", "nearest: head"),
    ],
)
def test_gaps_overlaps_and_unknown_layers_are_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, NAMES)
    assert message in str(caught.value)
