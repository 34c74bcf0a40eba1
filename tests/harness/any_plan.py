"""Any plan of a captured model: what the properties of training are drawn over."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from autopar.capture.graph import LayerGraph
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.stage import chunks_of, group_of, layout_of
from autopar.ownership import Shard, shards_of
from autopar.schedules import SCHEDULES
from dictated import dictate


@st.composite
def plans_of(
    draw: st.DrawFn,
    graph: LayerGraph,
    model: UserModel,
    *,
    most_groups: int = 6,
    most_ranks: int = 12,
    most_rows: int = 5,
    least_share: int = 1,
    shards: Sequence[Shard] = ("none",),
) -> Plan:
    """Draw any cuts, widths, shares, divisions, depths, recomputed layers, shards and schedule.

    No replica takes fewer than ``least_share`` rows of a micro-batch; batch statistics may want two.
    """
    layers = len(graph.layers)
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    layout = layout_of(schedule)
    groups = draw(st.integers(1, min(most_groups, layers // (chunks_of(layout) or 1))))
    chunks = chunks_of(layout) or draw(st.integers(1, min(3, layers // groups)))
    stages = groups * chunks
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)))
    rows = draw(st.integers(least_share, most_rows))
    micro_batches = draw(st.integers(1, 5))
    widths = draw(_widths(groups, most_ranks))
    turning, depths = draw(_depths(schedule, widths, micro_batches))
    widths = [width if group in turning else min(width, rows // least_share) for group, width in enumerate(widths)]
    shares = [draw(_shares(rows, width, least_share)) if g not in turning else [] for g, width in enumerate(widths)]
    recompute = draw(st.one_of(st.just(set()), st.just(set(range(layers))), st.sets(st.integers(0, layers - 1))))
    divided = []
    for stage in range(stages):
        group = group_of(layout, stage, groups)
        allowed = shards_of("round-robin" if group in turning else "split", shards)
        takes_part = group not in turning or widths[group] <= micro_batches
        divided.append(draw(st.sampled_from(allowed)) if widths[group] > 1 and takes_part else "none")
    how = {"turns": sorted(turning), "recompute": {graph.layers[index].name for index in recompute}}
    what = graph, model, widths, micro_batches, rows, schedule, depths, cuts, shares
    return dictate(*what, chunks=chunks, shard=divided, **how)  # type: ignore[arg-type]


@st.composite
def _widths(draw: st.DrawFn, groups: int, most_ranks: int) -> list[int]:
    widths: list[int] = []
    for group in range(groups):
        widths.append(draw(st.integers(1, min(3, most_ranks - sum(widths) - (groups - group - 1)))))
    return widths


@st.composite
def _depths(
    draw: st.DrawFn, schedule: str, widths: Sequence[int], micro_batches: int
) -> tuple[set[int], list[int] | None]:
    """Draw which stages' replicas take turns, and how many micro-batches are in flight on each replica.

    None of the latter where the schedule says itself. No stage may let more in flight than the one before it.
    """
    if layout_of(schedule) != "line":
        return set(), None
    turning, depths, limit = set[int](), list[int](), micro_batches
    for stage, width in enumerate(widths):
        takes = 1
        if width > 1 and min(width, micro_batches) <= limit and draw(st.booleans()):
            turning.add(stage)
            takes = width
        most = -(-micro_batches // takes)
        allowed = most if limit == micro_batches else max(1, limit // takes)
        depths.append(most if schedule == "gpipe" else draw(st.integers(1, allowed)))
        limit = min(limit, depths[-1] * takes)
    return turning, depths


@st.composite
def _shares(draw: st.DrawFn, rows: int, width: int, least: int) -> list[int]:
    spare = rows - width * least
    inner = sorted(draw(st.lists(st.integers(0, spare), min_size=width - 1, max_size=width - 1)))
    return [least + after - before for before, after in pairwise([0, *inner, spare])]
