"""Every block of the pages runs in order, and prints what the page shows; faults are found with their file and line."""

from pathlib import Path

import pytest

from page_blocks import Block, PageError, pages, read_page
from page_runs import commands_of, run_page
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
    (tmp_path / "folder").mkdir(exist_ok=True)
    run_page(read_page(tmp_path / "page.md"), tmp_path / "folder", processes=warm)


def test_pages_pass_or_fail_as_expected_and_calls_are_told_from_shells(tmp_path: Path) -> None:
    _run(tmp_path, SOUND)
    printed = "ValueError: invalid literal for int() with base 10: 'x'"
    page = f"<!-- fails -->\n```python\nint('x')\n```\n```text\n{printed}\n```\n"
    _run(tmp_path, page)
    with pytest.raises(PageError, match=r"page\.md:6: .* 'y'\", and the block prints .* 'x'\""):
        _run(tmp_path, page.replace("'x'\n```\n", "'y'\n```\n"))
    text = "ls\nmkdir a \\\n  b\nautopar plan 'a | b' \\\n  --gpus 2  # two; or more\nautopar show x > y\nautopar run\n"
    assert list(commands_of(Block(10, "bash", text))) == [
        (10, "ls\nmkdir a \\\n  b\n", None),
        (13, "autopar plan 'a | b' \\\n  --gpus 2  # two; or more\n", ["plan", "a | b", "--gpus", "2"]),
        (15, "autopar show x > y\n", None),
        (16, "autopar run\n", ["run"]),
    ]
    assert list(commands_of(Block(10, "bash", "cd x\nautopar run\n"))) == [(10, "cd x\nautopar run\n", None)]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("ms in all", "ms in part", 16, "the page shows 'it took 900 ms in part', and the block prints 'it took 5.5"),
        ("value 7\n", "value seven\n", 29, "prints 'value 3'"),
        ("all\n...\n", "all\n", 16, "the block prints another line: 'gpt.py'"),
        ("ls gpt.py", "ls gtp.py", 12, "fails: exit code 2"),
        ('print("value", value)', 'print("value",\n    missing)', 26, "NameError: name 'missing' is not defined"),
        ('print("value", value)', "import os; os._exit(3)", 25, "ends the process: exit code 3"),
        ("import value\n", "import value\nvalue +\n", 22, "SyntaxError"),
        ("plan.json  # a", "--no-such-option 3  # a", 34, "No such option: --no-such-option"),
        ("plan --gpus 8", "plan --gpus eight", 36, "Invalid value for '--gpus'"),
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
