"""How well are steps predicted on GPUs that are not there? Against published runs of GPT-like models on A100.

    python benchmarks/vtrain.py --data ground_truth_single.csv --json benchmarks/results/vtrain.json

The data are VIA-Research/vTrain's (MIT): steps of Megatron-DeepSpeed in float16, every block recomputed, on one node of
eight A100 (``--data``) and on several (``--multi``). Every model is captured and estimated without a GPU as any user's
would be, the constants are fitted to ``--fit`` of the runs without tensor parallelism, and the others of these are
predicted by the planner's simulator. Runs with tensor parallelism, and those of several nodes, are predicted with the
same constants, and by default; all are also predicted with what a launch took on the host of an H100 (``blocks.py``),
to which nothing is fitted either.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, Protocol

from scipy.stats import spearmanr

from autopar.capture import load
from autopar.capture.layers.export import capture_module
from autopar.formats.cluster import Cluster, Curve
from autopar.formats.profile import Profile
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import find
from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas
from autopar.planner.candidate import Family
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated_run import DictatedRun
from autopar.profiler.calibrate import Observation, calibrate, predict
from autopar.profiler.estimate import Workload, profile_of, workload
from autopar.profiler.kernels import Constants, Kernel, KernelTable, default_constants
from autopar.profiler.subject import Subject
from blocks import measured_launches
from machine import Watch

GPU = "A100-SXM-80G"
GPUS_PER_NODE = 8
VOCABULARY = 51200
NEARLY_EQUAL = 0.02
"""Two plans whose steps differ by less are as good as each other."""
ERROR_BOUND, PAIRS_BOUND = 0.09, 0.9
"""The mean error of a step at most, and the share of pairs of plans in the right order at least."""


class Estimate(NamedTuple):
    """A model without a GPU."""

    subject: Subject
    load: Workload

    def profile(self, constants: Constants) -> Profile:
        """Return its profile by these constants."""
        return profile_of(self.subject, self.load, max(self.load.sizes), constants)


class Model(NamedTuple):
    """A GPT by its sizes."""

    hidden: int
    heads: int
    layers: int
    sequence: int


@dataclass(frozen=True)
class Run:
    """One row of the data."""

    model: Model
    gpus: int
    batch: int
    micro_batch: int
    """Samples per replica."""
    replicas: int
    stages: int
    team: int
    """GPUs that run a replica of a stage together."""
    step_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="runs on one node")
    parser.add_argument("--multi", type=Path, help="runs on several nodes, predicted with the constants of one")
    parser.add_argument("--curves", type=Path, help="folder of measured all-reduce curves; default: beside the data")
    parser.add_argument(
        "--host", type=Path, help="launches measured on a host; default: h100/measured.csv beside the folder"
    )
    parser.add_argument("--network", default="800Gbps", help="of a node (default: four 200 Gbit/s ports)")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--fit", type=int, default=50, help="runs that the constants are fitted to")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch = Watch()
    folder = arguments.curves or arguments.data.parent / "a100_allreduce"
    curves = read_curves(folder) if folder.is_dir() else ()
    every, further = read_runs(arguments.data), read_runs(arguments.multi) if arguments.multi else []
    models = estimated((*every, *further))
    runs, teams = ([run for run in every if (run.team > 1) == several] for several in (False, True))
    observations = observed(runs, models, curves, arguments.network)
    result = evaluate(runs, observations, arguments.draws, arguments.fit)
    ways = {"fitted": Constants(**result["constants_of_first_draw"]), "by_default": default_constants(find(GPU))}
    host = arguments.host or arguments.data.parent.parent / "h100" / "measured.csv"
    if host.is_file():
        ways["launched_as_there"] = as_launched(host)
        result["launched_as_there"] = score(runs, predict(observations, ways["launched_as_there"]))
    for name, others in (("teams", teams), ("multi", further)):
        scores = {
            how: score(others, predicted_steps(others, models, constants, curves, arguments.network))
            for how, constants in ways.items()
            if others
        }
        result |= {name: {"runs": len(others), **scores}} if others else {}
    watch.record({"measured_curves": len(curves), **result}, arguments.json)


def as_launched(path: Path) -> Constants:
    """Return the default constants, with what a launch took on the host that a file is of."""
    there = measured_launches(path)
    return replace(
        default_constants(find(GPU)),
        forward_launch_s=there.forward_launch_s,
        backward_launch_s=there.backward_launch_s,
    )


def read_runs(path: Path) -> list[Run]:
    """Read the rows; columns are found by name."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [{(key or "").strip(): value for key, value in row.items()} for row in csv.DictReader(file)]
    return [_run(row) for row in rows]


def _run(row: dict[str, str]) -> Run:
    sizes = ("hidden size", "attention heads", "# layers", "sequence length")
    return Run(
        model=Model(*(int(row[name]) for name in sizes)),
        gpus=int(row["# GPUs"]),
        batch=int(row["global batch"]),
        micro_batch=int(row["micro batch"]),
        replicas=int(row["data parallelism"]),
        stages=int(row["pipeline parallelism"]),
        team=int(row["tensor parallelism"]),
        step_s=float(row["iteration time (ms)"]) / 1e3,
    )


