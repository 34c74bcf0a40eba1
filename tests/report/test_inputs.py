"""Tables of profiles, also as bars, and of clusters; of reports and programs, and quantities in them."""

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autopar.formats.cluster import Cluster, Curve, Device, Level, Link, Overlap
from autopar.formats.document import Provenance
from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative
from autopar.formats.profile import (
    DeviceCosts,
    DeviceKind,
    Layer,
    Line,
    ModelSource,
    Noise,
    Profile,
    Tensor,
    TiedParameter,
)
from autopar.report.charts import draw_profile
from autopar.report.inputs import render_cluster, render_profile
from autopar.report.plan import render
from autopar.report.table import print_parts
from played import small_plan
from random_problems import cost, profile_of
from shown import shown

MIB = 2**20


def _profile(count: int, provenance: Provenance = "measured", halves: bool = False) -> Profile:
    """Return ``count`` layers, of which every one in the middle takes a millisecond more than the one before it."""
    names = [f"model.transformer.decoder.layers.{index}" for index in range(count)]
    known: dict[str, Any] = {"provenance": provenance, "repeats": 7 if provenance == "measured" else 0}
    known |= {"backward_input_s": 3e-3, "backward_weight_s": 4e-3, "recompute_s": 1.5e-3} if halves else {}
    layers = []
    for index, name in enumerate(names):
        own = cost(4, (index + 1) * 1e-3, (index + 1) * 2e-3, {f"{name}:0": 3 * MIB}, 5 * MIB, MIB)
        sizes = {"trainable_bytes": MIB, "gradient_bytes": MIB, "optimizer_bytes": 2 * MIB}
        times = {"update_s": 2.5e-4, "costs": (own.model_copy(update=known),)}
        fit = Line(fixed_s=1e-4, per_sample_s=2e-4, residual=0.01 * index)
        fields: dict[str, Any] = {**sizes, **times, "parameters_bytes": (index + 1) * MIB, "forward_fit": fit}
        layers.append(Layer(name=name, modules=(name,), **fields))
    shape: dict[str, Any] = {"bytes_per_sample": MIB, "dtype": "float32", "gradient": True}
    pairs, clocks = enumerate(pairwise(names)), (1.98e9, 1.41e9)
    tensors = [Tensor(name=f"t{at}", producer=one, consumers=(two,), **shape) for at, (one, two) in pairs]
    changes = {
        "model": ModelSource(source="<model>.py", sha256="0" * 64),
        "device": DeviceKind(type="cuda", name="H100-SXM", memory_bytes=80 * 10**9),
        "precision": "bf16",
        "noise": Noise(median_spread=0.01, max_spread=0.02, caches="cold", clock_hz=clocks, throttled="power"),
        "notes": ("a [note]",),
    }
    return profile_of(layers, tensors, 4).model_copy(update=changes)


def _text(profile: Profile, width: int = 80) -> str:
    stream = io.StringIO()
    print_parts(render_profile(profile), Console(file=stream, width=width))
    return stream.getvalue()


