"""Tables show every cell whole, at every width."""

import io
import re
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from autopar.report.table import MOST_ROWS, Table, as_text, bandwidth, duration, fill, say, size

WIDTHS = (40, 80, 100, 120)
MEASURES = ("ns", "us", "ms", "s", "B", "KiB", "MiB", "GiB", "TiB", "GB/s", "%", "x")

numbers = st.builds("{}{:.4g} {}".format, st.sampled_from(("", *"+-")), st.floats(1e-3, 9e5), st.sampled_from(MEASURES))
paths = st.lists(
    st.sampled_from(("model", "layers", "0", "17", "self_attn", "q_proj", "transformer")), min_size=1, max_size=7
).map(".".join)
stages = st.integers(1, 60).map(lambda count: ", ".join(f"{3 * at}-{3 * at + 2}:{at % 4 + 1}" for at in range(count)))
devices = st.integers(1, 40).map(lambda count: ", ".join(str(7 * at) for at in range(count)))
prose = st.lists(
    st.one_of(paths, numbers, st.sampled_from(("stage", "needs", "of", "a", "no", "3,145,728", "batch,"))), max_size=30
).map(" ".join)
texts = st.one_of(st.just(""), paths, stages, devices, prose, st.sampled_from(("1f1b", "measured", "数据并行")))
NAMES = ("stage", "layers", "measured over predicted", "micro-batches", "peak memory", "known")


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, list[list[str]]]:
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    headed = draw(st.booleans())
    names = [f"{'>' if number else ''}{draw(st.sampled_from(NAMES)) if headed else ''}" for number in kinds]
    cells = [st.one_of(st.just(""), numbers, devices) if number else texts for number in kinds]
    rows = draw(st.lists(st.tuples(*cells).map(list), min_size=1, max_size=5))
    footer = rows[0] if draw(st.booleans()) else []
    table = Table("Drawn", names, footer=footer)
    for row in rows:
        table.add_row(*row)
    return table, [*rows, footer]


def printed(table: object, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return stream.getvalue().splitlines()


def split(text: str) -> Counter[str]:
    return Counter(word for word in re.split(r"[\s,]+", text) if word)


@given(tables(), st.sampled_from(WIDTHS))
def test_no_cell_loses_a_character_and_no_word_is_broken_that_fits_a_line(
    drawn: tuple[Table, list[list[str]]], width: int
) -> None:
    table, rows = drawn
    lines = printed(table, width)
    assert all(cell_len(line) <= width for line in lines)
    shown, wanted = split("\n".join(lines)), split("\n".join(cell for row in rows for cell in row))
    whole = Counter({word: count for word, count in wanted.items() if cell_len(word) < width - 40})
    assert not whole - shown
    letters = Counter("".join(shown.elements()))
    assert not Counter("".join(wanted.elements())) - letters
    assert "…" not in "\n".join(lines)


def test_long_text_stands_below_its_row_short_text_is_folded_and_so_are_columns_for_which_there_is_no_room() -> None:
    stages = ", ".join(f"{at}:1" for at in range(39))
    table = Table("Plans", ("planner", ">step", "stages"))
    table.add_row("equal split", "12.5 ms", stages)
    narrow, wide = printed(table, 80), printed(table, 300)
    assert narrow[2] == "planner         step"
    assert narrow[4] == "equal split  12.5 ms"
    assert " ".join(line.strip() for line in narrow[5:-1]) == f"stages: {stages}"
    assert wide[4] == f"equal split  12.5 ms  {stages}"
    assert printed(table, len(wide[4]))[4] == wide[4]
    table = Table("Stages", (">stage", "layers", ">measured over predicted", ">empty"))
    table.add_row("0", "model.layers.0 .. model.layers.11", "1.2 x")
    assert printed(table, 40)[4:] == [
        "stage  layers                  predicted",
        "─" * 40,
        "    0  model.layers.0 ..           1.2 x",
        "       model.layers.11",
        "",
    ]
    table = Table("Numbers", [f">number {at}" for at in range(20)])
    table.add_row(*(f"{at}.5 GiB" for at in range(20)))
    lines = printed(table, 40)
    assert lines[2:4] == [" number   number   number   number", "      0        1        2        3"]
    assert "  number 19: 19.5 GiB" in lines


@pytest.mark.reliability(56)
def test_what_a_file_brings_along_is_shown_as_it_is_and_many_rows_cut_short() -> None:
    table = Table("a\x1b[31m title", ("name",))
    table.add_row("layer\x1b[2J\x07")
    assert "\x1b[" not in "".join(printed(table, 80)).replace("\\x1b[", "")
    assert any("\\x1b[2J" in line for line in printed(table, 80))
    table = Table("[bold]", ("[red]name",))
    table.add_row("[link]x[/link]")
    assert [line for line in printed(table, 80) if "[" in line] == ["[bold]", "[red]name", "[link]x[/link]"]
    for more, said in ((0, []), (1, ["... 1 more"]), (25, ["... 25 more"])):
        table = Table("Ranks", (">rank", ">time"))
        fill(table, [(str(rank), "1 ms") for rank in range(MOST_ROWS + more)])
        lines = printed(table, 80)
        assert [line for line in lines if "more" in line] == said
        assert len([line for line in lines if "1 ms" in line]) == MOST_ROWS
    table = Table("Plans", ("planner", ">step"))
    table.add_row("autopar", "1 ms")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=stream, width=80).print(table)
    stream.seek(0)
    assert "-------------" in stream.read()


@pytest.mark.parametrize("width", WIDTHS)
def test_notes_fold_at_words_and_leave_paths_whole(width: int) -> None:
    path = "/" + "/".join(["a-rather-long-folder"] * 9) + "/plan.json"
    stream = io.StringIO()
    say(Console(file=stream, width=width), f"Written: {path}; `autopar run {path}` carries it out")
    assert stream.getvalue().split() == f"Written: {path}; `autopar run {path}` carries it out".split()


UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}


def _value(text: str) -> float:
    number, unit = text.split(" ")
    return float(number) * UNITS[unit]


@settings(max_examples=50)
@example(9.996e-4, 1023, 1e6)
@given(st.floats(1e-9, 1e6), st.integers(0, 2**50), st.floats(1, 1e13))
def test_a_quantity_reads_back_within_half_a_digit(seconds: float, count: int, rate: float) -> None:
    assert abs(_value(duration(seconds)) - seconds) <= 0.0051 * seconds
    assert abs(_value(size(count)) - count) <= 0.0051 * count
    assert abs(_value(bandwidth(rate)) - rate) <= 0.0051 * rate
    for text in (duration(seconds), bandwidth(rate)):
        assert float(text.split(" ")[0]) < 1000 or text.endswith((" s", " GB/s"))


def test_text_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("Drawn", ["stage"])
    table.add_row("0")
    expected = as_text(["a note", table])
    # Where rich knows itself in a notebook, it shows cells' outputs.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert as_text(["a note", table]) == expected
    assert "a note" in expected