def read_curves(folder: Path) -> tuple[Curve, ...]:
    """Read all-reduce curves as nccl-tests prints them, one file per number of GPUs."""
    curves = []
    for path in sorted(folder.glob("AR_GPU*")):
        ranks = int("".join(letter for letter in path.name.split("_")[1] if letter.isdigit()))
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))[1:]
        sizes, seconds = zip(*((int(row[0]), float(row[3]) / 1e9) for row in rows), strict=True)
        curves.append(Curve(kind="all_reduce", ranks=ranks, level="node", sizes=sizes, seconds=seconds))
    return tuple(curves)


def estimated(runs: Iterable[Run]) -> dict[Model, Estimate]:
    """Capture and estimate every model, at the micro-batches and in the teams that its runs have."""
    rows: dict[Model, set[int]] = {}
    teams: dict[Model, int] = {}
    for run in runs:
        rows.setdefault(run.model, set()).add(run.micro_batch)
        teams[run.model] = max(run.team, teams.get(run.model, 1))
    found = {}
    for model, sizes in sorted(rows.items()):
        sys.stderr.write(f"estimating {model}\n")
        found[model] = estimate_model(model, sorted(sizes), teams[model])
    return found


def estimate_model(model: Model, sizes: Sequence[int], team: int = 1) -> Estimate:
    """Return a model's work on A100s, in teams of up to so many; its parameters are float16, as Megatron's are."""
    gpu = find(GPU)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(_config(model)))
        user = load(f"hf:{config}")
        module = user.build(on_meta=True).half()
        module.config._attn_implementation = "eager"  # type: ignore[union-attr]
        graph = capture_module(module, user.load_batch(user.dataset(), range(2)), user.loss)
    subject = Subject(user, module, graph, "fp16", ())
    return Estimate(subject, _as_megatron(workload(subject, gpu, max(sizes), sizes=sizes, tensor=team)))


_DRAWN, _ADDED = ("new_ones", "native_dropout", "cat", "mul"), ("mm", "clone", "add")
"""What a part launches to drop some of its heads' numbers by the whole's mask, and to add a bias behind a sum."""


def _as_megatron(load_: Workload) -> Workload:
    """Return a workload whose parts have the kernels that one device has, of their size.

    Megatron's ranks draw masks of their own heads, sum where a product wrote, and add biases as they drop.
    """
    whole = {id(layer): layer for work in load_.works for layer in work.layers}
    passes = "forward", "backward", "backward_input", "accumulate"
    groups = [getattr(work, name) for work in whole.values() for name in passes]
    groups += [
        _fewer(getattr(work, name), part.kind.count) for part in load_.parts for work in part.works for name in passes
    ]
    return replace(load_, table=KernelTable.of(groups, load_.gpu))


def _fewer(kernels: Sequence[Kernel], count: int) -> list[Kernel]:
    found, at = list[Kernel](), 0
    while at < len(kernels):
        ahead = tuple(each.op for each in kernels[at : at + len(_DRAWN)])
        if ahead == _DRAWN:
            whole = kernels[at + 1]
            own = {"read_bytes": whole.read_bytes // count, "written_bytes": whole.written_bytes // count}
            found.append(whole._replace(**own))
        else:
            found.append(kernels[at])
        at += len(_DRAWN) if ahead == _DRAWN else len(_ADDED) if ahead[: len(_ADDED)] == _ADDED else 1
    return found


def _config(model: Model) -> dict[str, object]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": VOCABULARY,
        "n_positions": model.sequence,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "activation_function": "gelu_pytorch_tanh",
    }


