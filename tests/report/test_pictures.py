"""Pictures of timelines, every block where it says, and of plans, every device in the colour of its stage."""

import io
import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver

import autopar
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.program import Action
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import cluster_named
from autopar.planner import PlanOptions, plan, simulate
from autopar.report.folding import MOST_ROWS, alike_ranks, time_axis
from autopar.report.maps import device_map, draw_placement
from autopar.report.pictures import draw_over, draw_timeline, extent, render
from equal_plans import equal_plan, llama_profile
from played import play, small_plan
from random_problems import gpt_profile, local_cluster, random_profile, two_kinds
from shown import shown

SHAPES = [((1,), 1, "gpipe"), ((2, 1), 4, "1f1b"), ((2, 1), 8, "gpipe"), ((2,) * 8, 40, "1f1b"), ((1, 2, 1), 6, "zb-v")]


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
    assert not {"31", "32"} & set(_texts(draw_timeline(many)))
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
def test_events_of_ranks_alike_are_drawn_once_and_no_text_over_another(
    widths: tuple[int, ...], micro_batches: int, schedule: str
) -> None:
    plan = small_plan(widths, micro_batches, schedule)
    timeline = play(plan)
    drawn = {group.members[0] for group in alike_ranks(timeline)}
    assert len(drawn) == len(widths)
    events = sum(event.rank in drawn for event in timeline)
    assert _bars(draw_timeline(timeline)) == events + len(drawn)
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
def test_of_a_thousand_unlike_ranks_some_are_drawn_from_the_first_to_the_last() -> None:
    timeline = Timeline("simulated")
    for rank in range(1024):
        timeline.add(rank, Action("F", rank, 0), 0.1 * rank, 0.1 * (rank + 1))
    figure = draw_timeline(timeline)
    assert _bars(figure) == 2 * MOST_ROWS
    labels = [text for text in _texts(figure) if "rank" in text]
    assert (labels[0], labels[-1], len(labels)) == ("rank 0\nstage 0", "rank 1023\nstage 1023", MOST_ROWS)
    assert f"{MOST_ROWS} of 1,024 unlike ranks are drawn" in figure.axes[0].get_title(loc="left")


def _drawn(made: Plan, cluster: Cluster) -> tuple[dict[int, tuple[float, ...]], set[str]]:
    """Return the colours of all devices, each alone or with those like it, and all texts of the map."""
    _, places = draw_placement(made, cluster, play(made)).axes
    drawn = device_map(cluster, made.stages).squares
    (squares,) = (each for each in places.collections if len(each.get_offsets()) == len(drawn) > 1)
    pairs = zip(drawn, squares.get_facecolor(), strict=True)
    texts = {text.get_text() for text in places.texts} | {places.get_title(loc="left")}
    return {device: tuple(colour) for square, colour in pairs for device in square.devices}, texts


def test_devices_of_several_kinds_in_a_stage_say_how_many_rows_each_has() -> None:
    for seed in range(20):
        profile, cluster = two_kinds(random_profile(seed, batches=(12,)), local_cluster(3), seed)
        made = plan(profile, cluster, PlanOptions(stages=f"0-{len(profile.layers) - 1}:3", micro_batches=1))
        (stage,) = made.stages
        if len(set(stage.shares)) > 1:
            rows = dict(zip(stage.devices, stage.shares, strict=True))
            drawn = device_map(cluster, made.stages).squares
            labels = {device: square.label for square in drawn for device in square.devices}
            assert labels == {device: f"0\n{rows[device]} rows" for device in stage.devices}
            assert set(labels.values()) <= _drawn(made, cluster)[1]
            return
    raise AssertionError("no stage has unlike shares")