def test_tables_state_layers_shares_how_times_were_found_and_the_greatest_kinds_first() -> None:
    text = _text(_profile(3, halves=True), width=120)
    for expected in (
        "profile of <model>.py: bf16 on H100-SXM",
        "Backwards split or recomputed",
        "1.5 ms",
        "50.0 %",
        "times: measured",
        "measuring: each 7 to 7 times, cold caches, as in a step, spread median 1.0 %, largest 2.0 %",
        "at most 2.0 % off (model.transformer.decoder.layers.2: 100 us + 200 us a sample)",
        "clock before and after: 1980 MHz and 1410 MHz",
        "throttled: power",
        "gradients 3 MiB, optimizer's state 6 MiB",
        "a [note]",
    ):
        assert expected in text
    assert "known" not in text
    text = _text(_profile(20), width=120)
    shares = text[text.index("Where time and memory are") :].splitlines()
    assert shares[4].split()[:3] == ["model.transformer.decoder.layers.19", "1", "9.5"]
    assert any(line.split()[:3] == ["all", "others", "12"] for line in shares)
    # What ends a run of layers that are alike is another crossing; shared parameters count once.
    known = _profile(4)
    layers = [
        known.layers[0],
        *(each.model_copy(update={"measured_as": known.layers[0].name}) for each in known.layers[1:]),
    ]
    larger = known.tensors[1].model_copy(update={"bytes_per_sample": 2 * MIB})
    tied = TiedParameter(parameter="w", layers=(layers[0].name, layers[2].name), bytes=MIB // 2, trainable=True)
    tensors = (known.tensors[0], larger, known.tensors[2])
    slow = DeviceKind(type="cuda", name="slow", memory_bytes=2**33)
    costs = [each.costs[0].model_copy(update={"forward_s": 2e-3, "backward_s": 1.8e-2}) for each in layers]
    other = [each.model_copy(update={"costs": (cost,)}) for each, cost in zip(layers, costs, strict=True)]
    changes = {"layers": tuple(layers), "tensors": tensors, "tied": (tied,)}
    changes["others"] = (DeviceCosts(device=slow, layers=tuple(other)),)
    rows = shown(render_profile(known.model_copy(update=changes)), 120)
    name = "model.transformer.decoder.layers"
    assert f"0 {name}.0 1 MiB 1 ms 2 ms 3 MiB 5 MiB 4 MiB" in rows
    assert f"1 {name}.1 2 MiB 2 ms 4 ms 3 MiB 5 MiB 8 MiB" in rows
    assert f"2 {name}.2 3 MiB 3 ms 6 ms 3 MiB 5 MiB 4 MiB" in rows
    assert any(row.startswith("4 layers 9.5 MiB 10 ms 20 ms") for row in rows)
    assert "slow 8 GiB 4 8 ms 72 ms 2.67 measured" in rows


def test_what_is_not_known_for_sure_is_marked_and_racks_are_told_apart() -> None:
    profile = _profile(2)
    estimated = _profile(2, "estimated")
    mixed = profile.model_copy(update={"layers": (profile.layers[0], estimated.layers[1])})
    text = _text(mixed, width=120)
    assert "known" in text
    assert "times: 1 of 2 measured, 1 of 2 estimated" in text
    assert "times: estimated" in _text(estimated)
    assert "measuring" not in _text(estimated)
    devices = tuple(Device(type="cuda", memory_bytes=2**33, node=node, rack=node // 2) for node in (0, 1, 2, 3, 4, 4))
    levels: tuple[Level, ...] = ("node", "network", "rack")
    links = tuple(Link(level=level, latency_s=2e-5, bytes_per_s=5e9) for level in levels)
    tables = (_cluster_lines(Cluster(devices=devices, links=links[:count])) for count in (3, 2))
    rows = [[line.split()[:3] for line in table if "cuda" in line] for table in tables]
    # Racks and nodes of each make, devices of a node; without a link of their level, racks are not there.
    assert rows == [[["2", "2", "1"], ["1", "1", "2"]], [["4", "1", "cuda"], ["1", "2", "cuda"]]]


@pytest.mark.parametrize("count", [1, 2, 200])
def test_tables_are_whole_on_a_narrow_terminal_bars_stand_for_every_layer_and_names_stay_apart(count: int) -> None:
    assert all(len(line) <= 80 for line in _text(_profile(count, halves=True)).splitlines())
    figure = draw_profile(_profile(count))
    time, saved, parameters, crossing = figure.axes
    assert [len(axes.patches) for axes in (time, saved, parameters)] == [2 * count, 2 * count, count]
    last = time.patches[-1]
    assert last.get_y() + last.get_height() == pytest.approx(3.0 * count)
    # Of every boundary, a mebibyte for each of four samples.
    assert list(crossing.lines[0].get_ydata()) == [4.0] * (count - 1)  # type: ignore[arg-type]
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in crossing.get_xticklabels()]
    assert all(one.x1 <= two.x0 for one, two in pairwise(boxes))
    assert all(axes.get_window_extent().height > 60 for axes in figure.axes)


def test_names_are_drawn_as_they_are_and_plans_say_where_times_come_from() -> None:
    text = _profile(2).dumps().replace("model.transformer.decoder.layers.0", r"$\\frac{$")
    profile = Profile.parse(text, Path("profile.json"))
    model = profile.model.model_copy(update={"source": "$\\frac{$.py"})
    figure = draw_profile(profile.model_copy(update={"model": model}))
    figure.savefig(io.BytesIO(), format="png")
    (title,) = figure.texts
    assert title.get_text().startswith("profile of $\\frac{$.py")
    assert "$\\frac{$" in [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]
    plan = small_plan((1, 1), 2)
    assert "computing times" not in "\n".join(_plan_lines(plan))
    alike = "\n".join(_plan_lines(plan, compute=("measured", "measured"), communication="interpolated"))
    assert "Stages (times of one micro-batch, measured)" in alike
    assert "known" not in alike
    assert "interpolated" in alike
    mixed = _plan_lines(plan, compute=("measured", "estimated"))
    assert any("known" in line for line in mixed)
    assert not any("communication times" in line for line in mixed)
    assert "computing times estimated" in mixed
    assert [line.split()[-1] for line in mixed if line[:1] in ("0", "1")] == ["measured", "estimated"]


def _cluster_lines(cluster: Cluster, *, sizes: bool = False) -> list[str]:
    return shown(render_cluster(cluster, sizes=sizes), 120)


def test_tables_cut_many_stages_short_and_group_equal_devices() -> None:
    devices = (Device(type="[cpu]", memory_bytes=2**33),) * 4
    link = Link(level="node", latency_s=2e-5, bytes_per_s=5e9, provenance="measured")
    curve = Curve(kind="all_reduce", ranks=2, level="node", sizes=(1024, 2**20), seconds=(1e-4, 2e-3))
    text = "\n".join(_cluster_lines(Cluster(devices=devices, links=(link,), curves=(curve,), notes=("a [note]",))))
    for part in ("4 [cpu] 8 GiB", "20 us", "5 GB/s", "measured", "all-reduce", "1 KiB to 1 MiB", "2 ms", "a [note]"):
        assert part in text
    cluster = Cluster(
        devices=tuple(Device(type="cuda", memory_bytes=2**33, node=node) for node in (0, 0, 1, 1)),
        links=tuple(Link(level=level, latency_s=2e-5, bytes_per_s=5e9) for level in ("node", "network")),  # type: ignore[arg-type]
        curves=(Curve(kind="all_reduce", ranks=4, level="node", sizes=(10**6, 10**9), seconds=(1e-3, 1e-1)),),
        overlaps=(Overlap(level="node", compute=1.25, communication=1.5),),
    )
    few, every = _cluster_lines(cluster), _cluster_lines(cluster, sizes=True)
    assert "2 2 cuda 8 GiB" in few
    for text in map("\n".join, (few, every)):
        # 10^9 bytes in a tenth of a second; an all-reduce among 4 moves 1.5 times as much.
        assert all(part in text for part in ("10 GB/s", "15 GB/s", "1.25 x"))
    assert any("1.5 GB/s" in line for line in every)
    stages = ",".join(f"{stage}:1" for stage in range(60))
    other = Alternative(name="equal split", step_s=1.0, stages=stages, micro_batches=2, schedule="1f1b")
    plan = small_plan((1,) * 60, 2).model_copy(update={"alternatives": (other,)})
    lines = _plan_lines(plan, compute=(), forward_s=(), backward_s=(), peak_bytes=(1,) * 60, limit_bytes=())
    numbers = [line.split()[0] for line in lines if line[:1].isdigit()]
    assert numbers == [str(stage) for stage in (*range(30), *range(50, 60))]
    assert any("20 more" in line for line in lines)
    assert any("0:1, 1:1, 2:1, ... 54 more ..., 57:1, 58:1, 59:1" in line for line in lines)


def _plan_lines(plan: Plan, **known: object) -> list[str]:
    predicted = plan.predicted.model_copy(update=known)
    return shown(render(plan.model_copy(update={"predicted": predicted})))
