"""Plans for programs: any schedule, widths, skips, ties and teams, without models or costs."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.formats.prediction import Prediction
from autopar.formats.profile import ModelSource
from autopar.formats.stage import Crossing, SharedParameter, Stage, group_of, layout_of
from autopar.ownership import even_shares
from autopar.schedules import SCHEDULES

LINES = ("1f1b", "gpipe", "zb-h1", "zb-h2")
"""Schedules whose groups have one stage each."""


def make(
    schedule: str,
    micro_batches: int,
    shares: Sequence[tuple[int, ...]],
    depths: Sequence[int],
    tensors: tuple[Crossing, ...],
    tied: tuple[SharedParameter, ...] = (),
) -> Plan:
    """Make a plan of groups with the given shares; ``depths`` are by stage."""
    stages, layout = [], layout_of(schedule)
    starts = list(accumulate(map(len, shares), initial=0))
    for index, depth in enumerate(depths):
        group = group_of(layout, index, len(shares))
        devices = tuple(range(starts[group], starts[group + 1]))
        stages.append(Stage(layers=(f"l{index}",), devices=devices, shares=shares[group], warmup=depth))
    rows = sum(shares[0])
    return Plan(
        model=ModelSource(source="model.py", sha256="0" * 64),
        batch=rows * micro_batches,
        precision="fp32",
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=micro_batches,
        micro_batch_size=rows,
        stages=tuple(stages),
        tensors=tensors,
        tied=tied,
        predicted=Prediction(step_s=1, lower_bound_s=1, bubble=0, peak_bytes=(0,) * len(stages)),
    )


def crossing(name: str, producer: int, consumers: tuple[int, ...], gradient: bool = True) -> Crossing:
    """Return a tensor of four bytes per sample."""
    return Crossing(
        name=name, producer=producer, consumers=consumers, bytes_per_sample=4, dtype="f32", gradient=gradient
    )


def chain(stages: int) -> tuple[Crossing, ...]:
    """Return a tensor from every stage to the next one."""
    return tuple(crossing(f"t{index}", index, (index + 1,)) for index in range(stages - 1))


@st.composite
def plans(draw: st.DrawFn, most_groups: int = 8, most_micro_batches: int = 32, most_replicas: int = 8) -> Plan:
    """Draw plans with random shares, skips, missing gradients, missing neighbours and tied parameters."""
    groups = draw(st.integers(1, most_groups))
    micro_batches = draw(st.integers(1, most_micro_batches))
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = {"line": 1, "vee": 2, "loop": draw(st.integers(1, 3))}[layout_of(schedule)]
    count = groups * chunks
    widths = [draw(st.integers(1, most_replicas)) for _ in range(groups)]
    rows = draw(st.integers(max(widths), 12))
    shares = []
    for width in widths:
        if draw(st.booleans()):
            shares.append(even_shares(rows, width))
        else:
            inner = draw(st.sets(st.integers(1, rows - 1), min_size=width - 1, max_size=width - 1)) if rows > 1 else ()
            shares.append(tuple(after - before for before, after in pairwise([0, *sorted(inner), rows])))
    named = SCHEDULES[schedule].warmups(groups, chunks, micro_batches)
    depths = list(draw(st.sampled_from(sorted(named.values()))))
    if schedule in LINES and schedule != "gpipe" and draw(st.booleans()):
        depths = sorted((draw(st.integers(1, micro_batches)) for _ in range(count)), reverse=True)
    tensors = []
    for producer in range(count - 1):
        readers = {producer + 1} if draw(st.integers(0, 9)) else set()
        readers |= draw(st.sets(st.integers(producer + 1, count - 1), max_size=2 if draw(st.booleans()) else 0))
        if readers:
            gradient = draw(st.integers(0, 9)) > 0
            tensors.append(crossing(f"t{producer}", producer, tuple(sorted(readers)), gradient))
    tied = ()
    if count > 1 and draw(st.booleans()):
        holders = draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=3))
        tied = (SharedParameter(parameter="w", stages=tuple(sorted(holders)), bytes=4),)
    return make(schedule, micro_batches, shares, depths, tuple(tensors), tied)


def resized(plan: Plan, sizes: Sequence[int]) -> Plan:
    """Return a plan whose replicas are run by so many ranks each, by stage; nothing says how they divide it."""
    devices, count = {}, 0
    for chunks in plan.groups:
        width = plan.stages[chunks[0]].replicas * sizes[chunks[0]]
        devices |= dict.fromkeys(chunks, tuple(range(count, count + width)))
        count += width
    stages = [
        Stage(**(stage.model_dump() | {"devices": devices[index], "tensor_parallel": sizes[index]}))
        for index, stage in enumerate(plan.stages)
    ]
    return Plan(**(dict(plan) | {"stages": tuple(stages)}))


PARTS = 3
DIVISIONS = st.lists(st.sets(st.integers(0, PARTS - 1), min_size=1), min_size=1, max_size=12)
"""Which parts have an index of a parameter, by index."""


def team_plan(holders: list[set[int]], dim: int = 0) -> Plan:
    """Return a plan of one stage that three ranks run, whose parameter ``w`` is cut in any way."""
    parts = []
    for part in range(PARTS):
        found: list[tuple[int, int]] = []
        for index, having in enumerate(holders):
            if part in having and found and found[-1][1] == index:
                found[-1] = (found[-1][0], index + 1)
            elif part in having:
                found.append((index, index + 1))
        parts.append(tuple(found))
    cut = ParameterCut(parameter="w", dim=dim, parts=tuple(parts))
    plan = resized(make("gpipe", 1, [(4,)], [1], ()), [PARTS])
    return plan.model_copy(update={"stages": (plan.stages[0].model_copy(update={"cuts": (cut,)}),)})
