"""Pictures of timelines, every block where it says, and of plans, every device in the colour of its stage."""

import io
import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

import autopar
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.program import Action
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import cluster_named
from autopar.planner import PlanOptions, plan, simulate
from autopar.report.pictures import _places, draw_over, draw_placement, draw_timeline, extent, render
from equal_plans import equal_plan, llama_profile
from played import play, small_plan
from random_problems import gpt_profile, local_cluster, random_profile
from shown import shown

SHAPES = [((1,), 1, "gpipe"), ((2, 1), 4, "1f1b"), ((2, 1), 8, "gpipe"), ((2,) * 8, 64, "1f1b"), ((1, 2, 1), 6, "zb-v")]


def _bars(figure: Figure) -> int:
    collections = [each for each in figure.axes[0].collections if isinstance(each, PolyCollection)]
    return sum(len(each.get_paths()) for each in collections)


def _texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_blocks_lie_at_their_times_and_mini_batches_are_said_without_flushes() -> None:
    timeline = play(small_plan((1, 1), 2, "gpipe"))
    expected = {(round(event.start_s * 1e3, 6), round(event.end_s * 1e3, 6)) for event in timeline}
    paths = (path for collection in draw_timeline(timeline).axes[0].collections for path in collection.get_paths())
    assert expected <= {(round(box.x0, 6), round(box.x1, 6)) for box in (path.get_extents() for path in paths)}
    texts = {(text.get_text(), round(text.get_position()[0], 6)) for text in draw_timeline(timeline).axes[0].texts}
    computed = (event for event in timeline if event.action.kind in "FB")
    assert {(f"{each.action.micro_batch}", round((each.start_s + each.end_s) * 500, 6)) for each in computed} <= texts
    few, many = play(small_plan((1, 1), 4)), play(small_plan((1,) * 16, 64))
    assert {"0", "1", "2", "3"} <= set(_texts(draw_timeline(few)))
    assert "63" not in _texts(draw_timeline(many))
    profile, cluster = random_profile(10), local_cluster(2)
    flushed, unflushed = (
        simulate(plan(profile, cluster, PlanOptions(policy=policy, min_stages=2)), profile, cluster)  # type: ignore[arg-type]
        for policy in ("sync", "stash")
    )
    assert extent(flushed) == "step"
    assert draw_timeline(flushed).axes[0].get_title(loc="left").startswith("Predicted step: ")
    updates = sum(event.action.kind == "U" for event in unflushed) // 2
    assert updates > 20
    assert extent(unflushed) == f"{updates} mini-batches from fill to drain"
    title = draw_timeline(unflushed).axes[0].get_title(loc="left")
    assert title.startswith(f"Predicted {updates} mini-batches from fill to drain: ")


@pytest.mark.parametrize(("widths", "micro_batches", "schedule"), SHAPES)
def test_events_are_drawn_once_and_no_text_over_another(
    widths: tuple[int, ...], micro_batches: int, schedule: str
) -> None:
    plan = small_plan(widths, micro_batches, schedule)
    timeline = play(plan)
    assert _bars(draw_timeline(timeline)) == len(timeline) + timeline.rank_count()
    figure = draw_over(play(plan, "measured", jitter=0.3), timeline)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = (text for text in figure.axes[0].texts if text.get_text())
    boxes = sorted((text.get_window_extent(canvas.get_renderer()) for text in texts), key=lambda box: box.x0)
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if other.x0 >= box.x1:
                break
            assert min(box.y1, other.y1) - max(box.y0, other.y0) <= 0.5


