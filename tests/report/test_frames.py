"""Frames for notebooks, and the memory picture, hold what the documents say."""

from __future__ import annotations

from autopar.formats.plan import Alternative
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, SavedStorage, Tensor
from autopar.report import frames
from autopar.report import plan as memory
from played import small_plan


def _layer(name: str, seconds: float) -> Layer:
    costs = tuple(
        Cost(
            micro_batch=rows,
            forward_s=seconds * rows,
            backward_s=2 * seconds * rows,
            saved=(SavedStorage(storage=f"{name}.a", bytes=10 * rows), SavedStorage(storage=f"{name}.b", bytes=rows)),
            peak_bytes=20 * rows,
            output_bytes=4 * rows,
        )
        for rows in (1, 4)
    )
    sizes = {"parameters_bytes": 8, "trainable_bytes": 8, "gradient_bytes": 8, "optimizer_bytes": 16}
    return Layer(name=name, modules=(name,), costs=costs, **sizes)


def _profile() -> Profile:
    """Three layers a, b, c with a skip from a to c."""

    def tensor(name: str, producer: str | None, consumers: tuple[str, ...], count: int) -> Tensor:
        return Tensor(
            name=name, producer=producer, consumers=consumers, bytes_per_sample=count, dtype="float32", gradient=True
        )

    return Profile(
        model=ModelSource(source="model.py", sha256="0" * 64),
        batch=4,
        device=DeviceKind(type="cpu", name="cpu", memory_bytes=2**30),
        precision="fp32",
        layers=(_layer("a", 1.0), _layer("b", 2.0), _layer("c", 3.0)),
        tensors=(
            tensor("input", None, ("a", "c"), 1000),
            tensor("x", "a", ("b", "c"), 100),
            tensor("y", "b", ("c",), 10),
        ),
        noise=Noise(median_spread=0.0, max_spread=0.0),
    )


def test_a_cut_is_charged_with_every_tensor_that_crosses_it_and_with_no_model_input() -> None:
    crossing = _profile().to_frame()["crossing_bytes_per_sample"].xs(1, level="micro_batch")
    assert crossing.to_dict() == {"a": 100, "b": 110, "c": 0}


def test_layers_hold_one_row_per_measured_size() -> None:
    table = _profile().to_frame()
    assert len(table) == 6
    assert table.loc[("b", 4), "backward_s"] == 16.0
    assert table.loc[("b", 4), "saved_bytes"] == 44


def test_stages_and_alternatives_hold_what_the_plan_says() -> None:
    plan = small_plan((2, 1), 4).model_copy(
        update={
            "alternatives": (
                Alternative(name="equal split", infeasible="stage 1 needs more"),
                Alternative(name="slow", step_s=2.0),
                Alternative(name="best", step_s=1.0),
            )
        }
    )
    assert frames.stages(plan)["devices"].tolist() == [[0, 1], [2]]
    assert frames.alternatives(plan)["name"].tolist() == ["best", "slow", "equal split"]
    assert frames.alternatives(small_plan((1,), 1)).empty


def test_the_memory_picture_compares_each_stage_with_its_smallest_device() -> None:
    figure = memory.draw_memory(small_plan((2, 1), 4), [2**22, 2**21, 2**22])
    assert [text.get_text() for text in figure.axes[0].texts] == ["1 MiB of 2 MiB (50.0%)", "1 MiB of 4 MiB (25.0%)"]
