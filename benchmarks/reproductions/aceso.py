"""Aceso: its measured operators as a profile of autopar's, whose layers they are, and its own prices of plans of them.

    model = Aceso.read(Path("aceso"), "1_3B", blocks=24)
    profile, step_s = aceso_profile(model), model.step_s(stages, rows=1, batch=1024, per_node=4)

Operators were measured on one of t = 1, 2, 4 or 8 devices that run them together, at 1 to 8 rows, split in two ways.
Seconds of one of several devices have its all-reduces in them, so that nothing else prices these. (Liu et al., "Aceso:
Efficient Parallel DNN Training through Iterative Bottleneck Alleviation", EuroSys 2024, and its artifact:
microsoft/SuperScaler.) By its prices a step of N micro-batches over stages takes

    max_i T_i (N - 1) + sum_i T_i,  T_i = forwards, again where recomputed, and backwards + input / rate + output / rate

and a device of a stage with k stages behind it, for w of float16 weights there, holds

    8 w  (the weights, float32 copies, gradients, Adam's two)  +  (k + 1) activations  +  the longest recomputed run
    +  the most that a forward and a backward reserve, or w

Nothing reduces gradients, and nothing updates parameters.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from autopar.formats.cluster import Cluster, Curve, CurveKind, Device, Level, Link
from autopar.formats.cuts import ParameterCut
from autopar.formats.profile import (
    Cost,
    DeviceKind,
    Layer,
    LayerSplit,
    ModelSource,
    Noise,
    PartCosts,
    Profile,
    SavedStorage,
    Tensor,
)

__all__ = ["Aceso", "AcesoStage", "Operator", "aceso_profile"]

ROWS, TEAMS = (1, 2, 4, 8), (1, 2, 4, 8)
"""Micro-batches, and numbers of devices that run an operator together, that were measured."""
MIB = 2**20
BLOCK, BEGINNING = "enc-", "enc-1st-layernorm"
"""How the names of a block's operators begin, and the first of them."""
SOFTMAX, DROPOUT = "enc-attention-softmax", "enc-attention-dropout"
"""Which share what they keep."""
COPIES, STATES = 2, 4
"""Bytes of float32 copies of weights, and of Adam's two states, over those of float16 weights."""
_WHERE: tuple[tuple[Level, str], ...] = ("node", "intra"), ("network", "inter")
_FAILED = 1e6
"""Megabytes, and milliseconds, of what could not be measured; or more."""


class Operator(NamedTuple):
    """What was measured of an operator, at some rows on one of some devices; sizes are bytes."""

    name: str
    forward_s: float
    backward_s: float
    input: float
    output: float
    weights: float
    activations: float
    forward_reserved: float
    backward_reserved: float

    @property
    def kept(self) -> float:
        """Bytes of activations that stay until the backward."""
        return {SOFTMAX: 0.0, DROPOUT: 1.5}.get(self.name, 1.0) * self.activations


class AcesoStage(NamedTuple):
    """Operators ``first`` to ``stop - 1`` on ``replicas`` teams of ``team`` devices."""

    first: int
    stop: int
    recompute: frozenset[int]
    """Positions of operators that run forward again."""
    team: int = 1
    replicas: int = 1

    @classmethod
    def of_plan(cls, said: Mapping[str, Any]) -> list[AcesoStage]:
        """Return the stages of one of Aceso's own plans, whose operators all run on as many devices within a stage."""
        found, first = [], 0
        columns = (said[f"{name}_of_each_op"] for name in ("model_parallel_size", "data_parallel_size"))
        for flags, teams, replicas in zip(said["recompute_ops"], *columns, strict=True):
            (team,), (count,) = set(teams), set(replicas)
            again = frozenset(first + at for at, flag in enumerate(flags) if flag)
            found.append(cls(first, first + len(flags), again, team, count))
            first += len(flags)
        return found


