"""The picture of a plan: every device where it stands, coloured by its stage, above the predicted step."""

from __future__ import annotations

import pytest

import autopar
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import cluster_named
from autopar.planner import PlanOptions, plan, simulate
from autopar.report.pictures import draw_placement
from random_problems import gpt_profile

H100 = {"type": "cuda", "name": "H100-SXM"}


def _profile() -> Profile:
    profile = gpt_profile(blocks=12)
    return profile.model_copy(update={"device": profile.device.model_copy(update=H100)})


def _drawn(made: Plan, cluster: Cluster) -> tuple[list[tuple[float, ...]], set[str]]:
    """Return the colour of every device's square, in their order, and all texts of the map."""
    timeline = simulate(made, _profile(), cluster)
    _, places = draw_placement(made, cluster, timeline).axes
    squares = next(each for each in places.collections if len(each.get_offsets()) == len(cluster.devices))
    texts = {text.get_text() for text in places.texts} | {places.get_title(loc="left")}
    return [tuple(colour) for colour in squares.get_facecolor()], texts


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("2x4xH100:100Gbps", {"schedule": "1f1b", "stages": "0-6:5,7-13:2"}),
        ("4xH100", {"schedule": "interleaved", "min_stages": 3}),
        ("2x2x2xH100:100Gbps:10Gbps", {"schedule": "gpipe", "min_stages": 3}),
        ("40x8xH100:400Gbps", {"max_stages": 2}),
    ],
)
def test_devices_of_a_stage_have_one_colour_and_those_of_others_another(name: str, options: dict[str, object]) -> None:
    cluster = cluster_named(name)
    made = plan(_profile(), cluster, PlanOptions(gpus=len(cluster.devices), **options))  # type: ignore[arg-type]
    colours, texts = _drawn(made, cluster)
    groups = {
        device: number
        for number, devices in enumerate(dict.fromkeys(s.devices for s in made.stages))
        for device in devices
    }
    for one in groups:
        for other in groups:
            assert (colours[one] == colours[other]) == (groups[one] == groups[other])
    assert f"{len(made.stages)} stages on {len(groups)} of {len(cluster.devices)} devices" in texts
    assert sum("node" in text for text in texts) == len({(each.rack, each.node) for each in cluster.devices})
    numbered = {",".join(str(at) for at, s in enumerate(made.stages) if device in s.devices) for device in groups}
    assert (numbered <= texts) == (len(cluster.devices) <= 256)


def test_the_map_stands_above_the_same_step() -> None:
    cluster = cluster_named("2x4xH100:100Gbps")
    made = autopar.plan(_profile(), cluster, gpus=8, min_stages=2)
    timeline = made.timeline()
    both, alone = draw_placement(made, cluster, timeline), timeline.plot()
    step, places = both.axes
    (only,) = alone.axes
    assert isinstance(timeline, Timeline)
    assert step.get_xlim() == only.get_xlim()
    assert len(step.collections) == len(only.collections)
    assert places.get_position().y0 > step.get_position().y1
