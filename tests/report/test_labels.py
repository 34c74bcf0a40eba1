"""Every picture at 4, 64 and 1,024 ranks: no text over another or cut off, whatever names say."""

import io
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import autopar
from autopar.formats.prediction import SIMPLICITY, Alternative, Bounds, MetPlan
from autopar.formats.profile import Profile
from autopar.formats.report import ComparisonRow
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import cluster_named
from autopar.planner import simulate
from autopar.report.charts import draw_layers, draw_profile, draw_stages
from autopar.report.maps import draw_devices
from autopar.report.pictures import draw_over, draw_timeline
from equal_plans import equal_plan, llama_profile
from played import play, small_plan

NAMES = ["W" * 300, "$\\frac{$ <script>", "\U0001f600" * 100, "a.very.long.path." * 20]
ALLOWED = 0.75
"""Pixels by which boxes may meet."""


def drawn_texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """Return the texts of a figure that are really drawn, and where."""
    found: list[tuple[str, Bbox]] = []
    draw = Text.draw

    def record(text: Text, renderer: Any, *more: Any, **named: Any) -> None:  # noqa: ANN401
        if text.get_visible() and text.get_text().strip():
            found.append((text.get_text(), text.get_window_extent(renderer)))
        draw(text, renderer, *more, **named)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Letters that the font lacks are boxes.
        warnings.filterwarnings("ignore", "Glyph")
        patch.setattr(Text, "draw", record)
        FigureCanvasAgg(figure).draw()
    return found


def faults(figure: Figure) -> Iterator[str]:
    """Yield which texts of a figure lie over each other, or leave it."""
    texts, (wide, high) = drawn_texts(figure), figure.get_size_inches() * figure.dpi
    for text, box in texts:
        if min(box.x0, box.y0) < -ALLOWED or box.x1 > wide + ALLOWED or box.y1 > high + ALLOWED:
            yield f"{text!r} is cut off"
    texts.sort(key=lambda each: each[1].x0)
    for at, (text, box) in enumerate(texts):
        for other, beside in texts[at + 1 :]:
            if beside.x0 >= box.x1 - ALLOWED:
                break
            if min(box.y1, beside.y1) - max(box.y0, beside.y0) > ALLOWED:
                yield f"{text!r} and {other!r} lie over each other"


def renamed(profile: Profile, names: list[str]) -> Profile:
    """Return a profile whose layers are called by hostile names, each with its number."""
    new = {layer.name: f"{names[at % len(names)]}{at}" for at, layer in enumerate(profile.layers)}
    layers = tuple(
        layer.model_copy(update={"name": new[layer.name], "measured_as": new.get(layer.measured_as or "")})
        for layer in profile.layers
    )
    tensors = tuple(
        each.model_copy(
            update={
                "producer": each.producer and new[each.producer],
                "consumers": tuple(map(new.__getitem__, each.consumers)),
            }
        )
        for each in profile.tensors
    )
    return profile.model_copy(update={"layers": layers, "tensors": tensors})


def a_plan(
    groups: int, replicas: int, names: list[str], micro_batches: int = 4, schedule: str = "1f1b"
) -> autopar.Plan:
    """Return a plan of equal stages with what stands beside plans that were searched."""
    profile = llama_profile(max(groups, 4), batch=micro_batches * replicas)
    profile = renamed(profile, names) if names else profile
    made, cluster = equal_plan(profile, schedule, groups, replicas, micro_batches)
    draw, step_s = random.Random(0), made.predicted.step_s
    bounds = Bounds(work_s=step_s * 0.7, contiguous_s=step_s * 0.8, linked_s=step_s * 0.85)
    others = [Alternative(name=name or "other", step_s=step_s * draw.uniform(1, 3)) for name in names[:1] + ["x"] * 6]
    changes = {"bounds": bounds, "lower_bound_s": step_s * 0.9}
    made = made.model_copy(
        update={
            "predicted": made.predicted.model_copy(update=changes),
            "alternatives": (*others, Alternative(name="sharded data parallelism", infeasible="too large")),
        }
    )
    kinds = [tuple(draw.choice((0, 1, 2)) for _ in SIMPLICITY) for _ in range(40)]
    met = [MetPlan(step_s * draw.uniform(1, 9), kind, 4) for kind in kinds]
    return autopar.Plan.of(made, profile, cluster, met)


