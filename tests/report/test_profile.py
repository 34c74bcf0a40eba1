"""A profile as tables and as bars."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from autopar.formats.document import Provenance
from autopar.formats.profile import Cost, DeviceKind, Layer, Line, ModelSource, Noise, Profile, SavedStorage, Tensor
from autopar.report.pictures import draw_profile
from autopar.report.profile import render

MIB = 2**20


def _profile(count: int, provenance: Provenance = "measured", halves: bool = False) -> Profile:
    """Return ``count`` layers, of which every one in the middle takes a millisecond more than the one before it."""
    names = [f"model.transformer.decoder.layers.{index}" for index in range(count)]
    halved = {"backward_input_s": 3e-3, "backward_weight_s": 4e-3, "recompute_s": 1.5e-3} if halves else {}
    layers = tuple(
        Layer(
            name=name,
            modules=(name,),
            parameters_bytes=(index + 1) * MIB,
            trainable_bytes=MIB,
            gradient_bytes=MIB,
            optimizer_bytes=2 * MIB,
            update_s=2.5e-4,
            costs=(
                Cost(
                    micro_batch=4,
                    forward_s=(index + 1) * 1e-3,
                    backward_s=(index + 1) * 2e-3,
                    saved=(SavedStorage(storage=f"{name}:0", bytes=3 * MIB),),
                    peak_bytes=5 * MIB,
                    output_bytes=MIB,
                    repeats=7 if provenance == "measured" else 0,
                    provenance=provenance,
                    **halved,  # type: ignore[arg-type]
                ),
            ),
            forward_fit=Line(fixed_s=1e-4, per_sample_s=2e-4, residual=0.01 * index),
        )
        for index, name in enumerate(names)
    )
    tensors = tuple(
        Tensor(name=f"t{i}", producer=one, consumers=(two,), bytes_per_sample=MIB, dtype="float32", gradient=True)
        for i, (one, two) in enumerate(pairwise(names))
    )
    return Profile(
        model=ModelSource(source="<model>.py", sha256="0" * 64),
        batch=4,
        device=DeviceKind(type="cuda", name="H100-SXM", memory_bytes=80 * 10**9),
        precision="bf16",
        layers=layers,
        tensors=tensors,
        noise=Noise(median_spread=0.01, max_spread=0.02, caches="cold", clock_hz=(1.98e9, 1.41e9), throttled="power"),
        notes=("a [note]",),
    )


def _text(profile: Profile, width: int = 80) -> str:
    stream = io.StringIO()
    render(profile, Console(file=stream, width=width))
    return stream.getvalue()


def test_tables_state_layers_shares_and_how_times_were_found() -> None:
    text = _text(_profile(3, halves=True), width=120)
    for expected in (
        "profile of <model>.py: bf16 on H100-SXM",
        "Backwards split or recomputed",
        "1.5 ms",
        "50.0 %",
        "times: measured",
        "measuring: each 7 to 7 times, caches cold, spread median 1.0 %, largest 2.0 %",
        "at most 2.0 % off (model.transformer.decoder.layers.2: 100 us + 200 us a sample)",
        "clock before and after: 1980 MHz and 1410 MHz",
        "throttled: power",
        "gradients 3 MiB, optimizer's state 6 MiB",
        "a [note]",
    ):
        assert expected in text
    assert "known" not in text


def test_the_greatest_kinds_come_first_and_the_others_together() -> None:
    text = _text(_profile(20), width=120)
    shares = text[text.index("Where time and memory are") :].splitlines()
    assert shares[4].split()[:3] == ["model.transformer.decoder.layers.19", "1", "9.5"]
    assert any(line.split()[:3] == ["all", "others", "12"] for line in shares)


def test_what_is_not_known_for_sure_is_marked_layer_by_layer() -> None:
    profile = _profile(2)
    estimated = _profile(2, "estimated")
    mixed = profile.model_copy(update={"layers": (profile.layers[0], estimated.layers[1])})
    text = _text(mixed, width=120)
    assert "known" in text
    assert "times: 1 of 2 measured, 1 of 2 estimated" in text
    assert "times: estimated" in _text(estimated)
    assert "measuring" not in _text(estimated)


@pytest.mark.parametrize("count", [1, 2, 200])
def test_tables_are_whole_on_a_narrow_terminal(count: int) -> None:
    assert all(len(line) <= 80 for line in _text(_profile(count, halves=True)).splitlines())


@pytest.mark.parametrize("count", [1, 2, 60, 200])
def test_bars_stand_for_every_layer_and_names_stay_apart(count: int) -> None:
    figure = draw_profile(_profile(count))
    time, saved, parameters, crossing = figure.axes
    assert [len(axes.patches) for axes in (time, saved, parameters)] == [2 * count, 2 * count, count]
    last = time.patches[-1]
    assert last.get_y() + last.get_height() == pytest.approx(3.0 * count)
    assert len(crossing.lines[0].get_xdata()) == count - 1  # type: ignore[arg-type]
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in crossing.get_xticklabels()]
    assert all(one.x1 <= two.x0 for one, two in pairwise(boxes))
    assert all(axes.get_window_extent().height > 60 for axes in figure.axes)


def test_names_that_look_like_formulas_are_drawn_as_they_are() -> None:
    text = _profile(2).dumps().replace("model.transformer.decoder.layers.0", r"$\\frac{$")
    profile = Profile.parse(text, Path("profile.json"))
    model = profile.model.model_copy(update={"source": "$\\frac{$.py"})
    figure = draw_profile(profile.model_copy(update={"model": model}))
    content = io.BytesIO()
    figure.savefig(content, format="png")
    (title,) = figure.texts
    assert title.get_text().startswith("profile of $\\frac{$.py")
    assert "$\\frac{$" in [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]
