"""Every block of the pages runs in order, and prints what the page shows; faults are found with their file and line."""

from pathlib import Path

import pytest

from page_blocks import Block, PageError, pages, read_page
from page_runs import command_lines, commands_of, run_page
from paths import ROOT
from suite import warm

SOUND = """<!-- folder: examples -->
# A page

<!-- file: values.py -->
```python
value = 3
```

```bash
echo "it took 5.5 s" \\
    "in all"
ls gpt.py
```

```text
it took 900 ms in all
...
```

```python
from values import value
```

```python
print("value", value)
```

```text
value 7
```

<!-- not run: needs a GPU -->
```bash
torchrun --nproc-per-node 2 -m autopar worker \\
    plan.json  # a rank
autopar plan --gpus 8 > plan.txt
```
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run_and_print_what_it_shows(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    run_page(read_page(path), folder, processes=warm, recorded=True)


def _run(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "folder").mkdir()
    run_page(read_page(tmp_path / "page.md"), tmp_path / "folder", processes=warm)


def test_a_sound_page_passes(tmp_path: Path) -> None:
    _run(tmp_path, SOUND)
    assert (tmp_path / "folder" / "gpt.py").is_file()


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        (
            "ms in all",
            "ms in part",
            16,
            "the page shows 'it took 900 ms in part', and the block prints 'it took 5.5 s in",
        ),
        ("value 7\n", "value seven\n", 29, "prints 'value 3'"),
        ("value 7\n", "value 7\n7\n", 30, "prints nothing more"),
        ("all\n...\n", "all\n", 16, "the block prints another line: 'gpt.py'"),
        ("ls gpt.py", "ls gtp.py", 12, "fails: exit code 2"),
        ('print("value", value)', 'print("value",\n    missing)', 26, "NameError: name 'missing' is not defined"),
        ('print("value", value)', "raise SystemExit(3)", 25, "SystemExit: 3"),
        ('print("value", value)', "import os; os._exit(3)", 25, "ends the process: exit code 3"),
        ("import value\n", "import value\nvalue +\n", 22, "SyntaxError"),
        ("plan.json  # a", "--no-such-option 3  # a", 34, "No such option: --no-such-option"),
        ("plan --gpus 8", "plan --gpus eight", 36, "Invalid value for '--gpus'"),
        ("autopar plan", "autopar plant", 36, "No such command 'plant'"),
        ("```text\nvalue", "It prints\n\n```text\nvalue", 31, "this text is the output of no block"),
        ("> plan.txt\n```\n", "> plan.txt\n", 33, "the block does not end"),
        ("```python\nfrom", "```\nfrom", 21, "is of no known language: ''"),
        ("<!-- not run: needs a GPU -->\n```bash", "<!-- fails -->\n```python\nx = 1\n```\n```yaml", 34, "does not"),
    ],
)
def test_a_fault_is_found_with_its_file_and_line(tmp_path: Path, old: str, new: str, line: int, said: str) -> None:
    assert SOUND.count(old) == 1
    with pytest.raises(PageError) as found:
        _run(tmp_path, SOUND.replace(old, new))
    assert str(found.value).startswith(f"page.md:{line}: ")
    assert said in str(found.value)


def test_an_error_may_be_expected_and_is_compared(tmp_path: Path) -> None:
    printed = "ValueError: invalid literal for int() with base 10: 'x'"
    page = f"<!-- fails -->\n```python\nint('x')\n```\n```text\n{printed}\n```\n"
    _run(tmp_path, page)
    (tmp_path / "folder").rmdir()
    with pytest.raises(PageError, match=r"page\.md:6: .* 'y'\", and the block prints .* 'x'\""):
        _run(tmp_path, page.replace("'x'\n```\n", "'y'\n```\n"))


def test_commands_are_found_behind_launchers_and_settings() -> None:
    text = (
        "cd autopar\nX=1 autopar run \\\n  --steps 2 && ls\npip install autopar\nsrun python -m autopar worker p.json\n"
    )
    assert list(command_lines(Block(10, "bash", text))) == [
        (11, ["run", "--steps", "2"]),
        (14, ["worker", "p.json"]),
    ]


def test_calls_of_autopar_that_need_no_shell_are_told_from_what_does() -> None:
    text = "ls\nmkdir a \\\n  b\nautopar plan 'a | b' \\\n  --gpus 2  # two; or more\nautopar show x > y\nautopar run\n"
    assert list(commands_of(Block(10, "bash", text))) == [
        (10, "ls\nmkdir a \\\n  b\n", None),
        (13, "autopar plan 'a | b' \\\n  --gpus 2  # two; or more\n", ["plan", "a | b", "--gpus", "2"]),
        (15, "autopar show x > y\n", None),
        (16, "autopar run\n", ["run"]),
    ]
    assert list(commands_of(Block(10, "bash", "cd x\nautopar run\n"))) == [(10, "cd x\nautopar run\n", None)]


def test_blocks_that_are_marked_run_where_their_reason_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- not run: takes minutes -->\n```bash\necho 1 > made\n```\n")
    (tmp_path / "folder").mkdir()
    page = read_page(tmp_path / "page.md")
    assert run_page(page, tmp_path / "folder", ("needs a GPU",)) == []
    assert not (tmp_path / "folder" / "made").exists()
    (found,) = run_page(page, tmp_path / "folder", ("takes minutes",))
    assert (found.line, found.reason) == (3, "takes minutes")
    assert (tmp_path / "folder" / "made").is_file()