def test_titles_state_errors_and_maps_stand_above_the_same_step() -> None:
    plan = small_plan((1, 1), 4)
    measured, predicted = play(plan, "measured", unit_s=0.02), play(plan, unit_s=0.01)
    notes = {
        text.get_text(): text.xy[1]
        for text in draw_over(measured, predicted).axes[0].texts
        if "rank" in text.get_text()
    }
    rows = [
        text.xy[1]
        for text in draw_over(measured, predicted).axes[0].texts
        if text.get_text() in ("measured", "predicted")
    ]
    assert notes["rank 0\nstage 0"] == pytest.approx(sum(rows[:2]) / 2)
    assert "(-50.0%)" in draw_over(measured, predicted).axes[0].get_title(loc="left")
    assert _bars(draw_timeline(Timeline("measured"))) == 0
    pictures = io.BytesIO(), io.BytesIO()
    for content in pictures:
        draw_timeline(play(small_plan((2, 1), 4))).savefig(content, format="png")
    assert pictures[0].getvalue() == pictures[1].getvalue()
    rows = shown(render(play(small_plan((1, 1), 4))))
    assert "0 0 40 ms 80 ms 2 ms 0 s 0 s 6 ms 32 ms" in rows
    cluster = cluster_named("2x4xH100:100Gbps")
    profile = gpt_profile(blocks=4)
    gpu = profile.device.model_copy(update={"type": "cuda", "name": "H100-SXM"})
    made = autopar.plan(profile.model_copy(update={"device": gpu}), cluster, gpus=8, stages="0-2:4,3-5:4")
    timeline = made.timeline()
    both, alone = draw_placement(made, cluster, timeline), timeline.plot()
    step, places = both.axes
    (only,) = alone.axes
    assert isinstance(timeline, Timeline)
    assert step.get_xlim() == only.get_xlim()
    assert len(step.collections) == len(only.collections)
    assert places.get_position().y0 > step.get_position().y1
    held = play(small_plan((1, 1), 2))
    held.memory.update({0: [(0.0, 2**20)], 1: [(0.0, 3 * 2**20)]})
    held.limits_bytes.update({0: 5 * 2**20, 1: 4 * 2**20})
    assert "most memory: rank 1 holds 3 MiB of 4 MiB" in shown(render(held))
    (line,) = [each for axes in draw_timeline(held).axes for each in axes.lines if each.get_linestyle() == "--"]
    assert list(line.get_ydata()) == [4.0, 4.0]  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_picture_of_a_thousand_ranks_is_no_taller_than_a_file_can_be() -> None:
    timeline = Timeline("simulated")
    for rank in range(1024):
        timeline.add(rank, Action("F", rank, 0), 0.1 * rank, 0.1 * (rank + 1))
    figure = draw_timeline(timeline)
    width, height = figure.get_size_inches() * figure.dpi
    assert max(width, height) < 2**15
    assert _bars(figure) == 2 * 1024


def _drawn(made: Plan, cluster: Cluster) -> tuple[list[tuple[float, ...]], set[str]]:
    """Return the colour of every device's square, in their order, and all texts of the map."""
    _, places = draw_placement(made, cluster, play(made)).axes
    squares = next(each for each in places.collections if len(each.get_offsets()) == len(cluster.devices))
    texts = {text.get_text() for text in places.texts} | {places.get_title(loc="left")}
    return [tuple(colour) for colour in squares.get_facecolor()], texts


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("2x4xH100:100Gbps", small_plan((5, 2), 2)),
        ("4xH100", equal_plan(llama_profile(6), "interleaved", 3)[0]),
        ("2x2x2xH100:100Gbps:10Gbps", small_plan((2, 1, 4), 3, "gpipe")),
        ("40x8xH100:400Gbps", small_plan((8, 8), 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_devices_of_a_stage_have_one_colour_and_those_of_others_another(name: str, made: Plan) -> None:
    cluster = cluster_named(name)
    colours, texts = _drawn(made, cluster)
    several = enumerate(dict.fromkeys(s.devices for s in made.stages))
    groups = {device: number for number, devices in several for device in devices}
    for one, other in itertools.combinations(groups, 2):
        assert (colours[one] == colours[other]) == (groups[one] == groups[other])
    assert f"{len(made.stages)} stages on {len(groups)} of {len(cluster.devices)} devices" in texts
    assert sum("node" in text for text in texts) == len({(each.rack, each.node) for each in cluster.devices})
    numbered = {",".join(str(at) for at, s in enumerate(made.stages) if device in s.devices) for device in groups}
    assert (numbered <= texts) == (len(cluster.devices) <= 256)


def test_every_device_of_a_node_lies_in_its_box_however_many_others_have() -> None:
    nodes = [0] * 9 + [1]
    cluster = cluster_named("5x2xH100:100Gbps")
    devices = tuple(each.model_copy(update={"node": node}) for each, node in zip(cluster.devices, nodes, strict=True))
    places = _places(cluster.model_copy(update={"devices": devices}))
    boxes = list(places.boxes.values())
    for device, node in enumerate(nodes):
        (across, down), (left, top, wide, high) = places.at[device], boxes[node]
        assert left < across < left + wide
        assert top < down < top + high
