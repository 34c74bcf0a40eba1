"""Steps in the units of whoever plans a training, as rows and columns of tables: rates, utilisation, hours and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.table import amount, figure, long_duration, percentage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from autopar.formats.prediction import Throughput, Training


def throughput_rows(throughput: Throughput | None) -> Iterator[tuple[str, str]]:
    """Yield what a step is in the units of whoever plans a training; nothing where that is not known."""
    if throughput is None:
        return
    yield "samples per second", _rate(throughput, throughput.samples_per_s)
    if throughput.tokens_per_s is not None:
        yield f"tokens per second ({throughput.tokens_per_sample} a sample)", _rate(throughput, throughput.tokens_per_s)
    if throughput.flops_utilisation is not None:
        yield "model FLOPs utilisation", percentage(throughput.flops_utilisation)
    for each in (throughput.unit, throughput.whole):
        if each is not None:
            yield length_text(each), training_text(each)


def _rate(throughput: Throughput, rate: float) -> str:
    each = f", {figure(rate / throughput.devices)} a device" if throughput.devices > 1 else ""
    return f"{figure(rate)}{each}"


def length_text(training: Training) -> str:
    """Return how long a training is."""
    if training.tokens is None:
        return f"{amount(training.samples)} samples take"
    return f"{amount(training.tokens)} tokens take"


def training_text(training: Training) -> str:
    """Return what a training takes."""
    energy = "" if training.energy_kwh is None else f", {figure(training.energy_kwh)} kWh"
    cost = "" if training.cost is None else f", cost {figure(training.cost)}"
    return f"{long_duration(training.duration_s)}, {figure(training.device_hours)} device hours{energy}{cost}"


def throughput_columns(rows: Iterable[Throughput | None]) -> tuple[str, ...]:
    """Return the names of the columns that :func:`throughput_cells` fills; none where nothing is known of any row."""
    known = next((each for each in rows if each is not None), None)
    if known is None:
        return ()
    rate, length = "samples" if known.tokens_per_s is None else "tokens", length_text(known.whole or known.unit)
    return f">{rate}/s", ">FLOPs utilisation", f">{length}", f">{length.removesuffix(' take')} cost"


def throughput_cells(throughput: Throughput | None) -> tuple[str, ...]:
    """Return what a step is in a row of a table."""
    if throughput is None:
        return ("",) * 4
    training, used = throughput.whole or throughput.unit, throughput.flops_utilisation
    return (
        figure(throughput.samples_per_s if throughput.tokens_per_s is None else throughput.tokens_per_s),
        "" if used is None else percentage(used),
        "" if throughput.whole is None else long_duration(training.duration_s),
        "" if training.cost is None else figure(training.cost),
    )