@pytest.mark.parametrize(
    ("name", "made", "named"),
    [
        ("2x4xH100:100Gbps", small_plan((5, 2), 2), {"node 0", "node 1"}),
        ("4xH100", equal_plan(llama_profile(6), "interleaved", 3)[0], {"node 0"}),
        (
            "2x2x2xH100:100Gbps:10Gbps",
            small_plan((2, 1, 4), 3, "gpipe"),
            {"rack 0, node 0", "rack 0, node 1", "rack 1, node 2", "rack 1, node 3"},
        ),
        ("40x8xH100:400Gbps", small_plan((8, 8), 2), {"node 0", "node 1", "nodes 2-39 (x 38)"}),
        ("4x8xH100:400Gbps", small_plan((16, 16), 2), {"nodes 0, 1 (x 2)", "nodes 2, 3 (x 2)"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_devices_of_a_stage_have_one_colour_and_nodes_alike_are_drawn_once(
    name: str, made: Plan, named: set[str]
) -> None:
    cluster = cluster_named(name)
    colours, texts = _drawn(made, cluster)
    several = enumerate(dict.fromkeys(s.devices for s in made.stages))
    groups = {device: number for number, devices in several for device in devices}
    for one, other in itertools.combinations(groups, 2):
        assert (colours[one] == colours[other]) == (groups[one] == groups[other])
    assert f"{len(made.stages)} stages on {len(groups)} of {len(cluster.devices)} devices" in texts
    of_nodes = {name.partition(":")[0] for name in texts if name.startswith(("node", "rack"))}
    assert of_nodes == named
    numbered = {", ".join(str(at) for at, s in enumerate(made.stages) if device in s.devices) for device in groups}
    assert numbered <= texts


def test_every_device_of_a_node_lies_in_its_box_however_many_others_have() -> None:
    nodes = [0] * 9 + [1]
    cluster = cluster_named("5x2xH100:100Gbps")
    devices = tuple(each.model_copy(update={"node": node}) for each, node in zip(cluster.devices, nodes, strict=True))
    places = device_map(cluster.model_copy(update={"devices": devices}))
    for node in places.nodes:
        for across, down in (square.at for square in node.squares):
            assert node.left < across < node.left + places.wide
            assert node.top < down < node.top + places.high
    assert [len(node.squares) for node in places.nodes] == [9, 1]


def test_devices_of_a_large_node_are_drawn_once_that_hold_the_same() -> None:
    places = device_map(cluster_named("64xH100"), small_plan((32, 31), 2).stages)
    assert [(square.places.times, square.stages) for square in places.squares] == [
        ("x 32", (0,)),
        ("x 31", (1,)),
        ("", ()),
    ]


def test_moments_on_either_side_of_a_gap_are_where_the_axis_says_and_its_micro_batches_are_counted() -> None:
    profile = llama_profile(4, batch=256)
    made, cluster = equal_plan(profile, "gpipe", 2, 1, 256)
    timeline = simulate(made, profile, cluster)
    time = time_axis(timeline, (0, 1))
    assert len(time.gaps) == 2
    timeline.memory.update({rank: [(0.0, 1), (timeline.end_s / 3, 2), (timeline.end_s, 1)] for rank in (0, 1)})
    shown = autopar.Plan.of(made, profile, cluster)
    for figure in (
        draw_timeline(timeline),
        draw_over(timeline, simulate(made, profile, cluster)),
        shown.plot("memory"),
    ):
        (labels,) = filter(None, (axes.get_xticklabels() for axes in figure.axes))
        ticks = [(float(label.get_text().replace(",", "")), label.get_position()[0]) for label in labels]
        assert len(ticks) > 3
        assert [place for _, place in ticks] == pytest.approx([time.place(at / 1e3) * 1e3 for at, _ in ticks])
        assert len([text for text in _texts(figure) if text.endswith(" more")]) in (2, 0)
    counts = [int(text.split()[0]) for text in _texts(draw_timeline(timeline)) if text.endswith("more")]
    assert all(240 <= count < 256 for count in counts)


def test_a_message_is_an_arrow_from_its_senders_row_to_its_receivers() -> None:
    timeline = play(small_plan((2, 1), 4))
    (arrows,) = (
        each for each in draw_timeline(timeline, messages=True).axes[0].collections if isinstance(each, Quiver)
    )
    received = [event for event in timeline if event.action.kind in ("R", "RG") and event.rank in (0, 2)]
    starts = sorted(event.end_s - event.start_s for event in received)
    assert len(arrows.U) == len(received)
    assert sorted(arrows.U / 1e3) == pytest.approx(starts, abs=0.011)
    assert {value > 0 for value in arrows.V} == {True, False}
    assert not any(isinstance(each, Quiver) for each in draw_timeline(timeline).axes[0].collections)