class Aceso(NamedTuple):
    """A model's operators, and the links that connect its devices."""

    name: str
    sha256: str
    chains: Mapping[tuple[int, int], Sequence[Operator]]
    """All operators in order, by rows and devices that run them together."""
    rates: Mapping[Level, Sequence[float]]
    """Bytes per second of messages of 1, 2, 4, ... MiB, within a node and between nodes."""
    all_reduces: Mapping[int, Sequence[tuple[int, float]]]
    """Bytes and seconds, by how many devices of a node add up."""

    @classmethod
    def read(cls, folder: Path, size: str, blocks: int, way: int = 0) -> Aceso:
        """Read a folder of Aceso's profiles.

        Args:
            folder: has a file for every size, micro-batch, number of devices and way.
            size: as in the names of files, such as ``1_3B``.
            blocks: how often the operators of a block follow each other.
            way: which of the two ways to split.
        """
        paths = {
            (rows, team): folder / f"gpt_{size}_mbs{rows}_tp{team}_algo{way}.csv" for rows in ROWS for team in TEAMS
        }
        chains = {key: _chain(list(_operators(path)), blocks) for key, path in paths.items()}
        read = hashlib.sha256(b"".join(path.read_bytes() for path in paths.values()))
        rates: dict[Level, Sequence[float]] = {
            level: _rates(folder / f"p2p_{where}_node.csv") for level, where in _WHERE
        }
        sums = {ranks: _sums(folder / f"prim_gpt_{size}_all_reduce_{ranks}gpus.csv") for ranks in TEAMS[1:]}
        return cls(f"gpt_{size}", read.hexdigest(), chains, rates, sums)

    def operators(self, stage: AcesoStage, rows: int) -> Sequence[Operator]:
        """Return a stage's operators at a micro-batch of so many rows, of which each replica takes its share."""
        return self.chains[rows // stage.replicas, stage.team][stage.first : stage.stop]

    def step_s(self, stages: Sequence[AcesoStage], rows: int, batch: int, per_node: int) -> float:
        """Return the seconds of a step, the stages on devices in order."""
        used, seconds = 0, []
        for stage in stages:
            before, used = used, used + stage.team * stage.replicas
            ends: list[Level] = ["network" if at and at % per_node == 0 else "node" for at in (before, used)]
            seconds.append(self._stage_s(stage, rows, ends))
        return max(seconds) * (batch // rows - 1) + sum(seconds)

    def _stage_s(self, stage: AcesoStage, rows: int, ends: Sequence[Level]) -> float:
        own = self.operators(stage, rows)
        again = sum(each.forward_s for at, each in enumerate(own, stage.first) if at in stage.recompute)
        computing = sum(each.forward_s + each.backward_s for each in own)
        return computing + again + self._sent_s(own[0].input, ends[0]) + self._sent_s(own[-1].output, ends[1])

    def _sent_s(self, size: float, level: Level) -> float:
        """Return the seconds of a message, at the rate of the power of two below its own."""
        rates, whole = self.rates[level], int(size / MIB)
        at = max(0, whole.bit_length() - 2)
        return size / rates[min(at, len(rates) - 1)] if size else 0.0

    def cluster(self, devices: int, per_node: int) -> Cluster:
        """Return nodes that are linked as was measured; what no message was measured for has the rate of 64 MiB."""
        sums = (_curve("all_reduce", ranks, "node", pairs) for ranks, pairs in self.all_reduces.items())
        messages = (
            _curve("p2p", 2, level, [(MIB << at, (MIB << at) / rate) for at, rate in enumerate(rates)])
            for level, rates in self.rates.items()
        )
        return Cluster(
            devices=tuple(Device(type="cuda", memory_bytes=32 * 10**9, node=at // per_node) for at in range(devices)),
            links=tuple(Link(level=level, latency_s=5e-5, bytes_per_s=rates[6]) for level, rates in self.rates.items()),
            curves=(*messages, *sums),
        )

    def peak_bytes(self, stages: Sequence[AcesoStage], rows: int) -> list[float]:
        """Return what a device of every stage holds."""
        behind = range(len(stages) - 1, -1, -1)
        return [self._stage_bytes(stage, rows, more) for stage, more in zip(stages, behind, strict=True)]

    def _stage_bytes(self, stage: AcesoStage, rows: int, behind: int) -> float:
        own = self.operators(stage, rows)
        weights = sum(each.weights for each in own)
        freed, longest = _recomputed(own, [at in stage.recompute for at in range(stage.first, stage.stop)])
        activations = own[0].input + sum(each.kept for each in own) - freed
        # The last operator's reserve does not count.
        forward, backward = (
            max((getattr(each, name) for each in own[:-1]), default=0.0)
            for name in ("forward_reserved", "backward_reserved")
        )
        passing = max(forward + backward, weights)
        return (2 + COPIES + STATES) * weights + (behind + 1) * activations + longest + passing


def _curve(kind: CurveKind, ranks: int, level: Level, pairs: Sequence[tuple[int, float]]) -> Curve:
    sizes, seconds = zip(*pairs, strict=True)
    return Curve(kind=kind, ranks=ranks, level=level, sizes=sizes, seconds=seconds)


def _operators(path: Path) -> Iterator[Operator]:
    with path.open(encoding="utf-8", newline="") as file:
        for name, forward_us, backward_us, *sizes in list(csv.reader(file))[1:]:
            yield Operator(
                name, float(forward_us) / 1e6, float(backward_us) / 1e6, *(MIB * float(each) for each in sizes)
            )


def _chain(operators: Sequence[Operator], blocks: int) -> list[Operator]:
    block = [each for each in operators if each.name.startswith(BLOCK)]
    first, *last = [each for each in operators if not each.name.startswith(BLOCK)]
    return [first, *block * blocks, *last]


def _rates(path: Path) -> list[float]:
    """Return the second line, which is in MiB per millisecond of 1,000 microseconds."""
    with path.open(encoding="utf-8", newline="") as file:
        return [float(each) * 1e3 * MIB for each in list(csv.reader(file))[1]]


def _sums(path: Path) -> list[tuple[int, float]]:
    """Return all-reduces, ascending."""
    with path.open(encoding="utf-8", newline="") as file:
        pairs = [(float(size), float(seconds)) for size, seconds in list(csv.reader(file))[1:]]
    return sorted({round(MIB * size): ms / 1e3 for size, ms in pairs if size < _FAILED}.items())


def _recomputed(operators: Sequence[Operator], again: Sequence[bool]) -> tuple[float, float]:
    """Return the bytes that recomputed runs of operators do not keep, and the most that one of them makes anew.

    A run keeps its first operator's input, which an operator before it has kept, and its last one's output. Runs end
    with a block.
    """
    freed, runs = 0.0, [0.0]
    for at, (one, after) in enumerate(pairwise(operators)):
        ends, shares = after.name == BEGINNING, one.name in (SOFTMAX, DROPOUT)
        is_inside = again[at] and again[at + 1]
        if is_inside:
            runs[-1] += one.kept
            freed += 0.0 if ends else one.kept
        if not is_inside or (not shares and (ends or at == len(operators) - 2)):
            runs.append(0.0)
    return freed, max(runs[:-1], default=0.0)


def aceso_profile(model: Aceso) -> Profile:
    """Return the profile whose layers are a model's operators; their splits' cuts are even, and of made up names.

    What is kept is counted by operator: of recomputed runs, and of what is reserved, Aceso's own rule
    (:meth:`Aceso.peak_bytes`) knows more than a sum over layers can say.
    """
    count = len(model.chains[1, 1])
    layers = tuple(_layer(model, at) for at in range(count))
    return Profile(
        model=ModelSource(source=f"{model.name}.csv", sha256=model.sha256),
        batch=1,
        device=DeviceKind(type="cuda", name="GPU", memory_bytes=32 * 10**9),
        precision="fp16",
        layers=layers,
        tensors=tuple(_tensor(model, one.name, two.name, at) for at, (one, two) in enumerate(pairwise(layers))),
        noise=Noise(median_spread=0.0, max_spread=0.0),
        notes=(
            f"read from Aceso's operators of {model.name}; seconds of one of several devices have their sums in them",
        ),
    )


def _layer(model: Aceso, at: int) -> Layer:
    operator = model.chains[1, 1][at]
    name = f"{at}.{operator.name}"
    splits = (
        LayerSplit(
            count=team,
            cuts=(ParameterCut(parameter=f"{name}.weight", dim=0, parts=tuple(((i, i + 1),) for i in range(team))),),
            part=PartCosts(**_sizes(model, at, team), costs=_costs(model, at, team)),
        )
        for team in TEAMS[1:]
    )
    own = _sizes(model, at, 1)
    return Layer(name=name, modules=(operator.name,), **own, costs=_costs(model, at, 1), splits=tuple(splits))


def _sizes(model: Aceso, at: int, team: int) -> dict[str, Any]:
    weights = round(model.chains[1, team][at].weights)
    sizes = dict.fromkeys(("parameters_bytes", "trainable_bytes", "gradient_bytes"), weights)
    return {**sizes, "optimizer_bytes": (COPIES + STATES) * weights}


def _costs(model: Aceso, at: int, team: int) -> tuple[Cost, ...]:
    return tuple(
        _cost(rows, model.chains[rows, team][at], f"{at}.{model.chains[rows, team][at].name}") for rows in ROWS
    )


def _cost(rows: int, operator: Operator, name: str) -> Cost:
    return Cost(
        micro_batch=rows,
        forward_s=operator.forward_s,
        backward_s=operator.backward_s,
        saved=(SavedStorage(storage=f"{name}:kept", bytes=round(operator.kept)),),
        peak_bytes=round(operator.kept + operator.forward_reserved + operator.backward_reserved),
        output_bytes=round(operator.output),
    )


def _tensor(model: Aceso, producer: str, consumer: str, at: int) -> Tensor:
    return Tensor(
        name=f"{at}>{at + 1}",
        producer=producer,
        consumers=(consumer,),
        bytes_per_sample=round(model.chains[1, 1][at].output),
        dtype="float16",
        gradient=True,
    )