def pictures(plan: autopar.Plan) -> Iterator[tuple[str, Figure]]:
    """Yield every picture of a plan, its cluster, its profile and its timelines."""
    for kind in plan.view().pictures:
        yield kind, plan.plot(kind)
    assert plan.origin is not None
    profile, cluster = plan.origin
    yield "devices", cluster.plot()
    yield "profile", profile.plot()
    predicted = simulate(plan, profile, cluster)
    measured = Timeline("measured")
    draw = random.Random(1)
    for event in predicted:
        late = 1.3 if event.rank == 1 else draw.uniform(1.0, 1.02)
        measured.add(
            event.rank, event.action, event.start_s * 1.3, event.start_s * 1.3 + (event.end_s - event.start_s) * late
        )
    for rank in range(predicted.rank_count()):
        measured.memory[rank] = [(0.0, 2**30), (0.5 * measured.end_s, 2**31 + rank)]
        measured.limits_bytes[rank] = 3 * 2**30
    yield "over", draw_over(measured, predicted)
    yield "measured", draw_timeline(measured)


@pytest.mark.some(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_no_label_of_four_ranks_lies_over_another_whatever_names_say(schedule: str) -> None:
    for kind, figure in pictures(a_plan(2, 2, NAMES, schedule=schedule)):
        assert list(faults(figure)) == [], kind


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "replicas", "names"),
    [(1, 64, NAMES), (64, 1, []), (8, 8, NAMES), (32, 32, NAMES), (1, 1024, [])],
    ids=str,
)
def test_nor_of_many(groups: int, replicas: int, names: list[str]) -> None:
    for kind, figure in pictures(a_plan(groups, replicas, names)):
        assert list(faults(figure)) == [], kind


@pytest.mark.slow
def test_nor_of_a_thousand_stages() -> None:
    plan = small_plan((1,) * 1024, 2)
    profile = renamed(llama_profile(1022), NAMES)
    figures = (draw_timeline(play(plan)), draw_stages(plan), draw_layers(plan, profile), draw_profile(profile))
    assert [list(faults(figure)) for figure in figures] == [[]] * len(figures)


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("2x2xH100:100Gbps", (2, 1)),
        ("8x8xH100:400Gbps", (8,) * 8),
        ("8x8xH100:400Gbps", (1,) * 64),
        ("128x8xH100:400Gbps", (512, 512)),
        ("128x8xH100:400Gbps", (8,) * 128),
        ("4x32x8xH100:400Gbps:100Gbps", (8,) * 128),
        ("128x8xH100:400Gbps", (3,) * 300),
        ("1024xH100", (1,) * 1024),
        ("1xH100", (1,)),
    ],
)
def test_nor_of_maps_of_nodes_and_racks(name: str, widths: tuple[int, ...]) -> None:
    cluster, stages = cluster_named(name), small_plan(widths, 2).stages
    hostile = tuple(each.model_copy(update={"type": NAMES[0]}) for each in cluster.devices)
    for each in (cluster, cluster.model_copy(update={"devices": hostile})):
        assert list(faults(draw_devices(each, stages))) == []


def test_a_label_over_another_and_one_that_is_cut_off_are_found() -> None:
    figure = Figure(figsize=(2, 2), dpi=100)
    for at, text in ((0.1, "one"), (0.15, "two"), (0.98, "edge")):
        figure.text(at, 0.5, text)
    assert list(faults(figure)) == ["'edge' is cut off", "'one' and 'two' lie over each other"]


def test_pictures_are_vectors_too_and_a_comparison_has_one() -> None:
    plan = a_plan(2, 2, NAMES[:2])
    for kind in plan.view().pictures:
        content = io.BytesIO()
        plan.plot(kind).savefig(content, format="svg")
        assert b"<svg" in content.getvalue()
    rows = (
        ComparisonRow("autopar", "0:1", 4, "1f1b", 0.5, 2**30),
        *(ComparisonRow(n, "0:1", 4, n, 1.0) for n in NAMES),
    )
    assert list(faults(autopar.Comparison(rows, plan).plot())) == []