def observed(
    runs: Sequence[Run], models: Mapping[Model, Estimate], curves: Sequence[Curve], network: str
) -> list[Observation]:
    """Return runs without tensor parallelism as the calibration takes them."""
    found, priced = [], _Priced(models, default_constants(find(GPU)), curves, network)
    for run in runs:
        costs = priced.costs(run)
        rows = run.replicas * run.micro_batch
        family, cuts = Family(run.batch // rows, rows, "1f1b"), _cuts(costs.profile, run.stages)
        dictated = DictatedRun(costs, family, cuts, [Replicas(run.replicas)] * run.stages, _blocks(costs.profile))
        found.append(Observation(models[run.model].load, dictated.step_s, run.step_s))
    return found


def predicted_steps(
    runs: Sequence[Run], models: Mapping[Model, Estimate], constants: Constants, curves: Sequence[Curve], network: str
) -> list[float]:
    """Return the steps that the planner predicts by these constants."""
    priced, found = _Priced(models, constants, curves, network), []
    for run in runs:
        costs, rows = priced.costs(run), run.replicas * run.micro_batch
        replicas = Replicas(team=run.team).so_many(run.replicas)
        family, cuts = Family(run.batch // rows, rows, "1f1b"), _cuts(costs.profile, run.stages)
        step_s, _ = DictatedRun(costs, family, cuts, [replicas] * run.stages, _blocks(costs.profile)).predicted()
        found.append(step_s)
    return found


class _Priced:
    """Prices of models on one node, and on several."""

    def __init__(
        self, models: Mapping[Model, Estimate], constants: Constants, curves: Sequence[Curve], network: str
    ) -> None:
        self._profile = cache(lambda model: models[model].profile(constants))
        self._costs = cache(
            lambda model, nodes: CostModel(self._profile(model), _cluster(nodes, curves, network), PlanOptions())
        )

    def costs(self, run: Run) -> CostModel:
        """Return those that a run has."""
        return self._costs(run.model, -(-run.gpus // GPUS_PER_NODE))


def _cluster(nodes: int, curves: Sequence[Curve], network: str) -> Cluster:
    name = f"{GPUS_PER_NODE}x{GPU}" if nodes == 1 else f"{nodes}x{GPUS_PER_NODE}x{GPU}:{network}"
    cluster = cluster_named(name)
    measured = {(curve.kind, curve.ranks, curve.level) for curve in curves}
    others = [each for each in cluster.curves if (each.kind, each.ranks, each.level) not in measured]
    return cluster.model_copy(update={"curves": (*curves, *others)})


def _blocks(profile: Profile) -> list[int]:
    """Return the layers that Megatron checkpoints: of embeddings and the head it keeps what their backward reads."""
    return [index for index, layer in enumerate(profile.layers) if layer.name.startswith("transformer.h.")]


def _cuts(profile: Profile, stages: int) -> tuple[int, ...]:
    """Return the ends of stages with equally many blocks; embeddings are in the first, the head in the last."""
    blocks = _blocks(profile)
    each = len(blocks) // stages
    return (*(blocks[stage * each] for stage in range(1, stages)), len(profile.layers))


def evaluate(runs: Sequence[Run], observations: Sequence[Observation], draws: int, fit: int) -> dict[str, object]:
    """Fit to some runs and predict the others, in several seeded draws; return medians over the draws."""
    defaults = default_constants(find(GPU))
    scores, fitted = [], []
    for seed in range(draws):
        chosen = set(random.Random(seed).sample(range(len(runs)), fit))
        calibration = calibrate([observations[index] for index in sorted(chosen)], defaults, leave_out=False)
        rest = [index for index in range(len(runs)) if index not in chosen]
        predicted = predict([observations[index] for index in rest], calibration.constants)
        scores.append(score([runs[index] for index in rest], predicted))
        fitted.append(calibration.constants)
        sys.stderr.write(f"draw {seed}: {scores[-1]}\n")
    median = {name: round(statistics.median(each[name] for each in scores), 4) for name in scores[0]}
    return {
        "runs": len(runs),
        "fitted_to": fit,
        "draws": draws,
        "median": median,
        "within_bounds": within_bounds(median),
        "worst_error": round(max(each["error_mean"] for each in scores), 4),
        "by_default": score(runs, predict(observations, defaults)),
        "constants_of_first_draw": asdict(fitted[0]),
    }


def within_bounds(median: Mapping[str, float]) -> dict[str, bool]:
    """Return which of the bounds hold; of pairs all count, also those of nearly equal plans."""
    found = {"error_mean": median["error_mean"] <= ERROR_BOUND}
    # Runs of which no two are plans for the same have no pairs.
    return found | ({"pairs": median["all_pairs_right"] >= PAIRS_BOUND} if "all_pairs_right" in median else {})


class Timed(Protocol):
    """A run that was measured; of runs that are alike in these, the quickest is to be found."""

    @property
    def model(self) -> Hashable: ...
    @property
    def gpus(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def step_s(self) -> float: ...


def score(runs: Sequence[Timed], predicted: Sequence[float]) -> dict[str, float]:
    """Return errors of steps, how well plans are ranked, and what the plan picked loses of the quickest measured."""
    errors = [abs(step_s / run.step_s - 1) for run, step_s in zip(runs, predicted, strict=True)]
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for run, step_s in zip(runs, predicted, strict=True):
        groups.setdefault((run.model, run.gpus, run.batch), []).append((run.step_s, step_s))
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    apart = [(a, b) for a, b in pairs if max(a[0], b[0]) > (1 + NEARLY_EQUAL) * min(a[0], b[0])]
    regrets = [
        min(group, key=lambda each: each[1])[0] / min(measured for measured, _ in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]
    result = {"error_mean": statistics.mean(errors), "error_median": statistics.median(errors)}
    result["bias"] = statistics.mean(step_s / run.step_s - 1 for run, step_s in zip(runs, predicted, strict=True))
    result["error_worst"] = max(errors)
    if len(runs) > 2:
        result["rank_correlation"] = float(spearmanr([run.step_s for run in runs], predicted).statistic)
    if pairs:
        result["pairs_right"] = _right(apart)
        result["all_pairs_right"] = _right(pairs)
        result["regret_mean"] = statistics.mean(regrets)
        result["regret_max"] = max(regrets)
    return {name: round(value, 4) for name, value in result.items()}


def _right(pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float:
    return statistics.mean((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs) if pairs else 1.0


if __name__ == "__main__":
    main()
